# SPDX-License-Identifier: Apache-2.0
"""gpu_memory = "direct": the driver hands GPU memory over, and the worker copies it (CUDA 13.4)."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from campaigns.rig import Rig, small_disk, with_config, with_driver
from campaigns.steady_job import SteadyJob
from gpustasis._core import (
    ImageReader,
    RegionKind,
    find_checkpoint_record,
    find_drop_record,
    image_name,
)
from gpustasis.criu.images import INVENTORY_NAME
from gpustasis.criu.plugin import Setting
from gpustasis.draining.drain import drain
from gpustasis.emulator import api_version_of, library_directory
from gpustasis.image.arena import Tier, stored_directory, tier_of
from gpustasis.image.verification import verify_directory
from support.arena import ram
from support.broken_dumps import break_off, recover
from support.cpu_memory import OURS, pages_bytes
from support.direct_memory import DIRECT, DRIVER, MIB, tasks

PROGRAMS = Path(__file__).resolve().parent.parent / "programs"


@pytest.fixture
def direct_rig(newest_rig: Rig) -> Iterator[Rig]:
    with with_driver(newest_rig, DRIVER) as rig:
        yield rig


def require_direct(images: Path, told_in: Path | None = None) -> None:
    found = tasks(told_in or images)
    assert [task["gpu_memory"] for task in found] == ["direct"] * len(found) != []
    for task in found:
        assert task["externalized"] and task["staging"] == "" and task["staged_bytes"] > 0
        image = ImageReader.open(images / image_name(task["image_pid"]))
        assert {region.kind for region in image.info.regions} == {RegionKind.DEVICE}
        assert sum(region.length for region in image.info.regions) == task["staged_bytes"]


def dump(rig: Rig, job: SteadyJob, *extra: str, **config: Setting) -> Path:
    images = rig.images()
    dumped = rig.dump(job, images, *extra, config={**DIRECT, **config})
    assert dumped.status == 0, dumped.errors
    if extra:
        rig.settle(images)
        job.run_on()
    return images


def come_back(
    rig: Rig, job: SteadyJob, images: Path, how: str = "direct", /, **config: Setting
) -> None:
    job.wait()
    rig.settle(images)
    done = rig.restore(images, config=config)
    assert done.status == 0, done.errors
    assert {task["gpu_memory"] for task in tasks(images, "restore")} == {how}
    job.run_on()


def test_a_job_runs_on_and_comes_back(direct_rig: Rig) -> None:
    rig = direct_rig
    with rig.job(mib=16, pinned_kib=256, children=1, plain_children=1) as job:
        dropped = dump(rig, job, "--leave-running", gpu_memory="staged")
        for extra in (["--leave-running"], []):
            images = dump(rig, job, *extra)
            require_direct(images)
            assert not verify_directory(images).problems
            # As much as with staging that is taken out: 16 MiB of each would be in it.
            assert abs(pages_bytes(images) - pages_bytes(dropped)) < 4 * MIB
        come_back(rig, job, images)
        # What came back can go again.
        images = dump(rig, job, "--leave-running")
        require_direct(images)


WAIT_FOR_LANE = """
import os, pathlib, sys, time
if os.environ["CRTOOLS_SCRIPT_ACTION"] != "pre-restore":
    sys.exit(0)
images = os.path.realpath(os.environ["CRTOOLS_IMAGE_DIR"])
def opened(pid):
    for fd in pathlib.Path("/proc", pid, "fd").iterdir():
        try:
            yield os.readlink(fd)
        except OSError:
            pass
def lanes(pid):
    for line in pathlib.Path("/proc", pid, "maps").read_text().splitlines():
        begin, end = (int(each, 16) for each in line.split()[0].split("-"))
        if "/dev/zero" in line and end - begin == 64 << 20:
            yield line
for _ in range(300):
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            name = pathlib.Path("/proc", pid, "comm").read_text().strip()
            if name == "gpustasis-work" and images in opened(pid) and any(lanes(pid)):
                sys.exit(0)
        except OSError:
            continue
    time.sleep(0.1)
