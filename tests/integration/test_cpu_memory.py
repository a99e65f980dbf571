# SPDX-License-Identifier: Apache-2.0
"""CPU memory in images of ours: what CRIU is not told of comes back, and no job is touched by its
dump."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from campaigns.rig import Rig
from campaigns.steady_job import SteadyJob, process_state
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
from support.cpu_memory import FIRST_CHECKPOINT, OURS, pages_bytes, refused, running
from support.inventory import images_name, rename_images

CRIU = {"cpu_memory": "criu"}
KINDS = (MemoryKind.GPU, MemoryKind.CPU)
MIB = 200
DUMP_KILLS = 8
WITHOUT_PAGEMAP_SCAN = 135  # CRIU's FI_DONT_USE_PAGEMAP_SCAN
RESTORE_KILLS = 12
# In criu's log:
BEFORE_ATTACHING = "Unlock network"
CRIU_IN_TASKS = "Dumping task (pid:"
ALL_DUMPED = "Writing image inventory"
LEFT_TO_CRIU = 40 << 20  # stacks, windows, what is shared or small: of one process of these


def told(images: Path, stage: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((images / f"gpustasis-{stage}.json").read_text())[
        "cpu_memory"
    ]
    return found


def rollup(pid: int) -> dict[str, int]:
    """kB, of /proc/PID/smaps_rollup."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {line.split(":")[0]: int(line.split()[1]) for line in lines}


def test_a_tree_comes_back_exactly(rig: Rig, memory_job: Path) -> None:
    with running(rig, memory_job, mib=MIB) as job:
        before = rollup(job.pid)
        images = rig.images()
        dumped = rig.dump(job, images, config=OURS)
        assert dumped.status == 0, dumped.errors
        job.wait()
        assert pages_bytes(images) < LEFT_TO_CRIU
        (task,) = told(images, "dump")
        assert task["bytes"] > MIB << 20
        assert task["scans"] > 0 and task["stored_twice_bytes"] == 0
        said = job.log.read_bytes()
        for _ in range(3):  # at any moment khugepaged may make memory of holes
            job.log.write_bytes(said)  # CRIU wants a file to have the size that it had
            restored = rig.restore(images, config=CRIU)  # what the checkpoint is, it says itself
            assert restored.status == 0, restored.errors
            resident = rollup(job.pid)["Rss"]
            job.run_on()
            if resident <= before["Rss"] * 1.05:
                break
            end(job)
        else:
            pytest.fail(f"{resident} kB are resident, {before['Rss']} kB were before")
        (again,) = told(images, "restore")
        assert again["bytes"] == task["bytes"]


def test_criu_dumps_what_it_is_told_of_without_the_key(newest_rig: Rig, memory_job: Path) -> None:
    with running(newest_rig, memory_job, mib=40) as job:
        images = newest_rig.images()
        assert newest_rig.dump(job, images).status == 0
        job.wait()
        assert pages_bytes(images) > 40 << 20
        assert not list(images.glob("gpustasis-*"))
        assert newest_rig.restore(images).status == 0
        job.run_on()


def test_what_a_child_shares_stays_shared(rig: Rig, memory_job: Path) -> None:
    with running(rig, memory_job, mib=100, children=1) as job:
        signal_all(job, signal.SIGSTOP)  # as it is measured, so it is dumped and restored
        job.await_stopped()
        shared = [rollup(pid)["Shared_Dirty"] for pid in job.pids]
        assert min(shared) > 20 << 10  # kB
        images = rig.images()
        dumped = rig.dump(job, images, config=OURS)
        assert dumped.status == 0, dumped.errors
        job.wait()
        assert len(told(images, "dump")) == len(job.pids)
        restored = rig.restore(images)
        assert restored.status == 0, restored.errors
        after = [rollup(pid)["Shared_Dirty"] for pid in job.pids]
        signal_all(job, signal.SIGCONT)
        job.run_on()
        assert all(now > before * 0.95 for now, before in zip(after, shared, strict=True))


def signal_all(job: SteadyJob, number: signal.Signals) -> None:
    for pid in job.pids:
        os.kill(pid, number)


def test_a_job_that_is_left_running_runs_on_at_once_and_its_dumps_chain(
    newest_rig: Rig, memory_job: Path
) -> None:
    with running(newest_rig, memory_job, mib=40) as job:
        first, second = newest_rig.images(), newest_rig.images()
        assert newest_rig.dump(job, first, "--leave-running", config=OURS).status == 0
        job.run_on()
        config = OURS | {"parent": str(first)}
        dumped = newest_rig.dump(job, second, config=config)
        assert dumped.status == 0, dumped.errors
        job.wait()
        (task,) = told(second, "dump")
        assert task["ref"]["plain_bytes"] > task["bytes"] // 3
        assert task["file_bytes"] < told(first, "dump")[0]["file_bytes"]
        (source,) = ImageReader.open(second / image_name(job.pid, MemoryKind.CPU)).info.sources
        assert (source.kind, source.pid) == (MemoryKind.CPU, job.pid)
        assert not verify_directory(second).problems
        flat = newest_rig.scratch / "flat"
        flatten(second, flat)
        assert not verify_directory(flat).problems
        assert newest_rig.restore(flat).status == 0
        job.run_on()


def test_what_criu_asks_in_another_way_is_stored_twice_and_said(
    newest_rig: Rig, memory_job: Path
) -> None:
    with running(newest_rig, memory_job, mib=40) as job:
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


