"""Images with stripes, with real CRIU: dumps, chains, restores, and the way back after a kill."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from campaigns import kill_points
from campaigns.rig import Rig
from gpustasis._core import ImageReader, image_name
from gpustasis.criu.plugin import format_config
from gpustasis.image.verification import verify_directory

SEED = 31


def striped(images: Path, pid: int) -> list[str]:
    return sorted(path.name for path in images.glob(f"gpustasis-{pid}.*.img"))


def names(pid: int, stripes: Sequence[int]) -> list[str]:
    return [image_name(pid, stripe) for stripe in stripes]


def test_a_chain_with_stripes_and_a_restore_through_it(rig: Rig) -> None:
    with rig.job(mib=16) as job:
        first, second = rig.images(), rig.images()
        dumped = rig.dump(job, first, "--leave-running", config={"stripes": 3})
        assert dumped.status == 0, dumped.errors
        assert striped(first, job.pid) == names(job.pid, [1, 2])
        job.run_on()
        dumped = rig.dump(job, second, config={"stripes": 2, "parent": str(first)})
        assert dumped.status == 0, dumped.errors
        assert striped(second, job.pid) == names(job.pid, [1])
        assert job.wait() == -signal.SIGKILL
        sources = ImageReader.open(second / image_name(job.pid)).info.sources
        assert {(0, 1), (1, 1)} <= {(source.depth, source.stripe) for source in sources}
        assert verify_directory(second).problems == []

        # Without any one of the stripes nothing is created.
        for images, stripe in ((second, 1), (first, 1)):
            lost = images / image_name(job.pid, stripe)
            kept = lost.rename(images / "kept")
            refused = rig.restore(second)
            assert refused.status != 0
            assert lost.name in refused.errors
            assert not job.alive()
            lost.write_bytes(kept.read_bytes()[:-1])
            refused = rig.restore(second)
            assert refused.status != 0
            assert lost.name in refused.errors
            kept.replace(lost)
        restored = rig.restore(second)
        assert restored.status == 0, restored.errors
        job.run_on()


def test_fewer_stripes_in_the_same_directory(newest_rig: Rig) -> None:
    rig = newest_rig
    with rig.job(mib=8) as job:
        images = rig.images()
        for stripes in (5, 2, 1):
            dumped = rig.dump(job, images, "--leave-running", config={"stripes": stripes})
            assert dumped.status == 0, dumped.errors
            assert striped(images, job.pid) == names(job.pid, range(1, stripes))
        assert verify_directory(images).problems == []
        job.run_on()


@pytest.mark.parametrize("with_worker", [False, True])
def test_criu_is_killed_during_dumps_with_stripes(newest_rig: Rig, with_worker: bool) -> None:
    """What was dropped comes back through the stripes: by the worker, or by `gpustasis recover`."""
    config = newest_rig.scratch / "stripes.toml"
    config.write_text(format_config({"stripes": 3}))
    environ = dict(newest_rig.environ) | {"GPUSTASIS_CONFIG": str(config)}
    rig = replace(newest_rig, environ=environ)
    tally = kill_points.run(rig, Random(SEED), 8, with_worker=with_worker, whole_bound=False)
    tally.require_clean()
    assert any(rig.scratch.glob("*-images/gpustasis-*.2.img"))
