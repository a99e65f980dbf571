# SPDX-License-Identifier: Apache-2.0
"""How often to checkpoint, so that what checkpoints cost and what failures lose is least."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

SHORTEST_S = 10.0
# Before anything was measured: the first checkpoint is made soon, and measured.
FIRST_S = 60.0
MEASURED = 5  # of the newest


def best_interval(cost_s: float, mtbf_s: float) -> float:
    """Seconds of work between two checkpoints that each stop the job for `cost_s`, where it fails
    once in `mtbf_s`, both above 0.

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
    2006, equation 37; its first term is J. W. Young's of 1974.
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    share = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(share) / 3 + share / 9) - cost_s


def automatic(downtimes_s: Sequence[float], mtbf_s: float) -> float:
    """The interval from what the last checkpoints have cost; oldest first."""
    if not downtimes_s:
        return FIRST_S
    cost = max(median(downtimes_s[-MEASURED:]), 1e-3)
    return max(SHORTEST_S, best_interval(cost, mtbf_s))
