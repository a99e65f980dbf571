# SPDX-License-Identifier: Apache-2.0
"""Checkpoint, restore, three times in a row, with every CRIU: no round leaves anything behind that
the next one trips over, and each goes on exactly where the checkpoint was made.

The job compares every byte of its device, pinned and registered memory, and what its kernels made,
with copies of its own at each step, and numbers its steps: an older memory would show as a number
said twice, a wrong byte as MISMATCH.
"""

from __future__ import annotations

import json
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from campaigns.rig import Rig, lasting_workers
from campaigns.steady_job import SteadyJob
from gpustasis._core import ImageReader, image_name, read_manifest
from gpustasis.image.verification import verify_directory

ROUNDS = 3
MIB = 1 << 20
SHAPE = {"mib": 16, "children": 1, "pinned_kib": 512, "registered_kib": 512, "streams": 3}


def step_numbers(job: SteadyJob) -> dict[int, list[int]]:
    """The numbers of the steps that each process has said to be right, in the order it did so."""
    job.steps()  # fails if it has said anything else
    found: dict[int, list[int]] = {pid: [] for pid in job.pids}
    for line in job.output().splitlines(keepends=True):
        if not line.endswith("\n"):
            continue  # on its way into the file
        pid, word, *rest = line.split()
        if word == "step":
            found[int(pid)].append(int(rest[0]))
    return found


def require_every_step_once(job: SteadyJob) -> None:
    for pid, numbers in step_numbers(job).items():
        assert numbers == list(range(len(numbers))), f"process {pid} made steps {numbers}"


def tasks(images: Path, stage: str) -> list[dict[str, Any]]:
    found: dict[str, Any] = json.loads((images / f"gpustasis-{stage}.json").read_text())
    assert found["result"] == "ok"
    return list(found["tasks"])


def hashes_of(images: Path, pid: int) -> list[bytes]:
    """Of the memory alone: nothing in them is drawn at random by a checkpoint."""
    image = ImageReader.open(images / image_name(pid))
    return [image.chunk(index).hash for index in range(len(image))]


@pytest.mark.parametrize("parents", ["with-parents", "without-parents"])
def test_three_rounds(rig: Rig, parents: str) -> None:
    chain: list[Path] = []
    with rig.job(module=rig.programs.kernels, **SHAPE) as job:
        threads = job.threads()
        for turn in range(1, ROUNDS + 1):
            images = rig.images()
            config: dict[str, str | int | bool] = {"chunk_size": 4096}  # more of them stay the same
            if parents == "with-parents" and chain:
                config |= {"parent": str(chain[-1]), "parent_check": "data"}
            chain.append(images)

            dumped = rig.dump(job, images, config=config)
            assert dumped.status == 0, f"round {turn}: {dumped.errors}"
            assert job.wait() == -signal.SIGKILL
            rig.settle(images)
            before = step_numbers(job)
            written = tasks(images, "dump")
            assert {task["pid"] for task in written} == set(job.pids)
            assert all(task["staged_bytes"] >= SHAPE["mib"] * MIB for task in written)
            built_on = turn - 1 if parents == "with-parents" else 0
            assert read_manifest(images).chain_length == built_on
            assert all((task["ref"]["chunks"] > 0) == (built_on > 0) for task in written)
            assert verify_directory(images, threads=1).problems == []

            restored = rig.restore(images)
            assert restored.status == 0, f"round {turn}: {restored.errors}"
            assert {task["pid"] for task in tasks(images, "restore")} == set(job.pids)
            job.run_on()
            after = step_numbers(job)
            assert all(len(after[pid]) > len(before[pid]) for pid in job.pids)
            require_every_step_once(job)
            rig.settle(images)
            assert lasting_workers(images) == []
            assert job.threads() == threads, f"round {turn} left or changed a thread"
    for pid in job.pids:
        hashes = [hashes_of(images, pid) for images in chain]
        assert all(one != other for one, other in pairwise(hashes)), "its memory stood still"