sys.exit("no worker of this restore has 64 MiB of page-locked memory")
"""


def test_page_locked_memory_is_made_before_the_tasks_are(direct_rig: Rig, tmp_path: Path) -> None:
    """criu waits in the script: what is there when it ends was asked for before."""
    script = tmp_path / "script"
    script.write_text(f"#!{sys.executable}{WAIT_FOR_LANE}")
    script.chmod(0o755)
    with direct_rig.job(mib=16) as job:
        images = dump(direct_rig, job)
        job.wait()
        done = direct_rig.restore(images, "--action-script", str(script))
        assert done.status == 0, done.errors
        job.run_on()


def test_a_chain(direct_rig: Rig) -> None:
    rig = direct_rig
    with rig.job(mib=16, children=1) as job:
        # On a busy host the job gets around to all chunks of the usual size between two dumps.
        chain = [dump(rig, job, "--leave-running", chunk_size=4096)]
        for _ in range(2):
            chain.append(dump(rig, job, "--leave-running", parent=str(chain[-1])))
            assert all(task["ref"]["chunks"] > 0 for task in tasks(chain[-1]))
        # One that is staged may be built on it as well: chunks are known by what they hold.
        staged = dump(rig, job, "--leave-running", parent=str(chain[-1]), gpu_memory="staged")
        assert all(task["ref"]["chunks"] > 0 for task in tasks(staged))
        assert {task["gpu_memory"] for task in tasks(staged)} == {"staged"}
        last = dump(rig, job, parent=str(staged), parent_check="data")
        require_direct(last)
        come_back(rig, job, last)


@pytest.mark.parametrize("tier", ["disk", "ram"])
def test_images_that_a_job_needs_are_not_replaced(direct_rig: Rig, arena: Path, tier: str) -> None:
    """By the dump of another job, while nobody is left who would put the memory back by himself."""
    rig = direct_rig
    with rig.job(mib=8) as job, rig.job(mib=4) as other:
        images = rig.images()
        in_memory = ram(arena) if tier == "ram" else {}
        break_off(with_config(rig, {**DIRECT, **in_memory}), job, images)
        rig.settle(images)
        assert find_drop_record(job.pid) is None  # nothing was dropped
        assert find_checkpoint_record(job.pid) is not None
        (images / INVENTORY_NAME).unlink()  # as if criu had not come to its end
        stored = stored_directory(images)
        assert (stored == images) == (tier == "disk")
        image = stored / image_name(job.pid)
        before = image.read_bytes()
        for config in (None, DIRECT, ram(arena)):
            done = rig.dump(other, images, "--leave-running", config=config)
            assert done.status != 0
            words = f"{stored} holds memory that is missing in process {job.pid}"
            assert words in done.log, done.errors
            assert "locked pid" not in done.log
            assert image.read_bytes() == before
            other.run_on()
        recover(rig, job.pid, "-D", images)
        job.run_on()
        assert rig.dump(other, images, "--leave-running").status == 0
        other.run_on()


@pytest.mark.parametrize("how", ["disk", "ram", "drained"])
@pytest.mark.parametrize("kind", [{}, DIRECT], ids=["dropped", "handed over"])
def test_nor_is_what_those_images_are_built_on(
    direct_rig: Rig, arena: Path, kind: dict[str, Setting], how: str
) -> None:
    rig, keys = direct_rig, {**kind, **({} if how == "disk" else ram(arena))}
    with rig.job(mib=8) as job, rig.job(mib=4) as other:
        first, second, images = (rig.images() for _ in range(3))
        for into, parent in ((first, {}), (second, {"parent": str(first)})):
            dumped = rig.dump(job, into, "--leave-running", config={**keys, **parent})
            assert dumped.status == 0, dumped.errors
            rig.settle(into)
            job.run_on()
            if how == "drained":
                drain(into)
        break_off(with_config(rig, {**keys, "parent": str(second)}), job, images)
        rig.settle(images)
        (images / INVENTORY_NAME).unlink(missing_ok=True)
        for needed in (first, second):
            for config in ({"tier": "disk"}, ram(arena)):
                done = rig.dump(other, needed, "--leave-running", config=config)
                assert done.status != 0
                assert f"memory that is missing in process {job.pid}" in done.log, done.errors
                assert "locked pid" not in done.log
                other.run_on()
        unrelated = rig.images()
        assert rig.dump(other, unrelated, "--leave-running").status == 0
        assert rig.dump(other, unrelated, "--leave-running").status == 0
        if how == "drained":  # wherever it is now, and whatever leads there
            images.rename(moved := images.with_name("moved"))
            assert rig.dump(other, first, "--leave-running").status != 0
            moved.rename(images)
        recover(rig, job.pid, "-D", images)
        job.run_on()
        other.run_on()
        if how == "disk":  # what is in memory only is not replaced either way
            assert rig.dump(other, second, "--leave-running").status == 0
            other.run_on()


def test_with_cpu_memory_of_the_same_tasks_and_packed(direct_rig: Rig) -> None:
    rig = direct_rig
    with rig.job(mib=16, pinned_kib=1024, children=1, plain_threads=2) as job:
        images = dump(rig, job, layout="packed", **OURS)
        require_direct(images)
        come_back(rig, job, images)


def test_several_gpus_of_one_task_also_when_they_are_exchanged(direct_rig: Rig) -> None:
    """With stripes of both, and more on one than on the other."""
    rig = direct_rig
    with rig.job(mib=160, gpus=2, children=1) as job:
        first = dump(rig, job, "--leave-running")
        last = dump(rig, job, parent=str(first))
        for task in tasks(last):
            image = ImageReader.open(last / image_name(task["image_pid"]))
            assert [region.address >> 26 & 0xFF for region in image.info.regions] == [0, 1, 0]
        come_back(rig, job, last)
        again = dump(rig, job)
        come_back(rig, job, again, gpu_map=["0=1", "1=0"])
        moves = json.loads((again / "gpustasis-restore.json").read_text())["gpu_moves"]
        assert len(moves) == 2
        dump(rig, job, "--leave-running")


@pytest.mark.parametrize("in_memory", [False, True])
def test_chunks_that_are_not_copied_go_round_in_the_page_locked_memory(
    direct_rig: Rig, arena: Path, *, in_memory: bool
) -> None:
    """What goes through the page cache or to a tmpfs is written from there and read to there, here
    more of one GPU than fits into it."""
    rig = direct_rig
    settings: dict[str, Setting] = ram(arena) if in_memory else {"io": "buffered"}
    with rig.job(mib=160, gpus=2) as job:
        for _ in range(2):
            images = dump(rig, job, "--leave-running", **settings)
            require_direct(stored_directory(images), images)
            assert not verify_directory(images).problems
        last = dump(rig, job, **settings)
        come_back(rig, job, last, **settings)
        dump(rig, job, "--leave-running")


def test_into_memory_first_and_drained(direct_rig: Rig, arena: Path) -> None:
    rig = direct_rig
    with rig.job(mib=16, children=1) as job:
        # On a busy host the job gets around to all chunks of the usual size between two dumps.
        first = dump(rig, job, "--leave-running", **ram(arena, chunk_size=4096))
        require_direct(stored_directory(first), first)
        assert tier_of(first) == Tier.LOCAL
        last = dump(rig, job, **ram(arena, parent=str(first)))
        assert all(task["ref"]["chunks"] > 0 for task in tasks(last))
        come_back(rig, job, last)
        job.end()
        drain(last)
        assert tier_of(first) == tier_of(last) == Tier.DURABLE
        assert not verify_directory(last).problems
        require_direct(last)
        done = rig.restore(last)
        assert done.status == 0, done.errors
        job.run_on()


def test_auto_is_direct_where_the_driver_can_and_staged_elsewhere(
    newest_rig: Rig, direct_rig: Rig
) -> None:
    for rig, expected in ((direct_rig, "direct"), (newest_rig, "staged")):
        with rig.job(mib=16) as job:
            images = dump(rig, job, gpu_memory="auto")
            (task,) = tasks(images)
            assert task["gpu_memory"] == expected
            assert ("13.4" in task["staged_because"]) == (expected == "staged")
            job.wait()


def test_asked_for_by_name_it_is_refused_where_the_driver_cannot(newest_rig: Rig) -> None:
    rig = newest_rig
    with rig.job(mib=16) as job:
        dumped = rig.dump(job, images := rig.images(), config=DIRECT)
        assert dumped.status != 0
        assert 'gpu_memory = "direct": the driver is of CUDA 13.0' in dumped.errors
        rig.settle(images)
        job.run_on()


@pytest.fixture
def poor_driver(compile_c: Callable[..., Path]) -> Callable[[str], Path]:
    """poor_driver(call) -> the emulator's, but for one call, for which there is no memory."""

    def compile_it(call: str) -> Path:
        library = library_directory(api_version_of(DRIVER))
        words = ("-shared", "-fPIC", "-Wl,--no-as-needed", f"-L{library}", "-l:libcuda.so.1")
        return compile_c(PROGRAMS / "poor_driver.c", *words, f"-DCALL={call}")

    return compile_it


