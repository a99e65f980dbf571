# SPDX-License-Identifier: Apache-2.0
"""Processes that a CUDA process has forked, as a DataLoader's workers are: they have inherited the
driver's device files and mappings, cannot use them, and are dumped and restored without them.

A block device stands for the NVIDIA driver's, under a name of its own: one that can be opened many
times and mapped, and that CRIU cannot dump.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from campaigns.rig import Rig
from gpustasis.diagnosis.container_checks import was_forked_by
from gpustasis.emulator import RATES_OFF, Emulator, Options, api_version_of
from support.job import Job

PROGRAMS = Path(__file__).resolve().parent.parent / "programs"
STAND_IN = Path("/dev/nvidia97")
STRANGER = Path("/dev/nvidia98")
DRIVER = "580.159.04"
Compile = Callable[..., Path]


@pytest.fixture
def devices() -> Iterator[None]:
    for path in (STAND_IN, STRANGER):
        path.unlink(missing_ok=True)
        os.mknod(path, stat.S_IFBLK | 0o666, os.makedev(7, 7))  # a loop device without a file
    yield
    for path in (STAND_IN, STRANGER):
        path.unlink(missing_ok=True)


@pytest.fixture
def heirs_rig(rig: Rig, devices: None, tmp_path: Path) -> Iterator[Rig]:
    """Each criu, on an emulator whose device files are the stand-in."""
    emulator = Emulator(path=tmp_path / "emulator" / "socket")
    emulator.start(Options(gpus=1, memory_bytes=64 << 20, driver=DRIVER, rates=RATES_OFF))
    emulator.set("device_path", str(STAND_IN))
    environ = dict(os.environ) | emulator.environment(api_version_of(DRIVER))
    own = Rig(rig.criu, emulator, environ, rig.programs, rig.scratch)
    yield own
    own.close()
    emulator.stop()


@contextmanager
def running(rig: Rig, compile_cuda: Compile, *words: str, name: str = "heirs") -> Iterator[Job]:
    program = rig.scratch / name
    program.unlink(missing_ok=True)  # what runs it yet keeps it
    shutil.copy(compile_cuda(PROGRAMS / "heirs.c"), program)
    job = Job([program, *words], rig.scratch / "job.log", rig.environ)
    try:
        children = sum(not word.startswith(("keep=", "self=")) for word in words)
        for pid in tree(job, 1 + children + words.count("grandchild")):
            job.wait_for(f"{pid} step")
        yield job
    finally:
        job.end()


def tree(job: Job, count: int) -> list[int]:
    """The job's pid, then its children's; there are `count` of them."""
    job.wait_for("step")
    found: list[int] = []
    while len(found) < count:
        found = [job.pid]
        for pid in found:
            children = Path(f"/proc/{pid}/task/{pid}/children")
            found += [int(word) for word in children.read_text().split()]
        assert job.alive(), job.output()
    return found


def run_on(job: Job, pids: list[int]) -> None:
    for pid in pids:
        said = job.output().count(f"\n{pid} step")
        job.wait_for(f"\n{pid} step", count=said + 3)
    assert "WRONG" not in job.output()


def open_devices(pid: int) -> dict[int, str]:
    """By number: what of the driver's, or in its place, is open beyond the first three."""
    found = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        target = os.readlink(entry)
        if int(entry.name) > 2 and target.startswith(("/dev/nvidia", "/dev/null")):
            found[int(entry.name)] = target
    return found


def mapped(pid: int) -> dict[str, str]:
    """All shared mappings by range of addresses and protection: path."""
    text = Path(f"/proc/{pid}/maps").read_text()
    return dict(re.findall(r"^(\S+ ...s) \S+ \S+ \d+ +(\S.*)$", text, re.MULTILINE))


def mapped_devices(pid: int) -> dict[str, str]:
    """Those of the driver's devices."""
    return {where: path for where, path in mapped(pid).items() if path.startswith("/dev/nvidia")}


def close_on_exec(pid: int, fd: int) -> bool:
    flags = re.search(r"flags:\s+(\d+)", Path(f"/proc/{pid}/fdinfo/{fd}").read_text())
    assert flags
    return bool(int(flags[1], 8) & os.O_CLOEXEC)


def killed(job: Job, pids: list[int]) -> None:
    """By the dump. Children of what is killed come to this process."""
    job.wait()
    for pid in pids[1:]:
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)


