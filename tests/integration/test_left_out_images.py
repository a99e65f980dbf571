# SPDX-License-Identifier: Apache-2.0
"""What a dump has put into images of ours, a restore fills: a manifest that does not list all of it
is refused before anything is created, and no process runs on zeros."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from campaigns.rig import Rig
from campaigns.steady_job import SteadyJob
from gpustasis._core import (
    ImageInfo,
    ImageReader,
    Manifest,
    ManifestTask,
    MemoryKind,
    read_manifest,
    write_image,
    write_manifest,
)
from gpustasis.criu.images import inventory_plugins
from gpustasis.image.flatten import flatten
from support.cpu_memory import OURS, refused, running
from support.inventory import NAMES_IMAGES, images_name, rename_images

FORKING = "Forking task"  # in criu's log
LEFT_OUT = "does not list the memory that the dump has left out of CRIU's images"
NO_SOURCE = "is missing or was replaced: "  # what another image refers to: chunks of it as well
OLDER = "an older gpustasis made this checkpoint"

Keep = Callable[[ManifestTask], bool]


def forge(images: Path, tasks: list[ManifestTask]) -> None:
    """A manifest of the same checkpoint that lists these alone."""
    old = read_manifest(images)
    forged = Manifest(
        checkpoint_id=old.checkpoint_id,
        driver_api_version=old.driver_api_version,
        driver_version=old.driver_version,
        gpus=old.gpus,
        tasks=tasks,
        requirements=old.requirements,
    )
    write_manifest(images, forged)


def leave_out(images: Path, keep: Keep, *, files: bool) -> None:
    """What is not kept is gone from the manifest and, with `files`, its image as well."""
    tasks = read_manifest(images).tasks
    kept = [task for task in tasks if keep(task)]
    assert len(kept) < len(tasks)
    forge(images, kept)
    if files:
        for task in tasks:
            if not keep(task):
                (images / task.image_name).unlink()


def sources_of(images: Path, tasks: list[ManifestTask]) -> set[str]:
    """Images that hold chunks of others: what tasks have alike is stored once."""
    infos = [ImageReader.open(images / task.image_name).info for task in tasks]
    return {source.image_name for info in infos for source in info.sources}


def require_refused(rig: Rig, images: Path, job: SteadyJob, why: str = LEFT_OUT) -> None:
    log = refused(rig.restore(images))
    assert why in log and FORKING not in log
    assert not job.alive_pids()
    failed = json.loads((images / "gpustasis-restore.json").read_text())
    assert failed["result"] == "failed" and why in failed["error"]


def require_restored(rig: Rig, images: Path, job: SteadyJob) -> str:
    """criu's log."""
    restored = rig.restore(images)
    assert restored.status == 0, restored.errors
    assert FORKING in restored.log  # so that it is known by that word whether a process was made
    job.run_on()
    return restored.log


@pytest.fixture
def memory(newest_rig: Rig, memory_job: Path) -> Iterator[tuple[SteadyJob, Path]]:
    """Two processes without CUDA, and their checkpoint."""
    with running(newest_rig, memory_job, mib=20, children=1, threads=1) as job:
        images = newest_rig.images()
        assert newest_rig.dump(job, images, config=OURS).status == 0
        job.wait()
        yield job, images


@pytest.fixture
def both(newest_rig: Rig) -> Iterator[tuple[SteadyJob, Path]]:
    """Two processes with GPU and CPU memory, and their checkpoint."""
    options = {"mib": 8, "children": 1}
    with newest_rig.job(module=newest_rig.programs.kernels, **options) as job:
        images = newest_rig.images()
        dumped = newest_rig.dump(job, images, config=OURS)
        assert dumped.status == 0, dumped.errors
        job.wait()
        assert len(read_manifest(images).tasks) == 4
        yield job, images


def test_the_inventory_says_what_the_images_hold(rig: Rig) -> None:
    with rig.job(mib=8, children=1) as job:
        images = rig.images()
        assert rig.dump(job, images, config=OURS).status == 0
        job.wait()
        id_name = f"checkpoint-{read_manifest(images).checkpoint_id.hex()}"
        names = {id_name, "gpustasis", NAMES_IMAGES, images_name(images)}
        found = inventory_plugins(images)
        assert set(found) == names and len(found) == len(names)
        require_restored(rig, images, job)