# What is missing, and what is said then.
LACKING = {
    "externalize": "externalize is off",
    "nvml": "which GPUs the process uses is not known: there is no NVML",
    "cuInit": "cuInit: CUDA_ERROR_OPERATING_SYSTEM",
    "cuDevicePrimaryCtxRetain": "cuDevicePrimaryCtxRetain on GPU-.*OUT_OF_MEMORY",
    "cuMemHostAlloc": "cuMemHostAlloc.*OUT_OF_MEMORY",
}


@pytest.mark.parametrize("lacks", LACKING)
def test_what_it_needs_is_had_before_anything_is_locked(
    direct_rig: Rig, poor_driver: Callable[[str], Path], lacks: str
) -> None:
    """Asked for by name it is an error, and "auto" is staged."""
    rig, words = direct_rig, LACKING[lacks]
    config: dict[str, Setting] = {}
    if lacks in ("externalize", "nvml"):
        config = {lacks: False if lacks == "externalize" else "/nonexistent/libnvidia-ml.so.1"}
    elif lacks != "cuInit":
        config = {"driver": str(poor_driver(lacks))}
    with rig.job(mib=16) as job:
        for how in ("direct", "auto"):
            if lacks == "cuInit":
                rig.emulator.add_fault("init", "error")
            images = rig.images()
            done = rig.dump(job, images, config={**config, "gpu_memory": how})
            assert rig.emulator.status()["faults"] == []
            if how == "direct":
                assert done.status != 0
                assert re.search(f'gpu_memory = "direct": {words}', done.log), done.errors
                assert "locked pid" not in done.log
                rig.settle(images)
                job.run_on()
        assert done.status == 0, done.errors
        (task,) = tasks(images)
        stored = "" if lacks == "externalize" else "staged"  # "": all is in criu's images
        assert task["gpu_memory"] == stored
        assert re.search(words, task["staged_because"]), task["staged_because"]
        come_back(rig, job, images, stored)


