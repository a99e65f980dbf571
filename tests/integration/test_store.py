# SPDX-License-Identifier: Apache-2.0
"""Chains of checkpoints and what can happen to them between dump and restore, with real CRIU."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from campaigns import chains, damage
from campaigns.rig import Rig
from campaigns.steady_job import SteadyJob
from gpustasis._core import PARENT_LINK, ImageReader, image_name, read_manifest
from gpustasis.image.prune import Rules, prune
from gpustasis.image.verification import verify_directory
from support.chains import is_whole

SEED = 20261121
Gpustasis = Callable[..., "subprocess.CompletedProcess[str]"]


def dump_on(rig: Rig, job: SteadyJob, parent: Path, *, last: bool = False) -> Path:
    images = rig.images()
    extra = () if last else ("--leave-running",)
    dumped = rig.dump(job, images, *extra, config={"parent": str(parent)})
    assert dumped.status == 0, dumped.errors
    if last:
        assert job.wait() == -signal.SIGKILL
    rig.settle(images)
    return images


def full_dump(rig: Rig, job: SteadyJob) -> Path:
    images = rig.images()
    dumped = rig.dump(job, images, "--leave-running")
    assert dumped.status == 0, dumped.errors
    job.run_on()
    return images


def refused(rig: Rig, job: SteadyJob, images: Path, *reasons: str) -> None:
    """A restore comes to nothing, before anything is made, and says why."""
    how = damage.expect_refusal(rig, job, images)
    assert how == "refused before anything was made"
    log = images.with_name(f"{images.name}.restore.log").read_text()
    said = [line for line in log.splitlines() if "Error (gpustasis): cuda_plugin: " in line]
    for reason in reasons:
        assert any(re.search(reason, line) for line in said), f"not {reason} but {said}"


def test_a_parent_is_deleted_between_dump_and_restore(rig: Rig) -> None:
    with rig.job(mib=48, children=1) as job:
        first = full_dump(rig, job)
        second = dump_on(rig, job, first)
        third = dump_on(rig, job, second, last=True)
        for pid in job.pids:  # some chunks have not changed since the first
            sources = ImageReader.open(third / image_name(pid)).info.sources
            assert {source.depth for source in sources} == {1, 2}
        away = first.with_name("away")
        first.rename(away)
        refused(
            rig,
            job,
            third,
            read_manifest(away).checkpoint_id.hex(),
            f"{second.name}/{PARENT_LINK} to ../{first.name}: No such",
        )
        problems = verify_directory(third, threads=1).problems
        assert len(problems) == len(job.pids)
        assert all(read_manifest(away).checkpoint_id.hex() in problem for problem in problems)
        away.rename(first)
        assert is_whole(third)
        restored = rig.restore(third)
        assert restored.status == 0, restored.errors
        job.run_on()


def test_a_parent_is_replaced_by_another_checkpoint_of_the_same_job(rig: Rig) -> None:
    """Same pid, same start time, same name of the image: the digest tells."""
    with rig.job(mib=48) as job:
        other, first = full_dump(rig, job), full_dump(rig, job)
        second = dump_on(rig, job, first, last=True)
        assert ImageReader.open(second / image_name(job.pid)).info.sources
        away = first.with_name("away")
        first.rename(away)
        shutil.copytree(other, first)
        refused(rig, job, second, read_manifest(away).checkpoint_id.hex(), "is another image")
        assert is_whole(other)
        shutil.rmtree(first)
        away.rename(first)
        restored = rig.restore(second)
        assert restored.status == 0, restored.errors
        job.run_on()


def test_a_single_bit_in_a_parent_is_found(newest_rig: Rig) -> None:
    """In a chunk, so not before it is read: then everything that was made is killed."""
    rig = newest_rig
    with rig.job(mib=48) as job:
        first = full_dump(rig, job)
        second = dump_on(rig, job, first, last=True)
        later = ImageReader.open(second / image_name(job.pid))
        offset = next(
            later.chunk(index).offset for index in range(len(later)) if later.chunk(index).source
        )
        image = first / image_name(job.pid)
        whole = image.read_bytes()
        raw = bytearray(whole)
        raw[offset + 100] ^= 16
        image.write_bytes(raw)
        assert damage.expect_refusal(rig, job, second) == "killed what was made"
        image.write_bytes(whole)
        assert rig.restore(second).status == 0
        job.run_on()


def test_two_dumps_name_one_parent_at_once(rig: Rig) -> None:
    jobs = [
        SteadyJob(rig.programs.job, rig.scratch / f"job-{seed}", rig.environ, mib=8, seed=seed)
        for seed in range(2)
    ]
    try:
        parent = full_dump(rig, jobs[0])
        places = [rig.images() for _ in jobs]
        running = [
            rig.start(rig.dump_words(job, images), {"parent": str(parent)})
            for job, images in zip(jobs, places, strict=True)
        ]
        assert [criu.wait(60) for criu in running] == [0, 0]
        assert [job.wait() for job in jobs] == [-signal.SIGKILL] * 2
        for images in places:
            rig.settle(images)
            assert read_manifest(images).chain_length == 1
            assert is_whole(images)
            restored = rig.restore(images)
            assert restored.status == 0, restored.errors
        for job in jobs:
            job.run_on()
    finally:
        for job in jobs:
            job.end()


def test_a_dump_holds_on_to_its_parent_while_somebody_prunes(newest_rig: Rig) -> None:
    """The dump has its parent from the moment it has named it; prune finds it in use."""
    rig = newest_rig
    store = rig.scratch / "store"
    store.mkdir()
    with rig.job(mib=32) as job:
        old, new, images = (store / name for name in ("old", "new", "images"))
        for place in (old, new):
            place.mkdir()
            assert rig.dump(job, place, "--leave-running").status == 0
        images.mkdir()
        rig.emulator.add_fault("checkpoint", "delay", delay_ms=8000)  # while somebody prunes
        criu = rig.start(rig.dump_words(job, images), {"parent": str(old)})
        log = store / "images.dump.log"
        while "cuda_plugin: parent: " not in (log.read_text() if log.exists() else ""):
            assert criu.poll() is None, log.read_text()
        seen = set()
        while criu.poll() is None:
            reasons = {v.entry.name: v.reasons for v in prune(store, Rules(last=1)).verdicts}
            seen |= set(reasons["old"])
        assert criu.wait() == 0
        assert job.wait() == -signal.SIGKILL
        rig.settle(images)
        assert seen & {"in use", "needed by images"}
        prune(store, Rules(last=1))
        assert {path.name for path in store.iterdir() if path.is_dir()} == {"old", "images"}
        assert is_whole(images)
        assert rig.restore(images).status == 0
        job.run_on()


def test_criu_is_killed_during_dumps_on_a_parent(newest_rig: Rig) -> None:
    """What was dropped comes back through the chain: by the worker, or by `gpustasis recover`."""
    by_worker, by_hand = chains.run_kills(newest_rig, Random(SEED), 12, whole_bound=False)
    by_worker.require_clean()
    by_hand.require_clean()


def test_a_store_in_daily_use(newest_rig: Rig) -> None:
    """The long form is the campaign chains of make soak."""
    chains.run(newest_rig, Random(SEED), 14).require_clean()


@pytest.mark.one_criu
def test_there_and_back_with_the_command(
    rig: Rig, gpustasis: Gpustasis, monkeypatch: pytest.MonkeyPatch
) -> None:
    criu = str(rig.criu.root or rig.criu.program)
    store = rig.scratch / "store"
    store.mkdir()

    def call(*words: str | Path) -> str:
        done = gpustasis(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    with rig.job(mib=64) as job:  # so much that not all of it changes meanwhile
        places = [store / f"c{number}" for number in range(4)]
        words = ["checkpoint", str(job.pid), "--criu", criu, "--leave-running", "-D"]
        call(*words, places[0])
        for parent, place in itertools.pairwise(places):
            job.run_on(1)
            said = call(*words, place, "--parent", parent, "--max-chain", "2")
            if place is places[3]:
                assert "is a full checkpoint: max_chain" in said
            else:
                assert re.search(r"[1-9][0-9.]* MiB of it in earlier checkpoints already", said)
        chained, full = places[2], places[3]
        assert re.search(r"MiB of it in [12] earlier checkpoint", call("verify", chained))
        shown = json.loads(call("inspect", "--json", chained))
        assert shown["parent"]["directory"] == str(places[1])
        assert (shown["parent"]["chain_length"], shown["parent"]["state"]) == (2, "right")
        changed = json.loads(call("diff", "--json", places[1], chained))
        assert changed["total"]["same_bytes"] + changed["total"]["moved_bytes"] > 0
        assert changed["total"]["fresh_bytes"] > 0

        # The job dies; it comes back from a copy that needs nothing else.
        last = store / "last"
        call("checkpoint", str(job.pid), "--criu", criu, "-D", last, "--parent", full)
        assert job.wait() == -signal.SIGKILL
        call("flatten", last, "-o", rig.scratch / "flat")
        call("prune", store, "--keep-last", "1")
        assert {path.name for path in store.iterdir() if path.is_dir()} == {"c3", "last"}
        assert "whole" in call("verify", last)
        shutil.rmtree(store)
        call("restore", "--criu", criu, "-D", rig.scratch / "flat")
        job.run_on()


def test_no_parent_is_a_clear_error(newest_rig: Rig, gpustasis: Gpustasis) -> None:
    rig = newest_rig
    with rig.job(mib=4) as job:
        empty, images = rig.images(), rig.images()
        words = ["checkpoint", str(job.pid), "-D", images, "--leave-running", "--parent"]
        done = gpustasis(*words, empty)
        assert done.returncode == 3
        assert "is no parent: it holds nothing that gpustasis saved" in done.stderr
        full = full_dump(rig, job)
        done = gpustasis(*words[:3], full, *words[4:], full)
        assert done.returncode == 3
        assert "cannot be its own parent" in done.stderr
        job.run_on()
