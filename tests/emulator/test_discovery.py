# SPDX-License-Identifier: Apache-2.0
"""How a caller finds the restore thread, and what it is told where there is none."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from support.job import Job

Call = Callable[..., tuple[int, int]]
PROGRAMS = Path(__file__).resolve().parent / "programs"
NOBODY = 65534
TIMEOUT_S = 30.0


def await_text(path: Path, pattern: str) -> str:
    """What is in the file, once it begins so."""
    deadline = time.monotonic() + TIMEOUT_S
    while re.match(pattern, text := path.read_text()) is None:
        assert time.monotonic() < deadline, text
        time.sleep(0.001)
    return text


def thread_names(pid: int) -> dict[int, str]:
    tasks = Path(f"/proc/{pid}/task")
    return {int(task.name): (task / "comm").read_text().strip() for task in tasks.iterdir()}


def test_restore_thread_has_the_name_of_its_pipes(
    vectors: Callable[..., Job], caller: Call
) -> None:
    job = vectors()
    code, tid = caller("tid", job.pid)
    assert code == 0
    names = thread_names(job.pid)
    matching = [one for one, name in names.items() if re.fullmatch("cuda[0-9a-f]{11}", name)]
    assert matching == [tid]
    assert sorted(names)[1] == tid  # the first thread after the main one
    value = int(names[tid][4:], 16)
    request, reply = (Path(f"/proc/{job.pid}/fd/{fd}") for fd in (value >> 22, value & 0x3FFFFF))
    assert os.readlink(request).startswith("pipe:")
    assert os.readlink(reply).startswith("pipe:")
    flags = [
        int(re.findall(r"flags:\s*(\d+)", Path(f"/proc/{job.pid}/fdinfo/{fd}").read_text())[0], 8)
        for fd in (value >> 22, value & 0x3FFFFF)
    ]
    assert [flag & os.O_ACCMODE for flag in flags] == [os.O_WRONLY, os.O_RDONLY]
    assert not any(flag & os.O_NONBLOCK for flag in flags)
    assert names[job.pid] == "plain_vectors"
    assert sorted(names.values()).count("cuda-EvtHandlr") == 1
    assert sorted(names.values()).count("plain_vectors") == 2


def test_restore_thread_waits_in_poll(vectors: Callable[..., Job], caller: Call) -> None:
    job = vectors()
    _, tid = caller("tid", job.pid)
    # Its name is there before it waits.
    text = await_text(Path(f"/proc/{job.pid}/task/{tid}/syscall"), "7 ")  # poll
    _, *arguments = text.split()
    assert int(arguments[1], 16) == 3
    assert int(arguments[2], 16) & 0xFFFFFFFF == 0xFFFFFFFF


def test_any_thread_of_the_target_will_do(vectors: Callable[..., Job], caller: Call) -> None:
    job = vectors()
    answers = {caller("tid", tid) for tid in thread_names(job.pid)}
    assert answers == {caller("tid", job.pid)}
    assert caller("state", max(thread_names(job.pid))) == (0, 0)


def test_process_without_cuda_is_not_initialized(launch: Callable[..., Job], caller: Call) -> None:
    program = "import time; print('up', flush=True); time.sleep(60)"
    job = launch([sys.executable, "-c", program])
    job.wait_for("up")
    for call in ("tid", "state", "lock", "checkpoint", "restore", "unlock"):
        assert caller(call, job.pid)[0] == 3


def test_missing_process_is_an_error_of_the_system(caller: Call) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    for call in ("tid", "state", "lock", "checkpoint", "restore", "unlock"):
        assert caller(call, gone.pid)[0] == 304
    assert caller("state", -1)[0] == 1  # a guess


def test_foreign_user_is_refused_by_the_system(vectors: Callable[..., Job], caller: Call) -> None:
    job = vectors()
    assert caller("tid", job.pid, uid=NOBODY)[0] == 0  # names of threads are public
    for call in ("state", "lock", "checkpoint", "unlock"):
        assert caller(call, job.pid, uid=NOBODY)[0] == 304
    assert caller("state", job.pid) == (0, 0)


def test_forked_child_has_no_driver(
    launch_cuda: Callable[..., Job], compile_cuda: Callable[..., Path], caller: Call
) -> None:
    job = launch_cuda([compile_cuda(PROGRAMS / "fork_child.c")])
    job.wait_for("ready")
    job.wait_for("child ")  # whichever of the two comes first
    match = re.search(r"child (\d+) (\d+) (\d+) (\d+)", job.output())
    assert match is not None
    child, *codes = map(int, match.groups())
    assert codes == [3, 3, 3]
    inherited = [os.readlink(fd) for fd in Path(f"/proc/{child}/fd").iterdir()]
    own = [os.readlink(fd) for fd in Path(f"/proc/{job.pid}/fd").iterdir()]
    assert sorted(inherited) == sorted(own)
    assert thread_names(child) == {child: "fork_child"}
    assert caller("tid", child)[0] == 3
    assert caller("lock", job.pid)[0] == 0
