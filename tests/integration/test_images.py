# SPDX-License-Identifier: Apache-2.0
"""Images that are damaged, missing, exchanged or do not fit on the disk."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from random import Random
from subprocess import CompletedProcess

from campaigns import bit_flips, damage, space
from campaigns.rig import Rig
from gpustasis._core import MANIFEST_NAME

SEED = 30


def test_a_full_image_directory_costs_no_job(rig: Rig) -> None:
    space.run(rig, Random(SEED), sizes=8, every_file=False).require_clean()


def test_no_damage_is_restored(newest_rig: Rig) -> None:
    damage.run(newest_rig, Random(SEED), flips=24, cuts=6).require_clean()


def test_files_of_another_checkpoint_or_process_are_refused(rig: Rig) -> None:
    with rig.job(mib=2, children=1) as job:
        first = rig.images()
        assert rig.dump(job, first, "--leave-running").status == 0
        job.run_on()
        images = rig.images()
        assert rig.dump(job, images).status == 0
        job.wait()
        rig.settle(images)
        root, child = (f"gpustasis-{pid}.img" for pid in job.pids)
        for names in ([MANIFEST_NAME], [root], [root, child, MANIFEST_NAME]):
            mixed = rig.copy(images)
            for name in names:
                shutil.copyfile(first / name, mixed / name)
            damage.expect_refusal(rig, job, mixed)
        swapped = rig.copy(images)
        (swapped / root).rename(swapped / "other")
        (swapped / child).rename(swapped / root)
        (swapped / "other").rename(swapped / child)
        damage.expect_refusal(rig, job, swapped)
        assert rig.restore(images).status == 0
        job.run_on()


def test_the_reason_is_on_the_terminal(
    newest_rig: Rig, gpustasis: Callable[..., CompletedProcess[str]]
) -> None:
    checkpoint = damage.take(newest_rig, mib=2)
    image = checkpoint.images / f"gpustasis-{checkpoint.job.pid}.img"
    raw = bytearray(image.read_bytes())
    raw[len(raw) // 2] ^= 4
    image.write_bytes(raw)
    criu = newest_rig.criu
    restored = gpustasis(
        "restore", "-D", checkpoint.images, "--criu", str(criu.root or criu.program)
    )
    assert restored.returncode == 12
    assert image.name in restored.stderr
    assert checkpoint.job.alive_pids() == []


def test_verify_finds_every_flipped_bit(newest_rig: Rig) -> None:
    checkpoint = damage.take(newest_rig, mib=2, children=1)
    bit_flips.run(checkpoint.images, Random(SEED), 60).require_clean()
