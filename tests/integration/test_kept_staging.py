# SPDX-License-Identifier: Apache-2.0
"""staging = "keep": what a dump has stored stays in the job, and criu is not told of it."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from random import Random
from typing import Any

import pytest

from campaigns import kill_points, space
from campaigns.kill_points import require_kills
from campaigns.rig import Rig, await_line, log_path, small_filesystem, with_config, workers
from campaigns.steady_job import SteadyJob
from gpustasis._core import MemoryKind, find_drop_record, image_name, read_manifest
from gpustasis.criu.plugin import Scalar, Setting
from gpustasis.image.verification import verify_directory
from gpustasis.recovery import GUARDIAN_COMM
from gpustasis.task import find_users
from support.broken_dumps import dump_and_stop, recover
from support.broken_trackers import userfaultfds
from support.certificates import Pair
from support.cpu_memory import OURS, pages_bytes
from support.criu_roots import criu_place
from support.live_sealing import gpustasis, opened_by, require_nowhere, sealed_for
from support.memory_limit import memory_limit, set_limit

KEEP: dict[str, Scalar] = {"staging": "keep"}
AUTO: dict[str, Scalar] = {"staging": "auto"}
MIB = 1 << 20
SEED = 23
WITHOUT_PAGEMAP_SCAN = 135  # CRIU's FI_DONT_USE_PAGEMAP_SCAN


def tasks(images: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((images / "gpustasis-dump.json").read_text())["tasks"]
    return found


def require_kept(images: Path, job: SteadyJob) -> None:
    found = tasks(images)
    assert [task["staging"] for task in found] == ["kept"] * len(job.pids)
    for task in found:
        assert task["externalized"] and task["stored_twice_bytes"] == 0 < task["staged_bytes"]
        assert "drop" not in task["phases_ms"]


def dump(rig: Rig, job: SteadyJob, *extra: str, **config: Setting) -> Path:
    images = rig.images()
    dumped = rig.dump(job, images, *extra, config=config)
    assert dumped.status == 0, dumped.errors
    if extra:
        job.run_on()
    return images


def come_back(rig: Rig, job: SteadyJob, images: Path, **config: Setting) -> None:
    job.wait()
    rig.settle(images)
    done = rig.restore(images, config=config)
    assert done.status == 0, done.errors
    job.run_on()


def test_a_job_runs_on_and_comes_back_and_criu_has_not_dumped_it_too(rig: Rig) -> None:
    with rig.job(mib=16, pinned_kib=256, children=1, plain_children=1) as job:
        dropped = dump(rig, job, "--leave-running")
        assert {task["staging"] for task in tasks(dropped)} == {"dropped"}
        cuda = {task["pid"] for task in tasks(dropped)}
        for extra in (["--leave-running"], []):
            images = dump(rig, job, *extra, **KEEP)
            assert [task["staging"] for task in tasks(images)] == ["kept"] * 2
            assert {task["pid"] for task in tasks(images)} == cuda
            assert all(task["stored_twice_bytes"] == 0 for task in tasks(images))
            # As much as with what is dropped: 16 MiB of each would be in it.
            assert abs(pages_bytes(images) - pages_bytes(dropped)) < 4 * MIB
            assert not verify_directory(images).problems
        come_back(rig, job, images)


def test_a_key_without_an_option_is_set_for_one_run_by_an_option_of_criu(newest_rig: Rig) -> None:
    """docs/operating.md says so of `gpu_memory` and `when_full`, which have no option of ours."""
    with newest_rig.job(mib=8) as job:
        found = []
        for options in ((), ("--", "--plugin-option=cuda_plugin.staging=keep")):
            images = newest_rig.images()
            words = ("checkpoint", job.pid, "-D", images, "-R", "--criu")
            done = gpustasis(newest_rig, *words, criu_place(newest_rig.criu), *options)
            assert done.returncode == 0, done.stderr
            found += [task["staging"] for task in tasks(images)]
            job.run_on()
        assert found == ["dropped", "kept"]


def test_a_chain_may_have_both(newest_rig: Rig) -> None:
    rig = newest_rig
    with rig.job(mib=16, children=1) as job:
        # On a busy host the job gets around to all chunks of the usual size between two dumps.
        chain = [dump(rig, job, "--leave-running", chunk_size=4096, **KEEP)]
        for config in (KEEP, {}, KEEP):
            chain.append(dump(rig, job, "--leave-running", parent=str(chain[-1]), **config))
            assert all(task["ref"]["chunks"] > 0 for task in tasks(chain[-1]))
        last = dump(rig, job, parent=str(chain[-1]), **KEEP)
        require_kept(last, job)
        assert read_manifest(last).chain_length == 4
        come_back(rig, job, last)


def test_packed(rig: Rig) -> None:
    with rig.job(mib=16, children=1) as job:
        dump(rig, job, "--leave-running", layout="packed", **KEEP)
        images = dump(rig, job, layout="packed", **KEEP)
        require_kept(images, job)
        assert not list(images.glob("pages-*.img"))
        come_back(rig, job, images)


@pytest.mark.parametrize("more", [{}, {"risk": [], **OURS}], ids=["images of ours", "all"])
def test_sealed(newest_rig: Rig, me: Pair, more: dict[str, Setting]) -> None:
    rig = newest_rig
    config: dict[str, Setting] = {**sealed_for(me), **KEEP, **more}
    with rig.job(mib=16, children=1) as job:
        dump(rig, job, "--leave-running", **config)
        images = dump(rig, job, **config)
        require_kept(images, job)
        if more:
            require_nowhere(images, me)
        come_back(rig, job, images, **opened_by(me))


def test_with_cpu_memory_of_the_same_tasks(rig: Rig) -> None:
    with rig.job(mib=16, pinned_kib=1024, children=1, plain_threads=2) as job:
        dump(rig, job, "--leave-running", **OURS, **KEEP)
        images = dump(rig, job, **OURS, **KEEP)
        require_kept(images, job)
        found = json.loads((images / "gpustasis-dump.json").read_text())["cpu_memory"]
        assert [task["stored_twice_bytes"] for task in found] == [0] * 2
        # Twice what the job has of its own beside what is on the GPU, and not that.
        assert all(16 * MIB < task["bytes"] < 48 * MIB and task["scans"] for task in found)
        assert pages_bytes(images) < 16 * MIB
        for pid in job.pids:
            assert (images / image_name(pid)).exists()
            assert (images / image_name(pid, MemoryKind.CPU)).exists()
        come_back(rig, job, images)


def test_what_criu_asks_in_another_way_is_stored_twice_and_said(newest_rig: Rig) -> None:
    """And comes back over the pages that are there."""
    rig = newest_rig
    with rig.job(mib=16, children=1) as job:
        images = rig.images()
        words = ["/usr/bin/env", f"CRIU_FAULT={WITHOUT_PAGEMAP_SCAN}"]
        dumped = rig.run([*words, *rig.dump_words(job, images)], images, "dump", KEEP)
        assert dumped.status == 0, dumped.errors
        for task in tasks(images):
            assert task["stored_twice_bytes"] == task["staged_bytes"] >= 16 * MIB
        assert "of the GPU memory of pid" in dumped.log
        come_back(rig, job, images)


def test_the_worker_brings_it_back_when_criu_is_killed_and_nobody_guards(rig: Rig) -> None:
    with rig.job(mib=16, children=1) as job:
        images = rig.images()
        kill_criu = dump_and_stop(with_config(rig, KEEP), job, images)
        assert find_users(images, GUARDIAN_COMM) == []
        for pid in job.pids:
            assert find_drop_record(pid) is None and not userfaultfds(pid)
        kill_criu()
        job.run_on()
        rig.settle(images)
        come_back(rig, job, dump(rig, job, **KEEP))


@pytest.mark.parametrize("left", ["all images", "no image"])
def test_recover_brings_it_back_when_the_worker_is_killed_too(rig: Rig, left: str) -> None:
    """Of what is there it needs no image; one that is there is compared with it."""
    with rig.job(mib=16, children=1) as job:
        images = rig.images()
        kill_criu = dump_and_stop(with_config(rig, KEEP), job, images)
        for pid in workers(images):
            os.kill(pid, signal.SIGKILL)
        kill_criu()
        if left == "no image":
            shutil.rmtree(images)
        for pid in job.pids:
            recover(rig, pid)
        job.run_on()
        come_back(rig, job, dump(rig, job, **KEEP))


def test_no_job_is_lost_wherever_criu_is_killed(newest_rig: Rig) -> None:
    tally = kill_points.run(newest_rig, Random(SEED), 15, whole_bound=False, settings=KEEP)
    require_kills(tally)


def test_no_job_is_lost_when_criu_and_its_worker_are_killed(newest_rig: Rig) -> None:
    tally = kill_points.run(
        newest_rig,
        Random(SEED),
        12,
        with_worker=True,
        whole_bound=False,
        shape=kill_points.SMALL_CPU,
        settings=KEEP | OURS,
    )
    require_kills(tally)


def test_a_disk_that_is_full_when_criu_dumps_the_job_costs_it_nothing(newest_rig: Rig) -> None:
    rig = newest_rig
    with rig.job(mib=16, children=1) as job:
        with small_filesystem(rig.scratch / "full", 16 * MIB, 0) as images:
            dumped = rig.dump(job, images, config=KEEP)
            assert dumped.status != 0
            assert dumped.log.count("keeping the staged memory of pid") == 2
            rig.settle(images)
            job.run_on()
        come_back(rig, job, dump(rig, job, **KEEP))


def test_a_disk_that_is_full_anywhere_costs_the_job_nothing(newest_rig: Rig) -> None:
    space.run(with_config(newest_rig, KEEP), Random(SEED), 5, every_file=False).require_clean()


@pytest.mark.parametrize("kind", [1, 2, 3], ids=["locked", "shared", "memfd"])
def test_staging_of_other_kinds(newest_rig: Rig, kind: int) -> None:
    """CRIU asks for shared memory in another way: that is refused by name, and dropped by auto. A
    memfd is CRIU's anyhow."""
    rig = newest_rig
    before = rig.emulator.status()["settings"]["staging"]
    rig.emulator.set("staging", str(kind))
    try:
        with rig.job(mib=16, children=1) as job:
            images = rig.images()
            dumped = rig.dump(job, images, "--leave-running", config=KEEP)
            job.run_on()
            if kind == 2:
                assert dumped.status != 0
                assert 'staging = "keep": the driver has put GPU memory into shared' in dumped.log
            else:
                assert dumped.status == 0, dumped.errors
            wanted = {1: "kept", 2: "dropped", 3: ""}[kind]
            images = dump(rig, job, **AUTO)
            assert {task["staging"] for task in tasks(images)} == {wanted}
            come_back(rig, job, images)
    finally:
        rig.emulator.set("staging", str(before))


