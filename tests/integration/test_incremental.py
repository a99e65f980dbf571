# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on top of a parent, with real CRIU: what is the same is not stored again, and a
restore through the chain is exact."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from campaigns.rig import Rig, Run
from campaigns.steady_job import SteadyJob
from gpustasis._core import PARENT_LINK, ImageReader, image_name, read_manifest

MIB = 1 << 20


# Of the first of a chain, and the others have it from that one. On a busy host the job gets around
# to all chunks of the usual size between two dumps, and nothing is the same.
SMALL = {"chunk_size": 4096}


def incremental_dump(
    rig: Rig, job: SteadyJob, images: Path, parent: Path, **keys: str | int | bool
) -> Run:
    dumped = rig.dump(job, images, "--leave-running", config={"parent": str(parent), **keys})
    assert dumped.status == 0, dumped.errors
    return dumped


def first_task(images: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((images / "gpustasis-dump.json").read_text())["tasks"][0]
    return found


def stored(images: Path, job: SteadyJob) -> int:
    return (images / f"gpustasis-{job.pid}.img").stat().st_size


def test_a_chain_of_dumps_and_a_restore_through_it(rig: Rig) -> None:
    with rig.job(mib=32) as job:
        chain = [rig.images()]
        full = rig.dump(job, chain[0], "--leave-running", config=SMALL)
        assert full.status == 0, full.errors
        for _ in range(3):
            job.run_on()
            chain.append(rig.images())
            incremental_dump(rig, job, chain[-1], chain[-2])
            assert (chain[-1] / PARENT_LINK).readlink() == Path("..") / chain[-2].name
            assert first_task(chain[-1])["ref"]["chunks"] > 0
            assert stored(chain[-1], job) < stored(chain[0], job)
        assert read_manifest(chain[-1]).chain_length == 3
        job.run_on()

        last = rig.images()
        dumped = rig.dump(job, last, config={"parent": str(chain[-1])})
        assert dumped.status == 0, dumped.errors
        assert job.wait() == -signal.SIGKILL
        restored = rig.restore(last)
        assert restored.status == 0, restored.errors
        job.run_on()


def test_a_rotten_chunk_of_a_parent_is_stored_anew(newest_rig: Rig) -> None:
    """And the restore does not need it."""
    rig = newest_rig
    with rig.job(mib=8, alike=1) as job:  # most of its memory stays as it is
        first, second = rig.images(), rig.images()
        assert rig.dump(job, first, "--leave-running").status == 0
        path = first / image_name(job.pid)
        image = ImageReader.open(path)
        raw = bytearray(path.read_bytes())
        stored = [c for c in map(image.chunk, range(len(image))) if c.stored_size]
        for chunk in stored:
            raw[chunk.offset + chunk.stored_size // 2] ^= 1
        path.write_bytes(raw)
        config: dict[str, str | int | bool] = {"parent": str(first), "parent_check": "data"}
        dumped = rig.dump(job, second, config=config)
        assert dumped.status == 0, dumped.errors
        task = first_task(second)
        assert task["ref"]["chunks"] == 0
        assert task["damaged_in_parent"] > 0
        assert "the parent is damaged" in dumped.log
        assert job.wait() == -signal.SIGKILL
        assert rig.restore(second).status == 0
        job.run_on()


def tracks_memory(rig: Rig) -> bool:
    """Whether this kernel has soft-dirty pages, which CRIU's own incremental dumps need."""
    words = [*rig.criu.command(rig.environ), "check", "--feature", "mem_dirty_track"]
    done = subprocess.run(words, env=dict(rig.environ), capture_output=True, check=False)
    return done.returncode == 0


def test_crius_own_link_names_the_parent(rig: Rig) -> None:
    """Without soft-dirty pages CRIU itself fails such a dump, after the plugin has done its part:
    then the job must be brought back through the chain."""
    track = ["--track-mem"] if tracks_memory(rig) else []
    with rig.job(mib=8) as job:
        first, second = rig.images(), rig.images()
        assert rig.dump(job, first, "--leave-running", *track, config=SMALL).status == 0
        words = ("--leave-running", "--prev-images-dir", os.path.relpath(first, second), *track)
        dumped = rig.dump(job, second, *words, config=SMALL)
        assert f"cuda_plugin: parent: {first}" in dumped.log, dumped.errors
        if track:
            assert dumped.status == 0, dumped.errors
        else:
            assert "Pid-reuse detection failed" in dumped.log, dumped.errors
        assert first_task(second)["ref"]["chunks"] > 0
        job.run_on()


def test_max_chain_starts_anew(newest_rig: Rig) -> None:
    rig = newest_rig
    with rig.job(mib=8) as job:
        chain = [rig.images()]
        assert rig.dump(job, chain[0], "--leave-running").status == 0
        for _ in range(3):
            chain.append(rig.images())
            incremental_dump(rig, job, chain[-1], chain[-2], max_chain=2)
        lengths = [read_manifest(images).chain_length for images in chain]
        assert lengths == [0, 1, 2, 0]
        assert not (chain[3] / PARENT_LINK).is_symlink()
        found = json.loads((chain[3] / "gpustasis-dump.json").read_text())
        assert found["parent"] is None
        assert found["full_because"].startswith("max_chain: ")
        job.run_on()


@pytest.mark.parametrize("wrong", ["missing", "empty", "itself", "chunk_size", "externalize"])
def test_a_parent_that_cannot_serve_fails_the_dump_and_not_the_job(
    newest_rig: Rig, wrong: str
) -> None:
    rig = newest_rig
    with rig.job(mib=8) as job:
        parent, images = rig.images(), rig.images()
        assert rig.dump(job, parent, "--leave-running").status == 0
        config: dict[str, str | int | bool] = {"parent": str(parent)}
        if wrong == "missing":
            config["parent"] = "../not-there"
        elif wrong == "empty":
            config["parent"] = str(rig.images())
        elif wrong == "itself":
            config["parent"] = "."
            assert rig.dump(job, images, "--leave-running").status == 0
        elif wrong == "chunk_size":
            config["chunk_size"] = 65536
        else:
            config["externalize"] = False
        dumped = rig.dump(job, images, "--leave-running", config=config)
        assert dumped.status != 0
        reasons = {
            "missing": "cannot open the parent ../not-there: No such file or directory",
            "empty": "is no checkpoint of this plugin",
            "itself": "a checkpoint cannot be its own parent",
            "chunk_size": "chunk_size = 65536: the parent",
            "externalize": "needs externalize, which is off",
        }
        assert reasons[wrong] in dumped.errors
        job.run_on()


def contents(images: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in images.glob("gpustasis-*.img")}


@pytest.mark.parametrize(
    ("layout", "says"),
    [("criu", "which is built on that one: a circle"), ("packed", "would replace that")],
)
def test_two_directories_in_turn_are_refused(newest_rig: Rig, layout: str, says: str) -> None:
    """The third dump would write over the first, which it is built on by way of the second."""
    rig = newest_rig
    with rig.job(mib=16) as job:
        first, second = rig.images(), rig.images()
        keys: dict[str, str | int | bool] = {"chunk_size": 4096, "layout": layout}
        assert rig.dump(job, first, "--leave-running", config=keys).status == 0
        job.run_on()
        incremental_dump(rig, job, second, first, **keys)
        assert first_task(second)["ref"]["chunks"] > 0
        job.run_on()
        before = contents(first)
        dumped = rig.dump(job, first, config=keys | {"parent": str(second)})
        assert dumped.status != 0
        assert says in dumped.errors
        assert contents(first) == before
        job.run_on()


def test_a_dump_that_is_refused_leaves_the_checkpoint_that_is_there(newest_rig: Rig) -> None:
    """With its link: it is restored through it."""
    rig = newest_rig
    with rig.job(mib=8) as job:
        first, second = rig.images(), rig.images()
        keys: dict[str, str | int | bool] = {"chunk_size": 4096, "parent": str(first)}
        assert rig.dump(job, first, "--leave-running", config=SMALL).status == 0
        assert rig.dump(job, second, config=keys).status == 0
        assert job.wait() == -signal.SIGKILL
        assert rig.restore(second).status == 0
        assert first_task(second)["ref"]["chunks"] > 0
        for wrong in ({"parent": "."}, {"chunk_size": 8192}, {"parent": "../not-there"}):
            job.run_on()
            assert rig.dump(job, second, "--leave-running", config=keys | wrong).status != 0
            assert (second / PARENT_LINK).readlink() == Path("..") / first.name
        job.run_on()


def test_a_dump_that_fails_on_top_of_a_parent_leaves_the_job_exact(newest_rig: Rig) -> None:
    """What is dropped by then has to come back through the chain."""
    rig = newest_rig
    with rig.job(mib=16) as job:
        first, second = rig.images(), rig.images()
        assert rig.dump(job, first, "--leave-running", config=SMALL).status == 0
        job.run_on()
        script = rig.scratch / "fail-after-the-dump"
        script.write_text("#!/bin/sh\n[ $CRTOOLS_SCRIPT_ACTION != post-dump ]\n")
        script.chmod(0o700)
        extra = ("--action-script", str(script))
        failed = rig.dump(job, second, *extra, config={"parent": str(first)})
        assert failed.status != 0
        rig.settle(second)
        assert first_task(second)["ref"]["chunks"] > 0
        job.run_on()
