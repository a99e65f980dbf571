# SPDX-License-Identifier: Apache-2.0
"""Dump and restore with every CRIU: the job goes on where it was, and nothing else has changed."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from campaigns.rig import Rig, lasting_workers
from campaigns.steady_job import process_state

MIB = 1 << 20
STOP_TIMEOUT_S = 30.0


def inventory_plugins(images: Path) -> list[bytes]:
    """Names of plugins that CRIU noted, as they stand in inventory.img."""
    content = (images / "inventory.img").read_bytes()
    names = (b"cuda_plugin", b"gpustasis", b"checkpoint-", b"images-")
    return [name for name in names if name in content]


def cpu_pages(images: Path) -> int:
    """Bytes of memory in CRIU's own images."""
    return sum(path.stat().st_size for path in images.glob("pages-*.img"))


def await_stopped(pids: Iterable[int]) -> None:
    """CRIU sends SIGSTOP and lets go; a busy machine takes a moment until it has arrived."""
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while set((states := {pid: process_state(pid) for pid in pids}).values()) != {"T"}:
        assert time.monotonic() < deadline, states
        time.sleep(0.01)


def test_twice_there_and_back(rig: Rig) -> None:
    with rig.job(mib=16) as job:
        for _ in range(2):
            images = rig.images()
            dumped = rig.dump(job, images)
            assert dumped.status == 0, dumped.errors
            assert job.wait() == -signal.SIGKILL
            steps = job.steps()
            rig.settle(images)

            # The job's own copy of its 16 MiB is CPU memory, and CRIU's; GPU memory is ours.
            assert cpu_pages(images) < 22 * MIB
            stored = (images / f"gpustasis-{job.pid}.img").stat().st_size
            assert 4 * MIB < stored < 8 * MIB  # a quarter of it is random, and does not compress
            assert inventory_plugins(images) == [b"gpustasis", b"checkpoint-", b"images-"]

            restored = rig.restore(images)
            assert restored.status == 0, restored.errors
            job.run_on()
            assert job.steps() > steps
            assert lasting_workers(images) == []


def test_huge_pages_are_asked_for_before_the_refill(rig: Rig) -> None:
    """By name: a virtual machine that gives its memory back is not asked by default."""
    with rig.job(mib=16) as job:
        images = rig.images()
        assert rig.dump(job, images).status == 0
        job.wait()
        restored = rig.restore(images, config={"huge_pages": "on"})
        assert restored.status == 0, restored.errors
        (task,) = json.loads((images / "gpustasis-restore.json").read_text())["tasks"]
        assert task["huge_pages"] is True
        job.run_on()


def test_what_the_statistics_say(rig: Rig) -> None:
    with rig.job(mib=8) as job:
        images = rig.images()
        assert rig.dump(job, images).status == 0
        job.wait()
        assert rig.restore(images).status == 0
        for stage in ("dump", "restore"):
            found = json.loads((images / f"gpustasis-{stage}.json").read_text())
            assert found["result"] == "ok"
            assert found["backend"] == "emulator"
            (task,) = found["tasks"]
            assert task["pid"] == job.pid
            assert task["staged_bytes"] >= 8 * MIB
            assert 0 < task["file_bytes"] < task["staged_bytes"]
            assert task["file_bytes"] == (images / f"gpustasis-{job.pid}.img").stat().st_size


def test_pinned_host_memory_and_several_processes(rig: Rig) -> None:
    with rig.job(mib=4, pinned_kib=512, children=2, plain_children=2) as job:
        images = rig.images()
        dumped = rig.dump(job, images)
        assert dumped.status == 0, dumped.errors
        job.wait()
        assert len(list(images.glob("gpustasis-*.img"))) == 3 + 1  # and the manifest
        restored = rig.restore(images)
        assert restored.status == 0, restored.errors
        job.run_on()


def test_cuda_in_a_child_only(rig: Rig) -> None:
    with rig.job(cuda=0, children=1, plain_children=1) as job:
        images = rig.images()
        dumped = rig.dump(job, images)
        assert dumped.status == 0, dumped.errors
        job.wait()
        restored = rig.restore(images)
        assert restored.status == 0, restored.errors
        job.run_on()


def test_a_tree_without_cuda_gets_no_worker_and_no_name(rig: Rig) -> None:
    with rig.job(cuda=0, plain_children=1) as job:
        images = rig.images()
        dumped = rig.dump(job, images)
        assert dumped.status == 0, dumped.errors
        job.wait()
        assert inventory_plugins(images) == []
        assert list(images.glob("gpustasis-*")) == []
        assert rig.restore(images).status == 0
        job.run_on()


@pytest.mark.parametrize("final", ["--leave-running", "--leave-stopped"])
def test_left_alive_it_is_what_it_was(rig: Rig, final: str) -> None:
    with rig.job(mib=4, children=1, pinned_kib=64) as job:
        threads = job.threads()
        for _ in range(2):
            images = rig.images()
            dumped = rig.dump(job, images, final)
            assert dumped.status == 0, dumped.errors
            assert lasting_workers(images) == []
            if final == "--leave-stopped":
                await_stopped(job.pids)
                for pid in job.pids:
                    os.kill(pid, signal.SIGCONT)
            job.run_on()
            assert job.threads() == threads


def test_what_leave_stopped_leaves_is_a_checkpoint(rig: Rig) -> None:
    with rig.job(mib=4) as job:
        images = rig.images()
        assert rig.dump(job, images, "--leave-stopped").status == 0
        job.end()
        restored = rig.restore(images)
        assert restored.status == 0, restored.errors
        job.run_on()


def test_a_failing_script_after_the_dump_leaves_the_job_running(rig: Rig) -> None:
    """CRIU resumes the tasks then, and before 4.3 it tells no plugin."""
    script = rig.scratch / "script"
    script.write_text('#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" != post-dump ]\n')
    script.chmod(0o755)
    with rig.job(mib=4, children=1) as job:
        threads = job.threads()
        images = rig.images()
        dumped = rig.dump(job, images, "--action-script", str(script))
        assert dumped.status != 0
        job.run_on()
        rig.settle(images)
        assert job.threads() == threads
        undo_log = images / "gpustasis-undo.log"
        told = dumped.log + (undo_log.read_text() if undo_log.exists() else "")
        assert told.count("brought back") == 2


def test_pre_dump_does_no_harm(rig: Rig) -> None:
    with rig.job(mib=4) as job:
        threads = job.threads()
        images = rig.images()
        words = ["pre-dump" if w == "dump" else w for w in rig.dump_words(job, images)]
        rig.run(words, images, "dump")  # refused or not: CRIU knows nothing of GPU descriptors
        job.run_on()
        assert job.threads() == threads
        assert lasting_workers(images) == []