def test_auto_keeps_what_is_known_to_fit(newest_rig: Rig) -> None:
    rig = newest_rig
    with rig.job(mib=8, children=1) as job:
        for more, wanted, why in (
            ({}, "kept", "there is room for that of all at once"),
            ({"nvml": "/no/nvml.so"}, "dropped", "is not known"),
        ):
            images = rig.images()
            dumped = rig.dump(job, images, "--leave-running", config=AUTO | more)
            assert dumped.status == 0, dumped.errors
            (said,) = [line for line in dumped.log.splitlines() if 'staging = "auto"' in line]
            assert why in said
            assert {task["staging"] for task in tasks(images)} == {wanted}
            job.run_on()


def test_tasks_that_do_not_fit_beside_each_other(newest_rig: Rig) -> None:
    """One after the other they do, if nothing is kept."""
    rig = newest_rig
    risk = {"risk": ["memory"]}
    with rig.job(mib=64, children=1) as job, memory_limit(job, 168 * MIB):
        dumped = rig.dump(job, rig.images(), "--leave-running", config=KEEP | risk)
        assert dumped.status != 0
        assert "beside that of other tasks, which is kept there" in dumped.log
        job.run_on()
        for config in (AUTO, {}):
            images = dump(rig, job, "--leave-running", **config, **risk)
            assert {task["staging"] for task in tasks(images)} == {"dropped"}