def test_a_failed_dump_leaves_the_job_exact(newest_rig: Rig, memory_job: Path) -> None:
    with running(newest_rig, memory_job, mib=40) as job:
        images = newest_rig.images()
        (images / image_name(job.pid, MemoryKind.CPU)).mkdir()  # the image cannot get its name
        dumped = newest_rig.dump(job, images, config=OURS)
        log = refused(dumped)
        assert image_name(job.pid, MemoryKind.CPU) in log
        job.run_on()
        again = newest_rig.images()
        assert newest_rig.dump(job, again, "--action-script", "/bin/false", config=OURS).status != 0
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


def test_criu_killed_in_the_dump_leaves_the_job_exact(rig: Rig, memory_job: Path) -> None:
    """While the plugin stores memory, and when all is dumped. In between CRIU's own code stands in
    the tasks: one that it stands in when criu dies is lost, with stock CRIU too."""
    moments = random.Random(4)
    count = rig.scratch / "system-calls"
    with running(rig, memory_job, mib=40, children=1) as job:

        def dump(number: int, mark: str) -> int:
            """Killing criu at that system call behind `mark` in its log; how many it made."""
            images = rig.images()
            killer = [str(rig.programs.killer), str(count), str(number), "-", mark]
            words = [*killer, *rig.dump_words(job, images, ["--leave-running"])]
            ended = rig.run(words, images, "dump", OURS)
            assert ended.status in (0, 137), ended.errors
            shutil.rmtree(images, ignore_errors=True)  # a hundred would fill a disk
            return int(count.read_text())

        in_tasks, after = dump(0, CRIU_IN_TASKS), dump(0, ALL_DUMPED)
        ranges = {FIRST_CHECKPOINT: dump(0, FIRST_CHECKPOINT) - in_tasks, ALL_DUMPED: after}
        job.run_on(1)
        for mark, calls in ranges.items():
            for part in range(DUMP_KILLS):
                dump(1 + int((part + moments.random()) * calls / DUMP_KILLS), mark)
                job.run_on(1)
        # No memory is missing: no dump is refused, and it holds what it should.
        images = rig.images()
        assert rig.dump(job, images, config=OURS).status == 0
        job.wait()
        assert rig.restore(images).status == 0
        job.run_on()


def test_criu_killed_in_the_restore_leaves_no_process_that_lacks_memory(
    rig: Rig, memory_job: Path
) -> None:
    """From before criu attaches to the tasks to its end; all that it calls until then, they do not
    run."""
    count = rig.scratch / "system-calls"
    with running(rig, memory_job, mib=20, children=1, threads=1) as job:
        images = rig.images()
        assert rig.dump(job, images, config=OURS).status == 0
        job.wait()
        output = job.log.read_bytes()

        def restore(number: int) -> int:
            """Killing criu at that system call; how many it made."""
            job.log.write_bytes(output)  # CRIU wants a file to have the size that it had
            killer = [str(rig.programs.killer), str(count), str(number), "-", BEFORE_ATTACHING]
            copy = rig.copy(images)
            ended = rig.run([*killer, *rig.restore_words(copy)], copy, "restore")
            assert ended.status in (0, 137), ended.errors
            shutil.rmtree(copy, ignore_errors=True)
            return int(count.read_text())

        calls = restore(0)
        job.run_on()
        for point in range(RESTORE_KILLS):
            end(job)
            restore(1 + point * calls // RESTORE_KILLS)
            time.sleep(0.2)
            job.reap()
            job.steps()  # that some may have made: each was right
            if job.alive_pids() and job.log.read_bytes() != output:
                job.run_on()  # all of it, and exact
        end(job)
        restore(0)
        job.run_on()


def end(job: SteadyJob) -> None:
    """Its processes, and not the record of what they have said."""
    for pid in job.pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while any(process_state(pid) for pid in job.pids):
        assert time.monotonic() < deadline
        job.reap()
        time.sleep(0.01)


@pytest.fixture
def checkpoint(newest_rig: Rig, memory_job: Path) -> Iterator[tuple[SteadyJob, Path]]:
    with running(newest_rig, memory_job, mib=40, children=1) as job:
        images = newest_rig.images()
        assert newest_rig.dump(job, images, config=OURS).status == 0
        job.wait()
        yield job, images


def test_a_damaged_image_kills_all(newest_rig: Rig, checkpoint: tuple[SteadyJob, Path]) -> None:
    job, images = checkpoint
    damaged = newest_rig.copy(images)
    path = damaged / image_name(job.pids[-1], MemoryKind.CPU)
    image = ImageReader.open(path)
    chunk = next(c for i in range(len(image)) if (c := image.chunk(i)).stored_size)
    with path.open("r+b") as file:
        file.seek(chunk.offset + chunk.stored_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    log = refused(newest_rig.restore(damaged))
    assert "every restored task was killed" in log and path.name in log
    assert not job.alive_pids()
    job.reap()
    assert newest_rig.restore(images).status == 0
    job.run_on()


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
    assert not job.alive_pids()


def test_stock_criu_refuses_the_checkpoint(
    newest_rig: Rig, checkpoint: tuple[SteadyJob, Path]
) -> None:
    job, images = checkpoint
    assert newest_rig.restore(images, plugin=False).status != 0
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
