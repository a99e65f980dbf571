# SPDX-License-Identifier: Apache-2.0
"""criu writes its inventory before the end of others of its images. What it had not finished when
it was killed has no manifest and is no checkpoint to anybody; what has one can be restored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest

from campaigns.ram_dump import slow_ram
from campaigns.rig import Rig
from gpustasis._core import ARENA_MARKER, MANIFEST_NAME
from gpustasis.criu.images import INVENTORY_NAME
from gpustasis.draining.drain import drain
from gpustasis.errors import CheckpointError
from gpustasis.image.arena import Tier, stored_directory, tier_of
from gpustasis.image.verification import verify_directory

AT_MOST = 3200  # system calls after criu says that it writes its inventory: it is done by then
AROUND = range(-10, 12, 2)


@contextmanager
def _ram(rig: Rig) -> Iterator[Rig]:
    with slow_ram(rig) as (slow, _):
        yield slow


class Moments:
    """Dumps that are killed at a system call: whether criu was, whether its inventory was there,
    and whether there was a manifest."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.seen: list[tuple[bool, bool, bool]] = []
        self.refusals: list[str] = []

    def is_finished(self, at: int) -> bool:
        rig, images = self.rig, self.rig.images()
        with rig.job(mib=2) as job:
            counted = rig.scratch / "system-calls"
            killer = [
                str(rig.programs.killer),
                str(counted),
                str(at),
                "-",
                "Writing image inventory",
            ]
            words = rig.dump_words(job, images, ["--leave-running"])
            ended = rig.run([*killer, *words], images, "dump")
            rig.settle(images)
            job.run_on()
            job.end()
            there = (stored_directory(images) / MANIFEST_NAME).exists()
            self.seen.append((ended.status != 0, (images / INVENTORY_NAME).exists(), there))
            problems = verify_directory(images).problems
            if not there:
                assert ended.status != 0, at
                assert problems, at
                with pytest.raises(CheckpointError):
                    drain(images)
                refused = rig.restore(images)
                assert refused.status != 0, at
                self.refusals.append(refused.errors)
                return False
            assert not problems, at
            if (images / ARENA_MARKER).exists():
                drain(images)
                assert tier_of(images) == Tier.DURABLE
            restored = rig.restore(images)
            assert restored.status == 0, (at, restored.errors)
            job.run_on()
            return True


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", [nullcontext, _ram])
def test_what_criu_has_not_finished_has_no_manifest(
    newest_rig: Rig, kind: Callable[[Rig], AbstractContextManager[Rig]]
) -> None:
    with kind(newest_rig) as rig:
        moments = Moments(rig)
        least, most = 0, AT_MOST
        while most - least > 2:
            middle = (least + most) // 2
            least, most = (least, middle) if moments.is_finished(middle) else (middle, most)
        for one in AROUND:
            moments.is_finished(most + one)
    # criu was killed when it was done, and when its inventory was there and others were not.
    assert (True, True, True) in moments.seen
    assert (True, True, False) in moments.seen
    assert any(MANIFEST_NAME in why for why in moments.refusals)


def test_a_post_dump_script_finds_the_manifest(newest_rig: Rig) -> None:
    script = newest_rig.scratch / "look"
    found = newest_rig.scratch / "found"
    script.write_text(
        '#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" != post-dump ] || '
        f'ls "$CRTOOLS_IMAGE_DIR" > {found}\n'
    )
    script.chmod(0o755)
    images = newest_rig.images()
    with newest_rig.job(mib=2) as job:
        ended = newest_rig.dump(job, images, "--leave-running", "--action-script", str(script))
        assert ended.status == 0, ended.errors
        job.run_on()
    assert {MANIFEST_NAME, INVENTORY_NAME} <= set(found.read_text().split())
