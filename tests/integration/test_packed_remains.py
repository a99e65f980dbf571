# SPDX-License-Identifier: Apache-2.0
"""What a packed or sealed dump leaves that fails when all is written, or is killed: no checkpoint,
neither its own nor one that was there before."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from campaigns.rig import Rig
from gpustasis.criu.plugin import Scalar
from support.certificates import Pair
from support.cpu_memory import FIRST_CHECKPOINT, OURS, running
from support.live_sealing import opened_by


@pytest.fixture(params=["packed", "sealed"])
def config(request: pytest.FixtureRequest, me: Pair) -> Mapping[str, Scalar]:
    if request.param == "packed":
        return OURS | {"layout": "packed"}
    return OURS | opened_by(me) | {"recipients": [str(me.certificate)]}


def whole_of(images: Path) -> set[str]:
    """What makes a checkpoint of a directory: CRIU reads it first, or it lists the rest."""
    names = {path.name for path in images.glob("*.img")}
    ours = {"inventory.img", "pstree.img", "gpustasis-files.img", "gpustasis-sealed.img"}
    return {name for name in names if name in ours or name.startswith("ids-")}


def test_a_dump_that_fails_when_all_is_written(
    newest_rig: Rig, memory_job: Path, config: Mapping[str, Scalar]
) -> None:
    rig, seen = newest_rig, newest_rig.scratch / "seen"
    script = rig.scratch / "fails-at-the-end"
    script.write_text(
        '#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" != post-dump ] ||'
        f' {{ ls "$CRTOOLS_IMAGE_DIR" >{seen}; exit 1; }}\n'
    )
    script.chmod(0o755)
    with running(rig, memory_job, mib=4) as job:
        images = rig.images()
        dumped = rig.dump(job, images, "--action-script", str(script), config=config)
        assert dumped.status != 0
        assert {"inventory.img", "pstree.img"} < set(seen.read_text().split())
        rig.settle(images)
        assert whole_of(images) == set()
        job.run_on()


def test_a_dump_that_is_killed_where_another_checkpoint_is(
    newest_rig: Rig, memory_job: Path, config: Mapping[str, Scalar]
) -> None:
    rig = newest_rig
    with running(rig, memory_job, mib=4) as job:
        images = rig.images()
        dumped = rig.dump(job, images, "--leave-running", config=config)
        assert dumped.status == 0, dumped.errors
        assert len(whole_of(images)) == 4
        job.run_on()
        killer = [str(rig.programs.killer), str(rig.scratch / "calls"), "1", "-", FIRST_CHECKPOINT]
        killed = rig.run([*killer, *rig.dump_words(job, images)], images, "dump", config)
        assert killed.status == 137, killed.errors
        rig.settle(images)
        assert whole_of(images) == set()
        job.run_on()
