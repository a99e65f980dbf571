# SPDX-License-Identifier: Apache-2.0
"""criu is killed at many points of a dump: the job runs on, and has lost nothing."""

from __future__ import annotations

import random
import shutil
from collections import Counter

from campaigns.rig import Rig
from campaigns.steady_job import SteadyJob
from support.cpu_memory import FIRST_CHECKPOINT, OURS

# In criu's log of a dump:
CRIU_IN_TASKS = "Dumping task (pid:"
ALL_DUMPED = "Writing image inventory"


def kill_dumps(rig: Rig, job: SteadyJob, kills: int) -> None:
    """So many kills while the plugin stores memory, and as many when all is dumped. In between
    CRIU's own code stands in the tasks: one that it stands in when criu dies is lost, with stock
    CRIU too."""
    moments = random.Random(4)
    count = rig.scratch / "system-calls"
    killed: Counter[str] = Counter()

    def dump(number: int, mark: str) -> int:
        """Killing criu at that system call behind `mark` in its log; how many it made."""
        images = rig.images()
        killer = [str(rig.programs.killer), str(count), str(number), "-", mark]
        words = [*killer, *rig.dump_words(job, images, ["--leave-running"])]
        ended = rig.run(words, images, "dump", OURS)
        assert ended.status == 0 or (number and ended.status == 137), ended.errors
        killed[mark] += ended.status == 137
        shutil.rmtree(images, ignore_errors=True)  # a hundred would fill a disk
        return int(count.read_text())

    in_tasks, after = dump(0, CRIU_IN_TASKS), dump(0, ALL_DUMPED)
    ranges = {FIRST_CHECKPOINT: dump(0, FIRST_CHECKPOINT) - in_tasks, ALL_DUMPED: after}
    job.run_on(1)
    assert min(ranges.values()) > 0, ranges
    for mark, calls in ranges.items():
        for trial in range(10 * kills):  # no two dumps make as many
            if killed[mark] == kills:
                break
            part = trial % kills
            dump(1 + int((part + moments.random()) * calls / kills), mark)
            job.run_on(1)
        assert killed[mark] == kills, killed
