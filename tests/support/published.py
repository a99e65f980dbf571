# SPDX-License-Identifier: Apache-2.0
"""Published figures of large training jobs, and what the planner says to their inputs.

Where an input was not published, a range stands for it, and the answer is a range.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from gpustasis.planning.figures import Figures
from gpustasis.planning.interval import Costs, ettr
from gpustasis.planning.plan import job_mtbf_s

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A published ETTR. mtbf_s, intervals, recoveries, slowdowns: from the least to the greatest
    that the inputs allow; lag and stop of its checkpoints are none. at_least: "more than" so much
    was published, not so much."""

    row: str
    mtbf_s: tuple[float, ...]
    intervals: tuple[float, ...]
    recoveries: tuple[float, ...]
    published: float
    slowdowns: tuple[float, ...] = (0.0,)
    at_least: bool = False

    def answers(self) -> tuple[float, float]:
        """The least and the greatest ETTR by the planner."""
        found = [
            ettr(Costs(stop_s=0, lag_s=0, recovery_s=recovery, slowdown=slow), mtbf_s, interval)
            for mtbf_s, interval, recovery, slow in itertools.product(
                self.mtbf_s, self.intervals, self.recoveries, self.slowdowns
            )
        ]
        return min(found), max(found)


def mtbf_of(gpus: int, node_failures: float) -> float:
    """By failures in 1,000 node days, 8 GPUs to a node."""
    return job_mtbf_s(Figures(("option", {"gpus": gpus, "node_failures": node_failures})))


JOBS = (
    Job(
        row="RSC-1, a job on all of it",
        mtbf_s=(mtbf_of(16_000, 6.50),),
        intervals=(5 * MINUTE,),
        recoveries=(5 * MINUTE,),
        published=0.93,
    ),
    Job(
        row="RSC-1, 2,048 to 4,096 GPUs",
        mtbf_s=(mtbf_of(4096, 6.50), mtbf_of(2048, 6.50)),
        intervals=(HOUR,),
        recoveries=(5 * MINUTE, 20 * MINUTE),
        published=0.90,
        at_least=True,
    ),
    Job(
        row="100,000 GPUs that fail as RSC-2's",
        mtbf_s=(mtbf_of(100_000, 2.34),),
        intervals=(2 * MINUTE, 4 * MINUTE),
        recoveries=(2 * MINUTE, 4 * MINUTE),
        published=0.90,
    ),
    Job(
        row="Llama 3 405B",
        mtbf_s=(54 * DAY / 466,),
        intervals=(5 * MINUTE, 30 * MINUTE),
        recoveries=(5 * MINUTE, 20 * MINUTE),
        published=0.90,
        at_least=True,
    ),
    Job(
        row="MegaScale",
        mtbf_s=(3 * 7 * DAY / 100, 8 * 7 * DAY / 100),
        intervals=(30 * MINUTE,),
        recoveries=(10 * MINUTE,),
        published=0.90,
        at_least=True,
    ),
    Job(
        row="ByteRobust, dense model",
        mtbf_s=(90 * DAY / 175,),
        intervals=(MINUTE,),
        recoveries=(1 * MINUTE, 50 * MINUTE),
        slowdowns=(0.0071, 0.009),
        published=0.97,
    ),
    Job(
        row="FT-HSDP's comparison, 98,000 GPUs",
        mtbf_s=(18 * MINUTE,),
        intervals=(MINUTE, 20 * MINUTE),
        recoveries=(10 * MINUTE,),
        published=0.44,
    ),
)
# GPUs, failures in 1,000 node days, hours from failure to failure as published for RSC-1.
MTBFS = ((16_384, 6.50, 1.8), (131_072, 6.50, 0.23))
MTBF_OFF = (1024, 6.50, 7.9)  # not reproduced
