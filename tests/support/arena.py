# SPDX-License-Identifier: Apache-2.0
"""Dumps into memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from campaigns.rig import Rig, Run
from campaigns.steady_job import SteadyJob
from gpustasis.criu.plugin import Setting


def ram(arena: Path, **more: Setting) -> dict[str, Setting]:
    """The keys of such a dump."""
    return {"tier": "ram", "arena": str(arena), **more}


def dump(rig: Rig, job: SteadyJob, *extra: str, **config: Setting) -> Path:
    """The image directory of one that succeeds."""
    images = rig.images()
    done = rig.dump(job, images, *extra, config=config)
    assert done.status == 0, done.errors
    return images


def statistics(images: Path) -> dict[str, Any]:
    """Of a dump into `images`."""
    found: dict[str, Any] = json.loads((images / "gpustasis-dump.json").read_text())
    return found


def restore(rig: Rig, job: SteadyJob, images: Path) -> Run:
    """One that succeeds; the job has run on since."""
    rig.settle(images)
    done = rig.restore(images)
    assert done.status == 0, done.errors
    job.run_on()
    return done