def dump(rig: Rig, job: Job, *extra: str, config: dict[str, str] | None = None) -> Path:
    images = rig.images()
    words = rig.dump_words(job, images, extra)
    ended = rig.run(words, images, "dump", config)
    assert ended.status == 0, ended.log[-3000:]
    return images


def restore(rig: Rig, images: Path, config: dict[str, str] | None = None) -> None:
    ended = rig.run(rig.restore_words(images), images, "restore", config)
    assert ended.status == 0, ended.log[-3000:]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("layout", ["criu", "packed"])
def test_forked_children_are_dumped_and_restored_without_the_devices(
    heirs_rig: Rig, compile_cuda: Compile, layout: str
) -> None:
    with running(heirs_rig, compile_cuda, "fork", "close", "grandchild") as job:
        pids = tree(job, 5)
        before = {pid: (open_devices(pid), mapped_devices(pid)) for pid in pids}
        for pid in pids[1:]:
            files, mappings = before[pid]
            assert set(mappings.values()) == {str(STAND_IN)}  # so that stock CRIU would fail
            assert set(files.values()) <= {str(STAND_IN)}
            assert was_forked_by(pid, job.pid)  # doctor knows it too
        assert sum(not before[pid][0] for pid in pids) == 1  # the one that has closed them
        flags = {(p, fd): close_on_exec(p, fd) for p in pids[1:] for fd in before[p][0]}

        images = dump(heirs_rig, job, config={"layout": layout})
        killed(job, pids)
        restore(heirs_rig, images, {"layout": layout})
        run_on(job, pids)
        for pid in pids[1:]:
            files, mappings = before[pid]
            assert open_devices(pid) == dict.fromkeys(files, "/dev/null")
            after = mapped(pid)
            assert {after[where] for where in mappings} == {"/dev/zero (deleted)"}
        assert {(p, fd): close_on_exec(p, fd) for p, fd in flags} == flags
        assert set(open_devices(job.pid).values()) == {str(STAND_IN)}  # the driver's own

        again = dump(heirs_rig, job)  # what was restored is dumped like anything else
        killed(job, pids)
        restore(heirs_rig, again)
        run_on(job, pids)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", ["heirs", "cuda_training_loop"])
def test_a_job_that_is_left_running_keeps_what_its_children_have(
    heirs_rig: Rig, compile_cuda: Compile, name: str
) -> None:
    """The driver closes the parent's files at a checkpoint and opens others: those of the children
    are nobody else's from then on. The name of no program is taken for a driver's thread's."""
    with running(heirs_rig, compile_cuda, "fork", "close", "grandchild", name=name) as job:
        pids = tree(job, 5)
        before = {pid: (open_devices(pid), mapped_devices(pid)) for pid in pids[1:]}
        for _ in range(3):
            dump(heirs_rig, job, "--leave-running")
            run_on(job, pids)
            assert {p: (open_devices(p), mapped_devices(p)) for p in pids[1:]} == before
        last = dump(heirs_rig, job)
        killed(job, pids)
        restore(heirs_rig, last)
        run_on(job, pids)


CHECKPOINT = """
import sys
from gpustasis.driver import Driver
driver, pid = Driver(), int(sys.argv[1])
driver.lock(pid, 10_000)
driver.checkpoint(pid)
"""


@pytest.mark.timeout(180)
def test_children_of_a_job_that_was_found_checkpointed_are_dumped(
    heirs_rig: Rig, compile_cuda: Compile
) -> None:
    """The driver has closed all that the job had open."""
    with running(heirs_rig, compile_cuda, "fork", "grandchild") as job:
        pids = tree(job, 4)
        # Not in this process: the library of the driver would ask this emulator for ever.
        words = [sys.executable, "-c", CHECKPOINT, str(job.pid)]
        subprocess.run(words, env=heirs_rig.environ, check=True, timeout=60)
        assert not open_devices(job.pid)
        assert all(open_devices(pid) for pid in pids[1:])
        images = dump(heirs_rig, job, config={"found_locked": "dump"})
        killed(job, pids)
        restore(heirs_rig, images)
        run_on(job, pids)