def test_auto_drops_what_it_has_kept_where_memory_becomes_short(newest_rig: Rig) -> None:
    """The limit of the job's cgroup is lowered while the driver works in the first task."""
    rig = newest_rig
    config = AUTO | {"parallel_gpus": 1}
    with rig.job(mib=64, children=1) as job, memory_limit(job, 2048 * MIB) as cgroup:
        for extra in (["--leave-running"], []):
            images = rig.images()
            log = log_path(images, "dump")
            rig.emulator.add_fault("checkpoint", "delay", delay_ms=10_000, pid=job.pids[0])
            criu = rig.start(rig.dump_words(job, images, extra), config)
            await_line(criu, log, "room for that of all at once")
            set_limit(cgroup, 168 * MIB)
            assert criu.wait(60) == 0, log.read_text()[-3000:]
            set_limit(cgroup, 2048 * MIB)
            assert "that of all tasks is dropped after all" in log.read_text()
            assert {task["staging"] for task in tasks(images)} == {"dropped"}
            if extra:
                job.run_on()
        come_back(rig, job, images)


def test_criu_lets_the_job_run_on_and_says_nothing(newest_rig: Rig) -> None:
    """A post-dump script that fails: the worker is left to bring it back."""
    rig = newest_rig
    with rig.job(mib=8, children=1) as job:
        images = rig.images()
        script = images.with_name("post-dump")
        script.write_text('#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" != post-dump ]\n')
        script.chmod(0o755)
        dumped = rig.dump(job, images, "--action-script", str(script), config=KEEP)
        assert dumped.status != 0
        job.run_on()
        rig.settle(images)
        come_back(rig, job, dump(rig, job, **KEEP))


def test_a_tree_that_has_nothing_to_keep(newest_rig: Rig) -> None:
    """Without CUDA nothing is asked for; what CRIU is to store it stores."""
    rig = newest_rig
    with rig.job(cuda=0, plain_children=1) as job:
        assert not list(dump(rig, job, "--leave-running", **KEEP).glob("gpustasis-*"))
    with rig.job(mib=8) as job:
        images = dump(rig, job, externalize=False, **KEEP)
        assert [task["staging"] for task in tasks(images)] == [""]
        come_back(rig, job, images)
