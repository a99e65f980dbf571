# SPDX-License-Identifier: Apache-2.0
"""A job whose sealed dump fails, or is killed, gets its memory back out of what is sealed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from campaigns import driver_faults, kill_points
from campaigns.rig import Rig, small_filesystem, with_config
from gpustasis._core import ImageReader, MemoryKind, find_drop_record, image_name
from gpustasis.criu.plugin import format_config
from gpustasis.recovery import GUARDIAN_COMM, WORKER_COMM
from support.broken_dumps import break_off, recover
from support.certificates import Pair
from support.cpu_memory import OURS, refused
from support.live_sealing import gpustasis, key_of, opened_by, ours, sealed_for
from support.recipients import make_recipient

MIB = 1 << 20
SEED = 20261123


@pytest.fixture
def sealing(newest_rig: Rig, me: Pair) -> Rig:
    """Each of its dumps is sealed, and each of its restores opens one, also those with a
    configuration of their own."""
    overrides = newest_rig.scratch / "sealing.toml"
    overrides.write_text(format_config(sealed_for(me, **opened_by(me))))
    return replace(
        newest_rig, environ=dict(newest_rig.environ) | {"GPUSTASIS_OVERRIDES": str(overrides)}
    )


def test_a_job_whose_sealed_dump_fails_runs_on(sealing: Rig) -> None:
    driver_faults.run_dumps(sealing, codes=(304,), slow=False, random=Random(SEED)).require_clean()


def test_no_job_is_lost_when_criu_is_killed_during_a_sealed_dump(sealing: Rig) -> None:
    kill_points.require_kills(kill_points.run(sealing, Random(SEED), 15, whole_bound=False))


def test_guardians_put_back_what_is_sealed(rig: Rig, me: Pair) -> None:
    """criu and the worker are killed when all GPU memory is out of the job."""
    with rig.job(mib=32, children=1) as job:
        images = rig.images()
        break_off(with_config(rig, sealed_for(me)), job, images, GUARDIAN_COMM)
        rig.settle(images)
        for pid in job.pids:
            assert find_drop_record(pid) is None
            recover(rig, pid, "-D", images, "--key", me.key)  # the driver's work, a worker's else
        job.run_on()


@pytest.mark.parametrize("is_sealed", [False, True])
def test_images_that_a_job_needs_are_not_replaced(
    newest_rig: Rig, me: Pair, is_sealed: bool
) -> None:
    """By the dump of another job, while nobody is left who would put the memory back by himself."""
    rig = newest_rig
    config = sealed_for(me, layout="packed") if is_sealed else {}
    with rig.job(mib=8) as job, rig.job(mib=4) as other:
        images = rig.images()
        break_off(with_config(rig, sealed_for(me) if is_sealed else {}), job, images)
        before = ours(images)
        log = refused(rig.dump(other, images, "--leave-running", config=config))
        assert f"{images} holds memory that is missing in process {job.pid}" in log
        assert "locked pid" not in log
        assert ours(images) == before
        other.run_on()
        recover(rig, job.pid, *(["--key", me.key] if is_sealed else []))
        job.run_on()
        assert rig.dump(other, images, "--leave-running").status == 0
        other.run_on()


@pytest.mark.one_criu
def test_recover_puts_back_what_is_sealed(rig: Rig, me: Pair, tmp_path: Path) -> None:
    """All that criu had beside it is killed as well; also of a dump that did not come to its
    manifest, which a sealed one gets last."""
    other = make_recipient(tmp_path, "other")
    with rig.job(mib=32, children=1) as job:
        for whole in (True, False):
            images = rig.images()
            break_off(with_config(rig, sealed_for(me)), job, images)
            if not whole:
                (images / "gpustasis-sealed.img").unlink()
            for pid in job.pids:
                assert find_drop_record(pid) is not None
                for words, said in (
                    ([], "is sealed: name the private key"),
                    (["--key", other.key], "for another key"),
                ):
                    failed = gpustasis(rig, "recover", pid, *words)
                    assert failed.returncode != 0
                    assert said in failed.stderr
                    assert find_drop_record(pid) is not None
                recover(rig, pid, "--key", me.key)
                assert find_drop_record(pid) is None
            job.run_on()


def test_an_image_of_cpu_memory_alone_does_not_say_that_a_process_runs(
    newest_rig: Rig, me: Pair
) -> None:
    """The driver has it checkpointed; nothing in the directory says so, and its name does."""
    rig = newest_rig
    with rig.job(mib=32) as job:
        images = rig.images()
        break_off(with_config(rig, sealed_for(me, **OURS)), job, images, GUARDIAN_COMM)
        rig.settle(images)
        assert find_drop_record(job.pid) is None
        (images / "gpustasis-sealed.img").unlink(missing_ok=True)
        key, away = key_of(images, me), images / "away"
        for path in images.glob("gpustasis-sealed-*.img"):
            path.rename(away)
            try:
                ImageReader.find_sealed(images, image_name(job.pid), key)
            except FileNotFoundError:
                break  # it was that of the GPU's memory
            away.rename(path)
        assert ImageReader.find_sealed(images, image_name(job.pid, MemoryKind.CPU), key)
        done = gpustasis(rig, "recover", job.pid, "-D", images, "--key", me.key)
        assert done.returncode == 0, done.stderr
        assert "was checkpointed, and runs again" in done.stdout
        job.run_on()


def test_the_worker_puts_back_what_is_sealed(rig: Rig, me: Pair) -> None:
    """criu and the guardians are killed: the worker has the key as well."""
    with rig.job(mib=32, children=1) as job:
        images = rig.images()
        break_off(with_config(rig, sealed_for(me)), job, images, WORKER_COMM)
        rig.settle(images)
        job.run_on()


def test_a_full_disk_leaves_nothing_but_what_is_sealed(newest_rig: Rig, me: Pair) -> None:
    with (
        newest_rig.job(mib=16) as job,
        small_filesystem(newest_rig.scratch / "full", 3 * MIB, 0) as images,
    ):
        dumped = newest_rig.dump(job, images, config=sealed_for(me))
        assert "gpustasis-sealed-2.img with" in refused(dumped)
        assert "No space left on device" in dumped.log
        assert ours(images) == {"gpustasis-sealed.cms"}
        newest_rig.settle(images)
        job.run_on()
