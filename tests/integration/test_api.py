# SPDX-License-Identifier: Apache-2.0
"""The public Python API, with every CRIU; and what it costs to import it."""

from __future__ import annotations

import errno
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import get_type_hints

import pytest

import gpustasis
from gpustasis import api
from gpustasis.criu.find import Criu
from support.job import Job

Generations = Callable[..., Job]


@pytest.fixture
def own(criu: Criu, emulator_environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the criu to give; this process is on the emulator."""
    for name, value in emulator_environ.items():
        monkeypatch.setenv(name, value)
    return str(criu.root or criu.program)


def check_memory(job: Job, generation: int) -> None:
    job.signal(signal.SIGUSR1)
    job.wait_for(f"intact {generation}\n")


def test_a_job_s_life(own: str, gpu_generations: Generations, tmp_path: Path) -> None:
    job = gpu_generations()
    lines: list[str] = []
    one = gpustasis.checkpoint(
        job.pid, tmp_path / "one", leave_running=True, criu=own, on_line=lines.append
    )
    assert one.dump is not None and one.dump.statistics is not None
    assert one.dump.pid == job.pid and lines
    two = gpustasis.checkpoint(job.pid, str(tmp_path / "two"), parent=one, criu=own, threads=2)
    job.wait()
    assert two.dump is not None and two.dump.statistics is not None
    assert two.dump.statistics.same_bytes > 0

    found = gpustasis.open(tmp_path / "two")
    assert found.dump is None
    assert found.verify().problems == []
    assert found.verify().earlier_checkpoints == 1
    assert found.inspect().parent is not None
    assert one.diff(two).amounts.in_b > 0
    assert found.flatten(tmp_path / "flat").images == 1
    done = gpustasis.restore(tmp_path / "flat", criu=own, pidfile=tmp_path / "pid")
    assert done.pid == job.pid == int((tmp_path / "pid").read_text())
    check_memory(job, 0)
    # A process of its own: the driver that it loads is the emulator's.
    script = f"import gpustasis; print(gpustasis.recover({job.pid}, {str(two.path)!r}))"
    argv = [sys.executable, "-c", script]
    said = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    assert "refilled_bytes=0" in said
    assert [v.action for v in gpustasis.prune(tmp_path, keep_last=5, dry_run=True).verdicts]
    job.signal(signal.SIGTERM)
    assert job.wait() == 0


def test_errors_are_its_own(own: str, tmp_path: Path) -> None:
    with pytest.raises(gpustasis.ImageError, match="does not exist"):
        gpustasis.open(tmp_path / "none")
    with pytest.raises(gpustasis.ImageError):
        gpustasis.open(tmp_path).inspect()
    with pytest.raises(gpustasis.CriuError, match="there is no process"):
        gpustasis.checkpoint(2**22, tmp_path / "x", criu=own)
    with pytest.raises(gpustasis.CheckpointError, match="both running and stopped"):
        gpustasis.checkpoint(2, tmp_path / "y", leave_running=True, leave_stopped=True)
    with pytest.raises(gpustasis.CheckpointError, match="left stopped cannot be waited for"):
        gpustasis.restore(tmp_path, criu=own, detached=False, leave_stopped=True)
    with pytest.raises(TypeError, match="no_such_option"):
        gpustasis.restore(tmp_path, criu=own, no_such_option=1)  # type: ignore[call-arg]
    (tmp_path / "archive.tar").write_bytes(b"")
    with pytest.raises(gpustasis.CheckpointError, match="no image directory"):
        gpustasis.open(tmp_path / "archive.tar").restore()


def test_a_pidfile_that_is_there_is_refused_before_anything_is_restored(
    own: str, gpu_generations: Generations, tmp_path: Path
) -> None:
    job = gpu_generations()
    made = gpustasis.checkpoint(job.pid, tmp_path / "one", criu=own)
    job.wait()
    (tmp_path / "pid").write_text("7")
    with pytest.raises(gpustasis.CheckpointError, match="exists already"):
        made.restore(criu=own, pidfile=tmp_path / "pid")
    assert not job.alive()
    assert (tmp_path / "pid").read_text() == "7"


@pytest.mark.parametrize("word", ["--pidfile=x", "--pidf", "-o", "--log-file", "-Dx", "--lib"])
def test_what_we_set_ourselves_cannot_follow_the_dashes(
    own: str, tmp_path: Path, word: str
) -> None:
    with pytest.raises(gpustasis.CheckpointError, match=re.escape(word)):
        gpustasis.restore(tmp_path, criu=own, criu_args=[word, "y"])


# Between dump and restore its port is nobody's: at the usual address another test may be given it.
ADDRESS = "127.0.0.86"
LISTENER = """
import fcntl, socket, sys, time
server = socket.create_server((sys.argv[2], 0)); held = open(sys.argv[1], "w")
fcntl.flock(held, fcntl.LOCK_EX)
print(server.getsockname()[1], flush=True)
peer, _ = server.accept()
print("accepted", flush=True)
while data := peer.recv(100):
    peer.sendall(data)
"""


def cannot_dump_sockets(criu: Criu) -> bool:
    """CRIU before 4.2 reads SO_PASSCRED of every socket, and fails if it cannot. From Linux 6.16 on
    only a Unix or netlink socket has it; CRIU 4.2 reads it of those alone. No other version has an
    excuse."""
    with socket.socket() as tcp:
        try:
            tcp.getsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED)
        except OSError as exc:
            assert exc.errno == errno.EOPNOTSUPP
            return criu.version < (4, 2)
    return False


def test_connections_and_locks_are_kept_where_asked(
    criu: Criu, own: str, launch: Callable[..., Job], tmp_path: Path
) -> None:
    job = launch([sys.executable, "-c", LISTENER, str(tmp_path / "lock"), ADDRESS])
    job.wait_for("\n")
    port = int(job.output().split()[0])
    with socket.create_connection((ADDRESS, port), timeout=30) as client:
        job.wait_for("accepted\n")
        with pytest.raises(gpustasis.CriuError, match=r"tcp|lock"):
            gpustasis.checkpoint(job.pid, tmp_path / "a", criu=own)
        assert job.alive()
        options = gpustasis.CriuOptions(
            criu=own,
            tcp_established=True,
            file_locks=True,
            criu_args=["--network-lock", "skip"],  # which takes no iptables
        )
        if cannot_dump_sockets(criu):
            with pytest.raises(gpustasis.CriuError, match="sockets: Can't get 1:16 opt"):
                gpustasis.checkpoint(job.pid, tmp_path / "b", **options)
            assert job.alive()
            return
        made = gpustasis.checkpoint(job.pid, tmp_path / "b", **options)
        job.wait()
        made.restore(**options)
        client.sendall(b"still there")
        assert client.recv(100) == b"still there"
    deadline = time.monotonic() + 30
    while job.alive() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not job.alive()


def test_a_large_file_without_a_name_needs_a_ghost_limit(
    own: str, launch: Callable[..., Job], tmp_path: Path
) -> None:
    script = (
        "import os, sys, time\nfile = open(sys.argv[1], 'wb')\nos.unlink(sys.argv[1])\n"
        "file.write(b'x' * (2 << 20)); file.flush()\nprint('ready', flush=True)\ntime.sleep(1000)"
    )
    job = launch([sys.executable, "-c", script, str(tmp_path / "ghost")])
    job.wait_for("ready\n")
    with pytest.raises(gpustasis.CriuError, match=r"[Gg]host"):
        gpustasis.checkpoint(job.pid, tmp_path / "a", criu=own, leave_running=True)
    gpustasis.checkpoint(job.pid, tmp_path / "b", criu=own, leave_running=True, ghost_limit=4 << 20)


def criu_options(criu: Criu, action: str) -> set[str]:
    """Long options that criu(8) of this version describes for dump or restore."""
    assert criu.root is not None
    page = criu.root / "usr/share/man/man8/criu.8.gz"
    argv = ["man", "-l", "-E", "utf-8", str(page)]
    text = subprocess.run(
        argv,
        capture_output=True,
        text=True,
        check=True,
        env={"MANWIDTH": "200", "PATH": "/usr/bin:/bin"},
    ).stdout
    text = re.sub(r".\x08|\x1b\[[0-9;]*m", "", text)
    sections = re.split(r"^   (\S.*)$", text, flags=re.MULTILINE)
    found = dict(zip(sections[1::2], sections[2::2], strict=True))
    wanted = found["Common options"] + found[action]
    return set(re.findall(r"--([a-z][a-z-]+)", wanted))


OURS = {
    *("json", "criu", "threads", "no-shell-job", "parent", "max-chain", "compress", "externalize"),
    *("cpu-memory", "layout", "to", "key"),
    *("output", "spool", "input", "source-may-run", "stall-timeout", "two-way", "one-way"),
    *("restore-timeout", "tier", "wait"),
}
OF_RESTORE = {"detach", "foreground", "gpu-map", "ignore-requirements", "key", "key-command"}


@pytest.mark.parametrize("action", ["dump", "restore"])
def test_options_with_criu_s_names_are_criu_s(criu: Criu, action: str) -> None:
    """Each option of checkpoint and restore is one of ours, or criu has it for that action."""
    from gpustasis.cli import tasks

    command = tasks.checkpoint if action == "dump" else tasks.restore
    words = {w for p in command.params for w in (*p.opts, *p.secondary_opts) if w.startswith("--")}
    names = {word.removeprefix("--") for word in words} - OURS - OF_RESTORE
    help_text = subprocess.run(
        [*criu.command({}), "--help"], capture_output=True, text=True, check=False
    ).stdout
    assert {"tcp-established", "shell-job", "file-locks"} <= names
    assert names <= criu_options(criu, action)
    assert all(f"--{name}" in help_text for name in names)


def test_the_package_is_cheap_to_import() -> None:
    script = (
        "import sys, gpustasis\nfrom gpustasis import errors, __version__\ndir(gpustasis)\n"
        "print(sorted(n for n in sys.modules if n.startswith('gpustasis')))\n"
        "print({'click', 'rich', 'json', 'typing', 'pathlib', 'lz4', 'cffi'} & {*sys.modules})\n"
        "from gpustasis import Checkpoint, CheckpointError\n"
        "assert CheckpointError is errors.CheckpointError\n"
        "print('gpustasis.api' in sys.modules, 'click' in sys.modules)"
    )
    argv = [sys.executable, "-I", "-S", "-c", script]
    place = str(Path(gpustasis.__file__).parent.parent)
    argv[-1] = f"import sys; sys.path.append({place!r})\n" + script
    said = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()
    assert said == ["['gpustasis', 'gpustasis.errors']", "set()", "True False"]


def test_names_are_documented_and_stable(repository: Path) -> None:
    text = (repository / "docs/api.md").read_text()
    for name in gpustasis.__all__:
        assert getattr(gpustasis, name) is not None
        assert f"`{name}" in text, name
    for options in (api.CriuOptions, api.RestoreOptions):
        for name in get_type_hints(options):
            assert f"`{name}`" in text, name
    with pytest.raises(AttributeError, match="no_such"):
        _ = gpustasis.no_such  # type: ignore[attr-defined]


def test_the_examples_of_the_document(
    own: str, gpu_generations: Generations, tmp_path: Path, repository: Path
) -> None:
    job = gpu_generations()
    blocks = re.findall(
        r"^```python\n(.*?)^```$",
        (repository / "docs/api.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    assert len(blocks) == 2
    names = {"pid": job.pid, "criu": own, "folder": tmp_path}
    for number, block in enumerate(blocks):
        exec(compile(block, "docs/api.md", "exec"), names)  # noqa: S102 - our own document
        if number == 0:
            job.wait()  # a child's pid is free only then
    check_memory(job, 0)
