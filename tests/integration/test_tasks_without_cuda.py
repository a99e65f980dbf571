# SPDX-License-Identifier: Apache-2.0
"""Trees that hold what looks like CUDA and is none, or what has ended before it can be looked
at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from campaigns.rig import Rig
from gpustasis.driver import Driver
from gpustasis.errors import DriverError
from support.job import Job

PROGRAMS = Path(__file__).resolve().parent.parent / "programs"
NO_DRIVER = {"driver": "/nonexistent/libcuda.so.1"}  # a host without one
DUMPS = 10
Compile = Callable[..., Path]


@contextmanager
def running(rig: Rig, words: list[str | Path]) -> Iterator[Job]:
    job = Job(words, rig.scratch / "job.log", rig.environ)
    try:
        job.wait_for("step 2 ok")
        yield job
    finally:
        job.end()


def run_on(job: Job) -> None:
    job.wait_for("step", count=job.output().count("step") + 3)


def dump(rig: Rig, job: Job, *extra: str, config: dict[str, str] | None = None) -> tuple[int, str]:
    """criu's exit status, and its log."""
    images = rig.images()
    words = rig.dump_words(job, images, extra)  # type: ignore[arg-type]
    ended = rig.run(words, images, "dump", config)
    return ended.status, ended.log


def library(rig: Rig) -> str:
    return str(Path(rig.environ["LD_LIBRARY_PATH"].split(":")[0]) / "libcuda.so.1")


def test_children_that_end_meanwhile_do_not_fail_the_dump(
    newest_rig: Rig, compile_c: Compile
) -> None:
    with running(newest_rig, [compile_c(PROGRAMS / "spawner.c")]) as job:
        for _ in range(DUMPS):
            status, log = dump(newest_rig, job, "--leave-running")
            assert status == 0, log[-2000:]
            run_on(job)


@pytest.mark.parametrize("name", ["cuda-gdb", "cuda00001400006"])
def test_a_name_does_not_make_a_cuda_process_of_one_without_a_driver(
    newest_rig: Rig, compile_c: Compile, name: str
) -> None:
    with running(newest_rig, [compile_c(PROGRAMS / "thread_name.c"), name]) as job:
        status, log = dump(newest_rig, job, "--leave-running", config=NO_DRIVER)
        assert status == 0, log[-2000:]
        run_on(job)


def hostile(rig: Rig, compile_c: Compile) -> tuple[list[str | Path], Path]:
    """A job that would have the driver write to a file that it has open for reading, and the
    file."""
    readable = rig.scratch / "readable"
    readable.write_bytes(b"what only root may change")
    program = compile_c(PROGRAMS / "thread_name.c")
    shell = f'exec "{program}" cudaFILE "{library(rig)}" < "{readable}"'
    return ["/bin/sh", "-c", shell], readable


def test_a_thread_name_does_not_have_the_driver_write_to_a_file(
    newest_rig: Rig, compile_c: Compile
) -> None:
    words, readable = hostile(newest_rig, compile_c)
    before = readable.read_bytes()
    with running(newest_rig, words) as job:
        status, log = dump(newest_rig, job, "--leave-running")
        assert readable.read_bytes() == before
        assert status != 0
        assert "is not a pipe" in log, log[-2000:]
        run_on(job)


def test_recover_asks_nothing_of_a_driver_that_would_write_to_a_file(
    newest_rig: Rig, compile_c: Compile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUSTASIS_EMULATOR", newest_rig.environ["GPUSTASIS_EMULATOR"])
    driver = Driver(library(newest_rig))
    words, readable = hostile(newest_rig, compile_c)
    before = readable.read_bytes()
    with running(newest_rig, words) as job:
        for ask in (
            driver.get_state,
            lambda pid: driver.lock(pid, 1000),
            driver.checkpoint,
            driver.restore,
            driver.unlock,
        ):
            with pytest.raises(DriverError, match="is not a pipe"):
                ask(job.pid)
        assert readable.read_bytes() == before
