# SPDX-License-Identifier: Apache-2.0
"""Stock CRIU, without any plugin, and the checkpoint API called by hand."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from gpustasis.emulator import Emulator, Options
from support.job import Job, ended

Call = Callable[..., tuple[int, int]]
Stock = Callable[..., subprocess.CompletedProcess[str]]
PROGRAMS = Path(__file__).resolve().parent / "programs"


def dump(stock: Stock, job: Job, images: Path) -> None:
    ended = stock("dump", "-t", str(job.pid), "-D", images, "-o", "dump.log")
    assert ended.returncode == 0, (images / "dump.log").read_text()[-2000:]
    assert job.wait() == -signal.SIGKILL


def restore(stock: Stock, images: Path) -> None:
    ended = stock("restore", "-d", "-D", images, "-o", "restore.log")
    assert ended.returncode == 0, (images / "restore.log").read_text()[-2000:]


def checkpoint(caller: Call, job: Job) -> None:
    assert caller("lock", job.pid)[0] == 0
    assert caller("checkpoint", job.pid)[0] == 0


def resume(caller: Call, job: Job, *words: str) -> None:
    assert caller("state", job.pid) == (0, 2)
    assert caller("restore", job.pid, "init", *words)[0] == 0
    assert caller("unlock", job.pid)[0] == 0


@pytest.mark.parametrize("locked", [False, True])
def test_a_process_that_was_not_checkpointed_is_refused(
    vectors: Callable[..., Job], caller: Call, stock: Stock, images: Path, locked: bool
) -> None:
    job = vectors()
    if locked:
        assert caller("lock", job.pid)[0] == 0
    ended = stock("dump", "-t", str(job.pid), "-D", images, "-o", "dump.log")
    assert ended.returncode != 0
    if locked:
        assert caller("unlock", job.pid)[0] == 0
    rounds = job.output().count("ok")
    job.wait_for("ok", count=rounds + 2)


def test_memory_survives(
    vectors: Callable[..., Job], caller: Call, stock: Stock, images: Path, emulator: Emulator
) -> None:
    job = vectors(20)
    checkpoint(caller, job)
    dump(stock, job, images)
    assert emulator.status()["gpus"][0]["used_bytes"] == 0
    restore(stock, images)
    rounds = job.output().count("ok")
    resume(caller, job)
    job.wait_for("ok", count=rounds + 5)
    assert emulator.status()["gpus"][0]["used_bytes"] == 40 << 20


def test_memory_of_the_process_before_is_waited_for(
    vectors: Callable[..., Job],
    caller: Call,
    checkpoint_call: Path,
    emulator_environ: dict[str, str],
    stock: Stock,
    images: Path,
) -> None:
    """A job that is killed and restored: it has its pid again, and what gives back the GPU memory
    of the one before may not have had a processor."""
    job = vectors(70)  # 140 of 256 MiB
    checkpoint(caller, job)
    words = ("-t", str(job.pid), "-D", images, "--leave-running")
    assert stock("dump", *words).returncode == 0
    resume(caller, job)
    deadline = time.monotonic() + 30
    while len(workers := workers_of(job.pid)) != 1:  # that of before the checkpoint is to end yet
        assert time.monotonic() < deadline, workers
    (worker,) = workers
    os.kill(worker, signal.SIGSTOP)
    try:
        job.signal(signal.SIGKILL)
        job.wait()
        restore(stock, images)
        argv = [str(checkpoint_call), "restore", str(job.pid), "init"]
        with ended(subprocess.Popen(argv, env=emulator_environ, stdout=subprocess.PIPE)) as asking:
            time.sleep(0.5)  # it has its answer by then, if nothing is waited for
            assert asking.poll() is None
            os.kill(worker, signal.SIGCONT)
            assert asking.communicate(timeout=60)[0] == b"0 0\n"
    finally:
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGCONT)
    rounds = job.output().count("ok")
    assert caller("unlock", job.pid)[0] == 0
    job.wait_for("ok", count=rounds + 5)


def workers_of(pid: int) -> list[int]:
    """The emulator's processes that stand for the GPU to this one."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (entry / "comm").read_text() == "gpustasis-gpuwr\n":
                infos = [info.read_text() for info in (entry / "fdinfo").iterdir()]
                if any(f"Pid:\t{pid}\n" in info for info in infos):
                    found.append(int(entry.name))
    return found


def test_kernels_streams_and_events_survive(
    launch_cuda: Callable[..., Job],
    compile_cuda: Callable[..., Path],
    kernels: Path,
    caller: Call,
    stock: Stock,
    images: Path,
    tmp_path: Path,
) -> None:
    module = tmp_path / "module.so"
    module.write_bytes(kernels.read_bytes())
    job = launch_cuda([compile_cuda(PROGRAMS / "kernel_rounds.c"), module])
    job.wait_for("round 2 ok")
    checkpoint(caller, job)
    module.unlink()  # the process carries its modules itself
    for generation in ("one", "two"):
        folder = images / generation
        folder.mkdir()
        dump(stock, job, folder)
        restore(stock, folder)
        rounds = job.output().count("ok")
        resume(caller, job)
        job.wait_for("ok", count=rounds + 3)
        checkpoint(caller, job)


def test_it_goes_to_another_daemon(
    launch: Callable[..., Job],
    compile_cuda: Callable[..., Path],
    lone: Callable[..., Emulator],
    emulator_environ: dict[str, str],
    caller: Call,
    stock: Stock,
    images: Path,
    tmp_path: Path,
) -> None:
    """The GPUs it had are gone; others of the same kind, named by pairs, take their place."""
    first = lone(gpus=1, memory_bytes=64 << 20)
    environ = emulator_environ | {"GPUSTASIS_EMULATOR": str(first.path)}
    job = launch([compile_cuda(PROGRAMS / "plain_vectors.c"), "8", "1000000", "5"], environ)
    job.wait_for("round 1 ok")
    checkpoint(caller, job)
    dump(stock, job, images)
    old = first.status()["gpus"][0]["uuid"]
    first.stop()
    restore(stock, images)
    assert caller("restore", job.pid, "init")[0] == 304  # no daemon
    first.start(Options(gpus=2, memory_bytes=128 << 20))
    new = first.status()["gpus"][1]["uuid"]
    assert caller("restore", job.pid, "init")[0] == 1  # its GPU is not there
    assert caller("restore", job.pid, "init", plain(new), plain(new))[0] == 1
    rounds = job.output().count("ok")
    resume(caller, job, plain(old), plain(new))
    job.wait_for("ok", count=rounds + 3)
    assert [gpu["used_bytes"] for gpu in first.status()["gpus"]] == [0, 16 << 20]


def plain(uuid: str) -> str:
    return uuid.removeprefix("GPU-").replace("-", "")
