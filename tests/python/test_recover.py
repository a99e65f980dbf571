# SPDX-License-Identifier: Apache-2.0
"""recover: tasks left behind in every way in which a dying criu and its worker can leave them."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from gpustasis._core import ImageReader, find_checkpoint_record, find_drop_record, image_name
from support.job import Job, check_memory

Gpustasis = Callable[..., CompletedProcess[str]]
Generations = Callable[..., Job]
DriverCalls = Callable[..., None]
Abandon = Callable[..., None]

PAGE = os.sysconf("SC_PAGE_SIZE")


def test_dropped_memory_is_put_back(
    gpustasis: Gpustasis, gpu_generations: Generations, abandon: Abandon, images: Path
) -> None:
    job = gpu_generations()
    check_memory(job, 0)
    abandon(job, images)
    ended = gpustasis("recover", str(job.pid), "-D", images)
    assert ended.returncode == 0, ended.stderr
    assert "was checkpointed, and runs again (12.0 MiB of GPU memory put back)" in ended.stdout
    check_memory(job, 1)
    check_memory(job, 2)


def test_the_directory_is_found_by_the_record_of_the_drop(
    gpustasis: Gpustasis, gpu_generations: Generations, abandon: Abandon, images: Path
) -> None:
    job = gpu_generations()
    assert "there was nothing to do" in gpustasis("recover", str(job.pid)).stdout
    abandon(job, images)
    record = find_drop_record(job.pid)
    assert record is not None
    assert (record.directory, record.image) == (str(images), image_name(job.pid))

    seen = findings(gpustasis("doctor", "--json"))[f"memory of process {job.pid}"]
    assert seen["status"] == "problem"
    assert seen["remedy"] == f"gpustasis recover {job.pid}"

    moved = images.with_name("moved")
    images.rename(moved)
    refused = gpustasis("recover", str(job.pid))
    assert refused.returncode == 3
    assert str(images) in refused.stderr
    moved.rename(images)
    ended = gpustasis("recover", str(job.pid))
    assert ended.returncode == 0, ended.stderr
    assert "(12.0 MiB of GPU memory put back)" in ended.stdout
    assert find_drop_record(job.pid) is None
    assert f"memory of process {job.pid}" not in findings(gpustasis("doctor", "--json"))
    check_memory(job, 0)


def findings(ended: CompletedProcess[str]) -> dict[str, dict[str, str]]:
    return {item["name"]: item for item in json.loads(ended.stdout)["findings"]}


@pytest.mark.parametrize("calls", [["restore", "unlock"], ["restore"]], ids=["runs", "locked"])
def test_a_job_that_was_restored_without_its_memory_is_not_said_to_be_well(
    gpustasis: Gpustasis,
    gpu_generations: Generations,
    driver_calls: DriverCalls,
    abandon: Abandon,
    images: Path,
    calls: list[str],
) -> None:
    job = gpu_generations()
    abandon(job, images)
    driver_calls(job, *calls)
    refused = gpustasis("recover", str(job.pid), "-D", images)
    assert refused.returncode == 3
    assert "its GPU memory is wrong" in refused.stderr


def test_another_directory_than_the_recorded_one_is_refused(
    gpustasis: Gpustasis,
    gpu_generations: Generations,
    abandon: Abandon,
    images: Path,
    tmp_path: Path,
) -> None:
    job = gpu_generations()
    abandon(job, images)
    empty = tmp_path / "empty"
    empty.mkdir()
    refused = gpustasis("recover", str(job.pid), "-D", empty)
    assert refused.returncode == 3
    assert f"was dumped into {images}" in refused.stderr
    ended = gpustasis("recover", str(job.pid), "-D", images)
    assert ended.returncode == 0, ended.stderr
    check_memory(job, 0)


def test_a_job_that_no_dump_had_checkpointed_is_left_alone(
    gpustasis: Gpustasis, gpu_generations: Generations, driver_calls: DriverCalls, images: Path
) -> None:
    job = gpu_generations()
    driver_calls(job, "lock", "checkpoint")
    refused = gpustasis("recover", str(job.pid))
    assert refused.returncode == 3
    assert "name its directory with -D" in refused.stderr
    refused = gpustasis("recover", str(job.pid), "-D", images)
    assert refused.returncode == 3
    assert "nothing was changed" in refused.stderr
    driver_calls(job, "restore", "unlock")
    check_memory(job, 0)


def test_it_waits_for_the_worker_that_does_the_same(
    gpustasis: Gpustasis, gpu_generations: Generations, abandon: Abandon, images: Path
) -> None:
    job = gpu_generations()
    abandon(job, images, with_worker=False)
    ended = gpustasis("recover", str(job.pid), "-D", images)
    assert ended.returncode == 0, ended.stderr
    assert "there was nothing to do" in ended.stdout
    check_memory(job, 0)


def test_a_running_process_needs_nothing(
    gpustasis: Gpustasis, gpu_generations: Generations, images: Path
) -> None:
    job = gpu_generations()
    ended = gpustasis("recover", str(job.pid), "-D", images)
    assert ended.returncode == 0, ended.stderr
    assert "there was nothing to do" in ended.stdout
    check_memory(job, 0)


def test_a_key_that_opens_nothing_is_spoken_of(
    gpustasis: Gpustasis, gpu_generations: Generations, images: Path, tmp_path: Path
) -> None:
    job = gpu_generations()
    words = ("recover", str(job.pid), "-D", images, "--key", tmp_path / "no such key")
    ended = gpustasis(*words)
    assert ended.returncode == 0, ended.stderr
    assert f"the dump into {images} is not sealed: the key was not used" in ended.stderr


def test_before_anything_was_taken_out(
    gpustasis: Gpustasis, gpu_generations: Generations, driver_calls: DriverCalls, images: Path
) -> None:
    job = gpu_generations()
    driver_calls(job, "lock")
    ended = gpustasis("recover", str(job.pid), "-D", images)
    assert ended.returncode == 0, ended.stderr
    assert "was locked, and runs again" in ended.stdout
    check_memory(job, 0)


@pytest.mark.parametrize(
    ("calls", "said", "undo"),
    [
        (["lock"], "and is locked again, as the dump found it", ["unlock"]),
        (["lock", "checkpoint"], "is checkpointed, as the dump found it", ["restore", "unlock"]),
    ],
    ids=["locked", "checkpointed"],
)
def test_what_the_dump_found_is_left_so(
    gpustasis: Gpustasis,
    gpu_generations: Generations,
    driver_calls: DriverCalls,
    abandon: Abandon,
    images: Path,
    calls: list[str],
    said: str,
    undo: list[str],
) -> None:
    job = gpu_generations()
    driver_calls(job, *calls)
    abandon(job, images)
    ended = gpustasis("recover", str(job.pid), "-D", images)
    assert ended.returncode == 0, ended.stderr
    assert said in ended.stdout
    assert find_checkpoint_record(job.pid) is None
    driver_calls(job, *undo)
    check_memory(job, 0)


def test_the_images_of_another_process_are_refused(
    gpustasis: Gpustasis,
    gpu_generations: Generations,
    abandon: Abandon,
    tmp_path: Path,
    images: Path,
) -> None:
    job = gpu_generations(seed=1)
    other = gpu_generations(seed=2)
    others_images = tmp_path / "other"
    others_images.mkdir()
    abandon(job, images)
    abandon(other, others_images)

    mine, theirs = images / f"gpustasis-{job.pid}.img", others_images / f"gpustasis-{other.pid}.img"
    kept = tmp_path / "kept"
    shutil.copy(mine, kept)
    shutil.copy(theirs, mine)
    refused = gpustasis("recover", str(job.pid), "-D", images)
    assert refused.returncode == 10
    assert "is of another process" in refused.stderr

    shutil.copy(kept, mine)
    for task, directory in ((job, images), (other, others_images)):
        assert gpustasis("recover", str(task.pid), "-D", directory).returncode == 0
        check_memory(task, 0)


def test_a_damaged_image_is_refused_and_changes_nothing(
    gpustasis: Gpustasis, gpu_generations: Generations, abandon: Abandon, images: Path
) -> None:
    job = gpu_generations()
    abandon(job, images)
    image = images / f"gpustasis-{job.pid}.img"
    raw = bytearray(image.read_bytes())
    raw[len(raw) // 2] ^= 0x10
    image.write_bytes(raw)
    refused = gpustasis("recover", str(job.pid), "-D", images)
    assert refused.returncode == 10
    assert image.name in refused.stderr

    raw[len(raw) // 2] ^= 0x10
    image.write_bytes(raw)
    assert gpustasis("recover", str(job.pid), "-D", images).returncode == 0
    check_memory(job, 0)


def test_the_images_of_a_dump_that_was_not_broken_off_are_refused(
    gpustasis: Gpustasis,
    gpu_generations: Generations,
    abandon: Abandon,
    tmp_path: Path,
    images: Path,
) -> None:
    job = gpu_generations()
    earlier = tmp_path / "earlier"
    dumped = gpustasis("checkpoint", str(job.pid), "-D", earlier, "--leave-running")
    assert dumped.returncode == 0, dumped.stderr
    check_memory(job, 0)
    abandon(job, images)
    refused = gpustasis("recover", str(job.pid), "-D", earlier)
    assert refused.returncode == 3
    assert "was not broken off" in refused.stderr
    assert gpustasis("recover", str(job.pid), "-D", images).returncode == 0
    check_memory(job, 1)


def test_an_image_from_before_the_process_was_checkpointed_again_is_refused(
    gpustasis: Gpustasis,
    gpu_generations: Generations,
    driver_calls: DriverCalls,
    abandon: Abandon,
    images: Path,
) -> None:
    job = gpu_generations()
    abandon(job, images)
    assert gpustasis("recover", str(job.pid), "-D", images).returncode == 0
    check_memory(job, 0)  # what it holds from here on is another generation
    driver_calls(job, "lock", "checkpoint")
    refused = gpustasis("recover", str(job.pid), "-D", images)
    assert refused.returncode == 10
    assert "it was checkpointed again since" in refused.stderr
    driver_calls(job, "restore", "unlock")
    check_memory(job, 1)


def pages_with_data(image: ImageReader) -> list[tuple[int, bytes]]:
    """Address and content of all pages that are not zero."""
    found: list[tuple[int, bytes]] = []
    for index in range(len(image)):
        chunk, plain = image.chunk(index), image.read_chunk(index)
        found += [
            (chunk.address + offset, page)
            for offset in range(0, chunk.plain_size, PAGE)
            if any(page := plain[offset : offset + PAGE])
        ]
    return found


def test_memory_that_was_being_put_back(
    gpustasis: Gpustasis, gpu_generations: Generations, abandon: Abandon, images: Path
) -> None:
    """By a worker that was killed: some pages are there, some of them still empty."""
    job = gpu_generations()
    abandon(job, images)
    pages = pages_with_data(ImageReader.open(images / image_name(job.pid)))
    with open(f"/proc/{job.pid}/mem", "r+b", buffering=0) as memory:
        for address, content in pages[: len(pages) // 2]:
            memory.seek(address)
            memory.write(content)
        for address, _ in pages[len(pages) // 2 : -1]:
            memory.seek(address)
            assert memory.read(PAGE) == bytes(PAGE)  # which gives it a page
    ended = gpustasis("recover", str(job.pid), "-D", images)
    assert ended.returncode == 0, ended.stderr
    check_memory(job, 0)


def test_an_empty_page_among_all_others_is_the_jobs(
    gpustasis: Gpustasis, gpu_generations: Generations, abandon: Abandon, images: Path
) -> None:
    job = gpu_generations()
    abandon(job, images)
    image = ImageReader.open(images / image_name(job.pid))
    image.restore_to_process(job.pid)
    address, content = pages_with_data(image)[-1]
    with open(f"/proc/{job.pid}/mem", "r+b", buffering=0) as memory:
        memory.seek(address)
        memory.write(bytes(PAGE))
        refused = gpustasis("recover", str(job.pid), "-D", images)
        assert refused.returncode == 10
        assert f"holds something else at {address:#x} than the image" in refused.stderr
        memory.seek(address)
        memory.write(content)
    assert gpustasis("recover", str(job.pid), "-D", images).returncode == 0
    check_memory(job, 0)


def test_a_stopped_process_is_refused_with_the_way_out(
    gpustasis: Gpustasis, gpu_generations: Generations, images: Path
) -> None:
    job = gpu_generations()
    job.signal(signal.SIGSTOP)
    job.await_stopped()
    refused = gpustasis("recover", str(job.pid), "-D", images)
    assert refused.returncode == 3
    assert f"kill -CONT {job.pid}" in refused.stderr


def test_a_process_without_cuda_is_refused(
    gpustasis: Gpustasis, launch: Callable[..., Job], images: Path
) -> None:
    job = launch(["/bin/sleep", "60"])
    refused = gpustasis("recover", str(job.pid), "-D", images)
    assert refused.returncode == 11
    assert "CUDA_ERROR_NOT_INITIALIZED" in refused.stderr


def test_a_process_that_is_gone_is_named(gpustasis: Gpustasis, images: Path) -> None:
    refused = gpustasis("recover", str(2**22), "-D", images)
    assert refused.returncode == 3
    assert f"there is no process {2**22}" in refused.stderr
