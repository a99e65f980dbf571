# SPDX-License-Identifier: Apache-2.0
"""CPU memory in images of ours: what CRIU is not told of comes back, and no job is touched by its
dump."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from campaigns.rig import Rig
from campaigns.steady_job import SteadyJob
from gpustasis._core import (
    ImageInfo,
    ImageReader,
    Manifest,
    ManifestTask,
    MemoryKind,
    Region,
    image_name,
    read_manifest,
    write_image,
    write_manifest,
)
from gpustasis.image.flatten import flatten
from gpustasis.image.inspection import inspect_directory
from gpustasis.image.verification import verify_directory
from support.cpu_memory import (
    OURS,
    WITHOUT_PLUGIN,
    go_on,
    pages_bytes,
    refused,
    require_counted,
    require_dead,
    require_refused_when_damaged,
    resident,
    running,
    shared_places,
    stop,
)
from support.inventory import images_name, rename_images

CRIU = {"cpu_memory": "criu"}
KINDS = (MemoryKind.GPU, MemoryKind.CPU)
MIB = 200
WITHOUT_PAGEMAP_SCAN = 135  # CRIU's FI_DONT_USE_PAGEMAP_SCAN
LEFT_TO_CRIU = 40 << 20  # stacks, windows, what is shared or small: of one process of these


def told(images: Path, stage: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((images / f"gpustasis-{stage}.json").read_text())[
        "cpu_memory"
    ]
    return found


def test_a_tree_comes_back_exactly(rig: Rig, memory_job: Path) -> None:
    with running(rig, memory_job, mib=MIB) as job:
        stop(job)  # as it is measured, so it is dumped and restored
        before = resident(job.pid)
        images = rig.images()
        dumped = rig.dump(job, images, config=OURS)
        assert dumped.status == 0, dumped.errors
        job.wait()
        (task,) = told(images, "dump")
        assert task["bytes"] > MIB << 20
        assert task["scans"] > 0 and task["stored_twice_bytes"] == 0
        restored = rig.restore(images, config=CRIU)  # what the checkpoint is, it says itself
        assert restored.status == 0, restored.errors
        after = resident(job.pid)
        go_on(job)
        job.run_on()
        assert after.exact == before.exact
        require_counted(before, MIB << 10)
        made = after.huge_kb - before.huge_kb
        grown = sum(after.may_grow.values()) - sum(before.may_grow.values())
        assert 0 <= grown <= made
        # Holes that were filled before the dump come back in small pages.
        dumped_kb = (task["bytes"] + pages_bytes(images)) >> 10
        assert after.kb <= dumped_kb + after.own_huge_kb
        # What the kernel makes once the plugin has looked, CRIU finds.
        assert pages_bytes(images) < LEFT_TO_CRIU + (made << 10)
        (again,) = told(images, "restore")
        assert again["bytes"] == task["bytes"]


def test_criu_dumps_what_it_is_told_of_without_the_key(newest_rig: Rig, memory_job: Path) -> None:
    with running(newest_rig, memory_job, mib=40, criu_restores=True) as job:
        images = newest_rig.images()
        assert newest_rig.dump(job, images).status == 0
        job.wait()
        assert pages_bytes(images) > 40 << 20
        assert not list(images.glob("gpustasis-*"))
        assert newest_rig.restore(images).status == 0
        job.run_on()


def test_what_a_child_shares_stays_shared(rig: Rig, memory_job: Path) -> None:
    # Criu lets go of one thread of a stopped process before the other: those run on for a moment.
    with running(rig, memory_job, mib=100, children=1, threads=0) as job:
        stop(job)  # as it is measured, so it is dumped and restored
        before = [resident(pid) for pid in job.pids]
        places = shared_places(job.pids) & before[0].shared.keys()
        assert all(sum(one.shared[place] for place in places) > 20 << 10 for one in before)  # kB
        images = rig.images()
        dumped = rig.dump(job, images, config=OURS)
        assert dumped.status == 0, dumped.errors
        job.wait()
        assert len(told(images, "dump")) == len(job.pids)
        restored = rig.restore(images)
        assert restored.status == 0, restored.errors
        after = [resident(pid) for pid in job.pids]
        go_on(job)
        job.run_on()
        for was, now in zip(before, after, strict=True):
            losses = {place: was.shared[place] - now.shared[place] for place in places}
            lost = {place: kb for place, kb in losses.items() if kb > 0}
            assert sum(lost.values()) <= now.huge_kb - was.huge_kb, lost
            assert now.exact == was.exact
            require_counted(was, 100 << 10)


def test_a_job_that_is_left_running_runs_on_at_once_and_its_dumps_chain(
    newest_rig: Rig, memory_job: Path
) -> None:
    # Criu lets go of one thread of a stopped process before the other: those run on for a moment.
    # The kernel makes huge pages of sparse memory at any moment, which fills its holes.
    with running(newest_rig, memory_job, mib=40, threads=0, sparse=0) as job:
        first, second, third = (newest_rig.images() for _ in range(3))
        assert newest_rig.dump(job, first, "--leave-running", config=OURS).status == 0
        job.run_on()
        stop(job)  # from now on nothing changes
        for parent, images, extra in ((first, second, ["--leave-running"]), (second, third, [])):
            config = OURS | {"parent": str(parent)}
            dumped = newest_rig.dump(job, images, *extra, config=config)
            assert dumped.status == 0, dumped.errors
        job.wait()
        (changed,), (same,) = told(second, "dump"), told(third, "dump")
        assert (
            changed["ref"]["chunks"] > 0 and changed["raw"]["chunks"] + changed["lz4"]["chunks"] > 0
        )
        assert same["raw"]["chunks"] == same["lz4"]["chunks"] == 0
        assert same["ref"]["plain_bytes"] + same["zero"]["plain_bytes"] == same["bytes"]
        sources = ImageReader.open(third / image_name(job.pid, MemoryKind.CPU)).info.sources
        assert {(source.kind, source.pid) for source in sources} == {(MemoryKind.CPU, job.pid)}
        assert {source.depth for source in sources} == {1, 2}  # whoever holds the bytes
        assert not verify_directory(third).problems
        flat = newest_rig.scratch / "flat"
        flatten(third, flat)
        assert not verify_directory(flat).problems
        assert newest_rig.restore(flat).status == 0
        go_on(job)
        job.run_on()


def test_what_criu_asks_in_another_way_is_stored_twice_and_said(
    newest_rig: Rig, memory_job: Path
) -> None:
    with running(newest_rig, memory_job, mib=40, criu_restores=True) as job:
        images = newest_rig.images()
        words = newest_rig.dump_words(job, images)
        words = ["/usr/bin/env", f"CRIU_FAULT={WITHOUT_PAGEMAP_SCAN}", *words]
        dumped = newest_rig.run(words, images, "dump", OURS)
        assert dumped.status == 0, dumped.errors
        job.wait()
        (task,) = told(images, "dump")
        assert task["scans"] == 0 and task["stored_twice_bytes"] == task["bytes"] > 40 << 20
        assert pages_bytes(images) > 40 << 20
        assert "criu did not ask this plugin about" in dumped.log
        assert newest_rig.restore(images).status == 0
        job.run_on()


def test_gpu_and_cpu_memory_of_one_job(rig: Rig) -> None:
    options = {"mib": 32, "pinned_kib": 4096, "children": 1, "plain_threads": 2}
    with rig.job(module=rig.programs.kernels, **options) as job:
        images = rig.images()
        left = rig.dump(job, images, "--leave-running", config=OURS)
        assert left.status == 0, left.errors
        job.run_on()
        images = rig.images()
        dumped = rig.dump(job, images, config=OURS)
        assert dumped.status == 0, dumped.errors
        job.wait()
        manifest = read_manifest(images)
        kinds = [(task.pid, task.kind) for task in manifest.tasks]
        assert set(kinds) == {(pid, kind) for pid in job.pids for kind in KINDS}
        assert not verify_directory(images).problems
        restored = rig.restore(images)
        assert restored.status == 0, restored.errors
        job.run_on()


def test_a_failed_dump_says_nothing_of_what_criu_has_not_asked(
    newest_rig: Rig, memory_job: Path
) -> None:
    with running(newest_rig, memory_job, mib=20, children=1) as job:
        images = newest_rig.images()
        (images / image_name(job.pids[-1], MemoryKind.CPU)).mkdir()
        log = refused(newest_rig.dump(job, images, config=OURS))
        assert f"MiB of CPU memory of pid {job.pid} in" in log  # stored, and hidden
        assert "criu did not ask this plugin about" not in log
        assert [task["stored_twice_bytes"] for task in told(images, "dump")] == [0, 0]
        job.run_on()


@pytest.fixture
def checkpoint(newest_rig: Rig, memory_job: Path) -> Iterator[tuple[SteadyJob, Path]]:
    with running(newest_rig, memory_job, mib=40, children=1) as job:
        images = newest_rig.images()
        assert newest_rig.dump(job, images, config=OURS).status == 0
        job.wait()
        yield job, images


def test_a_damaged_image_kills_all(newest_rig: Rig, checkpoint: tuple[SteadyJob, Path]) -> None:
    job, images = checkpoint
    name = image_name(job.pids[-1], MemoryKind.CPU)
    require_refused_when_damaged(newest_rig, job, images, name)


@pytest.mark.parametrize("other", [False, True], ids=["memory not mapped", "no such process"])
def test_an_image_that_does_not_fit_the_processes_kills_all(
    newest_rig: Rig, checkpoint: tuple[SteadyJob, Path], other: bool
) -> None:
    job, images = checkpoint
    forged = newest_rig.copy(images)
    manifest = read_manifest(forged)
    pid = max(job.pids) + (1 if other else 0)
    address = 1 << 30
    info = ImageInfo(
        pid=pid,
        checkpoint_id=manifest.checkpoint_id,
        regions=[Region(address, 4096)],
        kind=MemoryKind.CPU,
    )
    path = forged / image_name(pid, MemoryKind.CPU)
    digest = write_image(path, info, [(address, bytes(4096))]).digest
    task = ManifestTask(pid=pid, externalized=True, digest=digest, kind=MemoryKind.CPU)
    tasks = [*(one for one in manifest.tasks if one.pid != pid), task]
    write_manifest(forged, Manifest(checkpoint_id=manifest.checkpoint_id, tasks=tasks))
    rename_images(forged, images_name(forged))  # else it is refused for that
    log = refused(newest_rig.restore(forged))
    why = "is of a process that criu has not made" if other else "the task does not map 0x40000000"
    assert path.name in log and why in log
    require_dead(job)


def test_stock_criu_refuses_the_checkpoint(
    newest_rig: Rig, checkpoint: tuple[SteadyJob, Path]
) -> None:
    job, images = checkpoint
    assert WITHOUT_PLUGIN in refused(newest_rig.restore(images, plugin=False))
    assert not job.alive_pids()


def test_inspect_shows_cpu_memory(checkpoint: tuple[SteadyJob, Path]) -> None:
    job, images = checkpoint
    found = inspect_directory(images)
    views = {process.pid: process.cpu_memory for process in found.processes}
    assert {pid for pid, view in views.items() if view} == set(job.pids)
    assert found.cpu_image_bytes == sum(
        (images / image_name(pid, MemoryKind.CPU)).stat().st_size for pid in job.pids
    )


def test_auto_takes_what_is_large(newest_rig: Rig, memory_job: Path) -> None:
    for mib, taken in ((4, False), (100, True)):
        with running(newest_rig, memory_job, mib=mib, threads=0 if mib == 4 else 2) as job:
            images = newest_rig.images()
            config = {"cpu_memory": "auto"}
            assert newest_rig.dump(job, images, "--leave-running", config=config).status == 0
            job.run_on()
            assert (images / image_name(job.pid, MemoryKind.CPU)).exists() == taken