@pytest.mark.timeout(180)
def test_the_jobs_own_device_files_are_closed_in_programs_as_before(
    heirs_rig: Rig, compile_cuda: Compile
) -> None:
    """The driver's Restore opens half of them so that a program which the job executes inherits
    them (docs/hardware.md)."""
    with running(heirs_rig, compile_cuda) as job:

        def left_open() -> list[int]:
            return [fd for fd in open_devices(job.pid) if not close_on_exec(job.pid, fd)]

        assert open_devices(job.pid)
        assert left_open() == []
        for _ in range(2):
            dump(heirs_rig, job, "--leave-running")
            assert left_open() == []
            run_on(job, [job.pid])
        images = dump(heirs_rig, job)
        job.wait()
        restore(heirs_rig, images)
        run_on(job, [job.pid])
        assert open_devices(job.pid)
        assert left_open() == []


def refused(rig: Rig, job: Job, pids: list[int]) -> str:
    """criu's log of a dump that must fail before the GPU is touched, and leave the job as it is."""
    images = rig.images()
    ended = rig.run(rig.dump_words(job, images), images, "dump")  # type: ignore[arg-type]
    assert ended.status != 0
    assert "checkpointed pid" not in ended.log
    run_on(job, pids[:1])
    assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    return ended.log


@pytest.mark.timeout(120)
def test_a_device_that_was_not_inherited_refuses_the_dump_before_the_gpu_is_touched(
    heirs_rig: Rig, compile_cuda: Compile
) -> None:
    with running(heirs_rig, compile_cuda, "fork", f"open={STRANGER}") as job:
        pids = tree(job, 3)
        log = refused(heirs_rig, job, pids)
        assert was_forked_by(pids[1], job.pid) != was_forked_by(pids[2], job.pid)
        stranger = next(pid for pid in pids[1:] if str(STRANGER) in open_devices(pid).values())
        assert (
            f"pid {stranger} has {STRANGER} open, is no CUDA process, and has not inherited that"
            in log
        )


def codec(compile_c: Compile, directory: Path) -> Path:
    """A library that is named as one of the driver's that codes video."""
    source = directory / "library.c"
    source.write_text("int no_codec;\n")
    library = directory / "libnvidia-encode.so.1"
    library.write_bytes(compile_c(source, "-shared", "-fPIC").read_bytes())
    return library


@pytest.mark.timeout(120)
def test_a_forked_child_that_uses_a_gpu_by_itself_refuses_the_dump(
    heirs_rig: Rig, compile_cuda: Compile, compile_c: Compile, tmp_path: Path
) -> None:
    """It would have nothing to use it with after a restore, and not be told."""
    library = codec(compile_c, tmp_path)
    for words, what in (
        ((f"own={STRANGER}",), f"{STRANGER} open"),
        ((f"load={library}",), f"{library} loaded"),
        ((f"load={library}", f"rank={library}"), f"{library} loaded"),  # another CUDA task has it
    ):
        with running(heirs_rig, compile_cuda, *words) as job:
            pids = tree(job, 1 + len(words))
            log = refused(heirs_rig, job, pids)
            assert re.search(rf"pid ({'|'.join(map(str, pids[1:]))}) has {what}, is no CUDA", log)


@pytest.mark.timeout(120)
def test_a_library_that_the_job_has_loaded_itself_is_no_sign_of_a_child_that_uses_a_gpu(
    heirs_rig: Rig, compile_cuda: Compile, compile_c: Compile, tmp_path: Path
) -> None:
    library = codec(compile_c, tmp_path)
    with running(heirs_rig, compile_cuda, f"self={library}", f"rank={library}", "fork") as job:
        pids = tree(job, 3)
        images = dump(heirs_rig, job)
        killed(job, pids)
        restore(heirs_rig, images)
        run_on(job, pids)


@pytest.mark.timeout(120)
def test_a_device_that_a_cuda_process_keeps_open_refuses_the_dump(
    heirs_rig: Rig, compile_cuda: Compile
) -> None:
    """The driver does not close what it has not opened, and nothing stands for that."""
    with running(heirs_rig, compile_cuda, "fork", f"keep={STRANGER}") as job:
        pids = tree(job, 2)
        images = heirs_rig.images()
        ended = heirs_rig.run(heirs_rig.dump_words(job, images), images, "dump")  # type: ignore[arg-type]
        assert ended.status != 0
        assert f"the process still has {STRANGER} open after the driver has" in ended.log
        run_on(job, pids)
