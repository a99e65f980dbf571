# SPDX-License-Identifier: Apache-2.0
"""What a packed or sealed dump leaves: if a script fails that was shown its checkpoint, that; if it
is killed before, no checkpoint, neither its own nor one that was there before."""

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


def test_a_script_that_fails_was_shown_a_checkpoint(
    newest_rig: Rig, memory_job: Path, config: Mapping[str, Scalar]
) -> None:
    """And whoever runs it may have committed it: it stays, as without a layout."""
    rig, seen = newest_rig, newest_rig.scratch / "seen"
    script = rig.scratch / "fails-at-the-end"
    script.write_text(
        '#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" != post-dump ] ||'
        f' {{ ls "$CRTOOLS_IMAGE_DIR" >{seen}; exit 1; }}\n'
    )
    script.chmod(0o755)
    with running(rig, memory_job, mib=4, criu_restores=True) as job:
        images = rig.images()
        dumped = rig.dump(job, images, "--action-script", str(script), config=config)
        assert dumped.status != 0
        rig.settle(images)
        found = set(seen.read_text().split())
        assert {"inventory.img", "pstree.img"} < found
        assert found <= {path.name for path in images.iterdir()}
        assert len(whole_of(images)) == 4
        job.run_on()
        job.end()
        restored = rig.restore(images, config=config)
        assert restored.status == 0, restored.errors
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
