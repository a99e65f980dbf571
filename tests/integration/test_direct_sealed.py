# SPDX-License-Identifier: Apache-2.0
"""gpu_memory = "direct" for recipients: what the driver hands over is sealed on its way to the
disk, by the worker."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from campaigns.rig import Programs, Rig, log_path, small_disk, with_config, with_driver
from campaigns.steady_job import SteadyJob
from gpustasis._core import ImageReader, RegionKind, SealedReader, image_name
from gpustasis.criu.find import Criu
from gpustasis.criu.plugin import Scalar
from gpustasis.driver import ProcessState
from gpustasis.image.verification import verify_directory
from support.broken_dumps import break_off, hold_dump, recover
from support.certificates import Pair
from support.cpu_memory import OURS, refused
from support.direct_memory import (
    DIRECT,
    DRIVER,
    MIB,
    handed_over,
    lying_disk,
    slow_copies,
    slow_down,
    tasks,
    worker_of,
)
from support.driver_states import driver_of
from support.live_sealing import (
    gpustasis,
    key_of,
    needles,
    opened_by,
    ours,
    require_nowhere,
    sealed_for,
)
from support.recipients import make_recipient

from .test_sealed_whole import flip_byte, require_sealed
from .test_sealed_whole import sealed_for as sealed_whole_for

ENVELOPE = "gpustasis-sealed.cms"


@pytest.fixture
def direct_rig(newest_rig: Rig) -> Iterator[Rig]:
    with with_driver(newest_rig, DRIVER) as rig:
        yield with_config(rig, DIRECT)


@pytest.fixture
def slow_rig(newest_criu: Criu, programs: Programs, tmp_path: Path) -> Iterator[Rig]:
    with slow_copies(newest_criu, programs, tmp_path) as rig:
        # It waits in the driver's gate before criu freezes it: a job that has made the last call of
        # a step, and not said so yet, would say it when it is let go.
        rig.emulator.set("lock_drain_ms", "200")
        yield rig


def image_of(images: Path, pair: Pair, pid: int) -> ImageReader:
    return ImageReader.find_sealed(images, image_name(pid), key_of(images, pair))


def require_direct(images: Path, pair: Pair) -> None:
    found = tasks(images)
    assert [task["gpu_memory"] for task in found] == ["direct"] * len(found) != []
    for task in found:
        assert task["externalized"] and task["staging"] == "" and task["staged_because"] == ""
        info = image_of(images, pair, task["image_pid"]).info
        assert {region.kind for region in info.regions} == {RegionKind.DEVICE}
        assert sum(region.length for region in info.regions) == task["staged_bytes"] > 0


def dump(rig: Rig, job: SteadyJob, *extra: str, **config: Scalar) -> Path:
    images = rig.images()
    dumped = rig.dump(job, images, *extra, config={**DIRECT, **config})
    assert dumped.status == 0, dumped.errors
    if extra:
        job.run_on()
    else:
        assert job.wait() == -signal.SIGKILL
    rig.settle(images)
    return images


def come_back(rig: Rig, job: SteadyJob, images: Path, pair: Pair) -> None:
    done = rig.restore(images, config=opened_by(pair))
    assert done.status == 0, done.errors
    assert {task["gpu_memory"] for task in tasks(images, "restore")} == {"direct"}
    job.run_on()


def test_a_job_runs_on_and_comes_back(direct_rig: Rig, me: Pair, tmp_path: Path) -> None:
    rig = direct_rig
    with rig.job(mib=16, children=2, plain_children=1) as job:
        for extra in (["--leave-running"], []):
            # The job has a copy of its GPU memory, which is CPU memory.
            images = dump(rig, job, *extra, **sealed_for(me, **OURS))
            require_direct(images, me)
            require_nowhere(images, me)
            # GPU memory of three tasks, and CPU memory of four: each is listed, with the manifest.
            others = {f"gpustasis-sealed-{number}.img" for number in range(2, 9)}
            assert ours(images) == {ENVELOPE, "gpustasis-sealed.img", *others}
            assert SealedReader.open(images, key_of(images, me)).entries
            out = tmp_path / f"unsealed-{len(extra)}"
            done = gpustasis(rig, "unseal", images, "--key", me.key, "-o", out)
            assert done.returncode == 0, done.stderr
            assert not verify_directory(out).problems
        come_back(rig, job, images, me)
        images = dump(rig, job, "--leave-running", **sealed_for(me))  # what came back can go again
        require_direct(images, me)


def test_auto_is_direct_where_it_is_sealed_as_well(direct_rig: Rig, me: Pair) -> None:
    with direct_rig.job(mib=8) as job:
        images = dump(direct_rig, job, **sealed_for(me, gpu_memory="auto"))
        require_direct(images, me)
        come_back(direct_rig, job, images, me)


@pytest.mark.parametrize("parent_check", ["index", "data"])
def test_a_chain(direct_rig: Rig, me: Pair, parent_check: str) -> None:
    rig = direct_rig
    config = sealed_whole_for(me, **opened_by(me), chunk_size=4096, parent_check=parent_check)
    with rig.job(mib=16, children=1) as job:
        chain = [dump(rig, job, "--leave-running", **config)]
        chain.append(dump(rig, job, "--leave-running", **config, parent=str(chain[-1])))
        chain.append(dump(rig, job, **config, parent=str(chain[-1])))
        for number, images in enumerate(chain):
            require_direct(images, me)
            require_sealed(images, needles(images, me))
            assert key_of(images, me).ancestor_count == number
            assert all((task["ref"]["chunks"] > 0) == (number > 0) for task in tasks(images))
            assert all(task["damaged_in_parent"] == 0 for task in tasks(images))
        for pid in job.pids:
            assert {source.depth for source in image_of(chain[2], me, pid).info.sources} == {1, 2}
        come_back(rig, job, chain[2], me)


def test_a_damaged_parent_is_found_by_the_worker(direct_rig: Rig, me: Pair) -> None:
    """It reads the chain itself, by the key that it was handed."""
    rig = direct_rig
    config = sealed_for(me, **opened_by(me), compress="none")
    with rig.job(mib=16, alike=1) as job:  # most of its memory stays as it is
        parent = dump(rig, job, "--leave-running", **config)
        sealed = parent / "gpustasis-sealed-2.img"
        size = sealed.stat().st_size
        for at in range(MIB, size - MIB, MIB):
            flip_byte(sealed, at)
        images = dump(rig, job, **config, parent=str(parent), parent_check="data")
        (task,) = tasks(images)
        assert task["damaged_in_parent"] > 0
        # What is damaged was stored anew: nothing that a restore reads is.
        come_back(rig, job, images, me)


def test_all_of_it_with_cpu_memory(direct_rig: Rig, me: Pair) -> None:
    rig = direct_rig
    with rig.job(mib=16, pinned_kib=1024, children=1, plain_threads=2) as job:
        images = dump(rig, job, **sealed_whole_for(me, **OURS))
        require_direct(images, me)
        require_sealed(images, needles(images, me))
        come_back(rig, job, images, me)


def test_who_has_another_key_restores_nothing(direct_rig: Rig, me: Pair, tmp_path: Path) -> None:
    rig = direct_rig
    other = make_recipient(tmp_path, "other")
    with rig.job(mib=8) as job:
        images = dump(rig, job, **sealed_for(me))
        for config, said in ((opened_by(other), "for another key"), ({}, "names no private_key")):
            log = refused(rig.restore(images, config=config))
            assert said in log, log[-2000:]
            assert "Forking task" not in log
        come_back(rig, job, images, me)


def test_no_job_runs_with_what_was_changed(direct_rig: Rig, me: Pair) -> None:
    rig = direct_rig
    with rig.job(mib=8) as job:
        images = dump(rig, job, **sealed_for(me, compress="none"))
        sealed = images / "gpustasis-sealed-2.img"
        flip_byte(sealed, 4 * MIB)
        assert sealed.name in refused(rig.restore(images, config=opened_by(me)))
        assert not job.alive_pids()
        job.reap()
        flip_byte(sealed, 4 * MIB)
        come_back(rig, job, images, me)


def test_a_disk_without_room_for_all_that_is_sealed_stops_it_before_the_driver_is_asked(
    direct_rig: Rig, me: Pair
) -> None:
    rig = direct_rig
    with rig.job(mib=64) as job, small_disk(rig.scratch / "disk", 24 * MIB) as disk:
        images = disk / "images"
        images.mkdir(mode=0o700)
        rig.emulator.add_fault("checkpoint", "error")
        log = refused(rig.dump(job, images, config=DIRECT | sealed_for(me)))
        assert "gpustasis-sealed-2.img with" in log
        assert re.search(r"reserve \d+ MiB: No space left on device", log), log[-2000:]
        assert len(rig.emulator.status()["faults"]) == 1  # the driver was not asked
        rig.emulator.clear_faults()
        assert ours(images) == {ENVELOPE}
        rig.settle(images)
        job.run_on()


def test_storage_fails_midway_and_nothing_lies_in_the_clear(slow_rig: Rig, me: Pair) -> None:
    rig = slow_rig
    config = DIRECT | sealed_for(me, compress="none")
    with (
        rig.job(mib=64) as job,
        lying_disk(rig.scratch / "disk", rig.scratch / "backing", 256 * MIB, 24 * MIB) as disk,
    ):
        before = dump(rig, job, "--leave-running", **config)
        wanted = needles(before, me)
        images = disk / "images"
        images.mkdir(mode=0o700)
        dumped = rig.dump(job, images, "--leave-running", config=config)
        log = refused(dumped)
        assert "gpustasis-sealed-2.img with" in log and "No space left on device" in log
        assert "stays on the GPU" not in log
        rig.settle(images)
        assert ours(images) == {ENVELOPE}
        job.run_on()
        medium = (rig.scratch / "backing" / "disk").read_bytes()
        assert wanted and len(set(medium)) == 256  # something of it was written
        assert not any(needle in medium for needle in wanted)
        # The next one has a key of its own.
        come_back(rig, job, dump(rig, job, **config), me)


def test_criu_dies_and_the_worker_seals_all_and_brings_the_job_back(
    slow_rig: Rig, me: Pair
) -> None:
    rig = with_config(slow_rig, DIRECT | sealed_for(me))
    slow_down(rig, "d2h")
    with rig.job(mib=64) as job:
        with handed_over(rig, job) as (criu, images, _):
            criu.kill()
            criu.wait()
        rig.settle(images)
        job.run_on()
        assert "runs on" in (images / "gpustasis-undo.log").read_text()
        assert ours(images) == {ENVELOPE, "gpustasis-sealed-2.img"}
        assert image_of(images, me, job.pid).info.regions


def test_another_worker_hands_back_what_the_first_has_sealed(slow_rig: Rig, me: Pair) -> None:
    """The first is killed when the image is complete."""
    rig = with_config(slow_rig, DIRECT | sealed_for(me))
    with rig.job(mib=64) as job:
        images = rig.images()
        held = hold_dump(rig, job, images, "--leave-running")
        os.kill(worker_of(images), signal.SIGKILL)
        held.go_on()
        rig.settle(images)
        assert "is lost" not in log_path(images, "dump").read_text(errors="replace")
        job.run_on()


def test_both_die_when_the_image_is_complete_and_recover_hands_it_back(
    slow_rig: Rig, me: Pair, tmp_path: Path
) -> None:
    rig = with_config(slow_rig, DIRECT | sealed_for(me))
    other = make_recipient(tmp_path, "other")
    with rig.job(mib=64) as job:
        images = rig.images()
        break_off(rig, job, images)
        assert driver_of(rig.environ).get_state(job.pid) is ProcessState.CHECKPOINTED
        steps = job.steps()
        for words, said in (
            ([], "is sealed: name the private key"),
            (["--key", other.key], "for another key"),
        ):
            failed = gpustasis(rig, "recover", job.pid, "-D", images, *words)
            assert failed.returncode != 0
            assert said in " ".join(failed.stderr.split()), failed.stderr
            assert job.steps() == steps
        recover(rig, job.pid, "-D", images, "--key", me.key)
        job.run_on()