@pytest.mark.parametrize("files", [False, True], ids=["entries", "entries and images"])
def test_cpu_memory_that_is_left_out_is_refused(
    newest_rig: Rig, memory: tuple[SteadyJob, Path], files: bool
) -> None:
    job, images = memory
    cases: tuple[Keep, ...] = (lambda _: False, lambda task: task.pid != job.pids[-1])
    for keep in cases:
        forged = newest_rig.copy(images)
        leave_out(forged, keep, files=files)
        require_refused(newest_rig, forged, job)
    require_restored(newest_rig, images, job)


@pytest.mark.parametrize("files", [False, True], ids=["entries", "entries and images"])
def test_memory_of_either_kind_that_is_left_out_is_refused(
    newest_rig: Rig, both: tuple[SteadyJob, Path], files: bool
) -> None:
    job, images = both
    cases: tuple[Keep, ...] = (
        lambda _: False,
        lambda task: task.kind == MemoryKind.GPU,
        lambda task: task.kind == MemoryKind.CPU,
        lambda task: (task.pid, task.kind) != (job.pid, MemoryKind.GPU),
        lambda task: (task.pid, task.kind) != (job.pid, MemoryKind.CPU),
    )
    for keep in cases:
        forged = newest_rig.copy(images)
        leave_out(forged, keep, files=files)
        needed = sources_of(forged, read_manifest(forged).tasks)
        whole = all((forged / name).exists() for name in needed)
        require_refused(newest_rig, forged, job, LEFT_OUT if whole else NO_SOURCE)
        shutil.rmtree(forged)
    require_restored(newest_rig, images, job)


def test_a_gpu_image_that_is_said_to_be_none_is_refused(
    newest_rig: Rig, both: tuple[SteadyJob, Path]
) -> None:
    job, images = both
    tasks = read_manifest(images).tasks
    said = [
        ManifestTask(pid=task.pid, gpu_source=task.gpu_source, gpus=task.gpus)
        if task.kind == MemoryKind.GPU
        else task
        for task in tasks
    ]
    forge(images, said)
    require_refused(newest_rig, images, job)


def test_an_image_of_less_memory_is_refused(
    newest_rig: Rig, memory: tuple[SteadyJob, Path]
) -> None:
    job, images = memory
    tasks = read_manifest(images).tasks
    needed = sources_of(images, tasks)
    [*others, task] = sorted(tasks, key=lambda task: task.image_name not in needed)
    assert task.image_name not in needed  # no other image is refused because of it
    path = images / task.image_name
    info = ImageReader.open(path).info
    assert len(info.regions) > 1
    less = ImageInfo(
        pid=info.pid,
        checkpoint_id=info.checkpoint_id,
        regions=info.regions[:1],
        kind=MemoryKind.CPU,
    )
    content = [(region.address, bytes(region.length)) for region in less.regions]
    digest = write_image(path, less, content).digest
    short = ManifestTask(pid=info.pid, externalized=True, digest=digest, kind=MemoryKind.CPU)
    forge(images, [*others, short])
    require_refused(newest_rig, images, job)


def test_a_flattened_copy_is_of_the_same_memory(newest_rig: Rig, memory_job: Path) -> None:
    with running(newest_rig, memory_job, mib=20, children=1, threads=1) as job:
        first, second = newest_rig.images(), newest_rig.images()
        assert newest_rig.dump(job, first, "--leave-running", config=OURS).status == 0
        assert newest_rig.dump(job, second, config=OURS | {"parent": str(first)}).status == 0
        job.wait()
        flat = newest_rig.scratch / "flat"
        flatten(second, flat)
        old, new = (read_manifest(one).tasks for one in (second, flat))
        assert [task.digest for task in old] != [task.digest for task in new]
        assert OLDER not in require_restored(newest_rig, flat, job)


def test_a_checkpoint_without_the_name_is_restored_as_before(
    newest_rig: Rig, memory: tuple[SteadyJob, Path]
) -> None:
    """gpustasis wrote none at first. It never wrote a manifest without an image then."""
    job, images = memory
    rename_images(images, None)
    forged = newest_rig.copy(images)
    leave_out(forged, lambda _: False, files=True)
    require_refused(newest_rig, forged, job)
    assert OLDER in require_restored(newest_rig, images, job)
