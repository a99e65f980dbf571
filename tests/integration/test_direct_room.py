# SPDX-License-Identifier: Apache-2.0
"""gpu_memory = "direct" where the storage fails, and the host's memory is not enough to keep what
the GPUs held."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from campaigns.rig import Programs, Rig
from gpustasis.criu.find import Criu
from gpustasis.driver import ProcessState
from support.direct_memory import DIRECT, MIB, lying_disk, slow_copies
from support.driver_states import driver_of
from support.memory_limit import inside, limited_cgroup, set_limit

FAILS = (
    r"\.img: write: No space left on device; nor can it be kept in memory "
    r"\(keep GPU memory in host memory: No space left on device\): it stays on the GPU"
)


@pytest.fixture
def slow_rig(newest_criu: Criu, programs: Programs, tmp_path: Path) -> Iterator[Rig]:
    with slow_copies(newest_criu, programs, tmp_path) as rig:
        # It waits in the driver's gate before criu freezes it: a job that has made the last call of
        # a step, and not said so yet, would say it when it is let go.
        rig.emulator.set("lock_drain_ms", "200")
        yield rig


def test_it_stays_on_the_gpu_until_the_cgroup_of_criu_has_room(slow_rig: Rig) -> None:
    rig = slow_rig
    with (
        rig.job(mib=128) as job,
        lying_disk(rig.scratch / "disk", rig.scratch / "backing", 256 * MIB, 24 * MIB) as disk,
        limited_cgroup(120 * MIB) as cgroup,
    ):
        images = disk / "images"
        images.mkdir(mode=0o700)
        words = inside(cgroup, rig.dump_words(job, images, ["--leave-running"]))
        done = rig.run(words, images, "dump", DIRECT | {"compress": "none"})
        assert done.status != 0
        assert re.search(FAILS, done.log), done.errors
        assert driver_of(rig.environ).get_state(job.pid) is ProcessState.CHECKPOINTING
        steps = job.steps()
        time.sleep(0.5)
        assert job.steps() == steps
        set_limit(cgroup, 1024 * MIB)
        rig.settle(images)
        job.run_on()
