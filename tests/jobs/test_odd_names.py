# SPDX-License-Identifier: Apache-2.0
"""Names that a task, or another user, has chosen: none of them ends a keeper, stops a rank, or
makes anything of root's look like something else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpustasis.errors import JobError
from gpustasis.jobs.checkpointing import Checkpointing
from gpustasis.jobs.rank import Context, _criu_pids
from gpustasis.jobs.stopping import Orphans, children, strays
from gpustasis.jobs.work import Order
from gpustasis.streaming import tree
from gpustasis.task import read_task
from jobs.test_undoing import context, server, task  # noqa: F401 - fixtures
from support.job_ranks import wait_for

NOT_UTF_8 = b"\xff\x0bUid:\t0\t0\t0"
NAMED = "import os, sys; open('/proc/self/comm', 'wb').write(bytes.fromhex(sys.argv[1]))\n"


@pytest.fixture(autouse=True)
def childless() -> None:
    """In place of that of conftest.py: this process's children are looked at."""


@contextmanager
def named(name: bytes, more: str = "import time; time.sleep(1000)") -> Iterator[int]:
    """A child of that name."""
    words = [sys.executable, "-c", NAMED + more, name.hex()]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as child:
        comm = Path(f"/proc/{child.pid}/comm")
        wait_for(lambda: comm.read_bytes().startswith(name[:2]), "its name")
        try:
            yield child.pid
        finally:
            child.kill()


def ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def test_a_name_that_is_no_text_ends_no_keeper() -> None:
    with named(NOT_UTF_8) as pid:
        Orphans().reap(0)
        assert pid in strays(0)
        assert read_task(pid).pid == pid


def test_what_has_come_to_a_keeper_and_ended_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpustasis.jobs.stopping._UNCLAIMED_S", 0.2)
    orphans = Orphans()
    root, other = os.fork(), 0
    if root == 0:
        os._exit(3)
    other = os.fork()
    if other == 0:
        os._exit(0)
    wait_for(lambda: ended(root) and ended(other), "their end")
    orphans.reap(root)  # the first look: somebody may wait for it this moment
    assert {root, other} <= set(children())
    time.sleep(0.3)
    orphans.reap(root)
    assert other not in children()
    assert os.waitstatus_to_exitcode(os.waitpid(root, 0)[1]) == 3  # the root's is not lost


def test_what_has_left_the_tree_is_no_part_of_a_checkpoint(
    context: Context,  # noqa: F811
    task: subprocess.Popen[bytes],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    context.note(pid=task.pid)
    gone = "(sleep 1000 >/dev/null & echo $!)"  # what started it ends
    daemon = int(subprocess.run(["sh", "-c", gone], stdout=subprocess.PIPE, check=True).stdout)
    wait_for(lambda: daemon in children(), "it has come to this process")
    monkeypatch.setattr("gpustasis.jobs.stopping.children", lambda: [task.pid, daemon])
    try:
        with pytest.raises(JobError, match=f"process {daemon} has left the tree below {task.pid}"):
            Checkpointing(context, Order(1, leave_running=True, restores=0)).look()
    finally:
        os.kill(daemon, signal.SIGKILL)
        os.waitpid(daemon, 0)


def test_a_setuid_program_with_the_words_of_criu_is_none(tmp_path: Path) -> None:
    images = str(tmp_path / "epoch-00000007")
    words = ["sh", "--action-script", images]
    own = ["python3", "-c", "import time; time.sleep(1000)", "--action-script", images]
    with subprocess.Popen(own, executable=sys.executable) as mine:
        wait_for(lambda: _criu_pids(images) == [mine.pid], "a process of this user")
        mine.kill()
    # As after execve of a setuid program: root's in effect, and started by another user.
    become = "import os, time; os.setresuid(65534, 0, 0); time.sleep(1000)"
    theirs = ["python3", "-c", become, *words[1:]]
    with subprocess.Popen(theirs, executable=sys.executable) as decoy:
        status = Path(f"/proc/{decoy.pid}/status")
        wait_for(lambda: "Uid:\t65534\t0\t0" in status.read_text(), "another real user")
        assert _criu_pids(images) == []
        decoy.kill()


def test_a_mount_of_any_name_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source may be empty, and have every end of a line that str.splitlines knows."""
    proc = tmp_path / "self"
    proc.mkdir()
    (proc / "mountinfo").write_bytes(
        b"36 35 0:31 / /a\x0bb\x85 rw,relatime shared:1 - fuse a\x0bb\x1c rw,user_id=0\n"
        b"37 35 0:32 / /none rw - tmpfs  rw\n"
        b"38 35 0:33 /sub /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
    )
    monkeypatch.setattr(tree, "PROC", tmp_path)
    assert tree._mounts("cgroup2", "") == [("/sub", Path("/sys/fs/cgroup"))]
    assert tree._mounts("tmpfs", "") == [("/", Path("/none"))]