def test_an_image_of_it_is_refused_by_a_driver_that_cannot_take_it_back(
    newest_rig: Rig, direct_rig: Rig
) -> None:
    with direct_rig.job(mib=16) as job:
        images = dump(direct_rig, job)
        job.wait()
        direct_rig.settle(images)
        done = newest_rig.restore(images, config={"requirements": "ignore"})
        assert done.status != 0
        assert "cannot take it back" in done.errors
        done = direct_rig.restore(images)
        assert done.status == 0, done.errors
        job.run_on()


def test_a_disk_without_room_for_the_worst_case_stops_it_before_the_driver_is_asked(
    direct_rig: Rig,
) -> None:
    rig = direct_rig
    with (
        rig.job(mib=64) as job,
        small_disk(rig.scratch / "disk", 24 * MIB) as disk,
    ):
        images = disk / "images"
        images.mkdir(mode=0o700)
        rig.emulator.add_fault("checkpoint", "error")
        dumped = rig.dump(job, images, config=DIRECT)
        assert dumped.status != 0
        assert re.search(r"reserve \d+ MiB: No space left on device", dumped.errors), dumped.errors
        assert len(rig.emulator.status()["faults"]) == 1  # the driver was not asked
        rig.emulator.clear_faults()
        rig.settle(images)
        job.run_on()
