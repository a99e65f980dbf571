# SPDX-License-Identifier: Apache-2.0
"""Whose loss a job is that does not live on when criu is killed during a dump.

It is CRIU's only if its own code was seen to stand in each task that died of it (criu_code) at that
moment, while tasks were being dumped, and if every other task runs on. Any other loss is ours.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from campaigns.tally import Tally

CRIUS_PHASE = "dump tasks"  # the only one in which CRIU's code stands in tasks
_CRIUS_SIGNALS = {"SIGTRAP", "SIGSEGV"}  # what the tasks die of in which it stood
_END_S = 10.0  # children end with their root; on a busy machine that takes a moment
_POLL_S = 0.01
_SHARE = 0.1  # of the jobs whose dump is killed in CRIUS_PHASE, CRIU loses so many by itself
_CERTAINTY = 0.999  # so often it loses no more than most() of them


class Tree(Protocol):
    """What a SteadyJob has of this. pids: the root first."""

    pids: tuple[int, ...]

    def ended(self) -> dict[int, int | None]: ...

    def run_on(self, *, without: Collection[int]) -> None: ...


@dataclass(frozen=True, slots=True)
class Loss:
    """deaths: processes of the tree that have ended, and of what. lacks: what is missing for a
    proof that CRIU's own code in them killed them; empty: nothing."""

    deaths: Mapping[int, str]
    lacks: str

    @property
    def of_what(self) -> str:
        """Without what children died of that were killed with their root."""
        hows = set(self.deaths.values())
        return " and ".join(sorted(hows - {"SIGKILL"} or hows)) or "a hang"


def judge_in(phase: str, job: Tree, proofs: Mapping[int, str], gone: Collection[int] = ()) -> Loss:
    """The same of a dump that was killed in that phase."""
    if phase == CRIUS_PHASE:
        return judge(job, proofs, gone)
    deaths = _deaths(job)
    return Loss(deaths, f"in this phase no code of CRIU's stands in a task; {_told(deaths)}")


def judge(job: Tree, proofs: Mapping[int, str], gone: Collection[int] = ()) -> Loss:
    """proofs: tasks in which CRIU's code stood, and what showed it. gone: that the same kill has
    suspended for good, which is judged elsewhere. What dies while we look is judged as well."""
    root = job.pids[0]
    while True:
        deaths = _deaths(job)
        if root in deaths:
            deaths = _deaths_of_all(job)
        lacks = _lacks(job, deaths, proofs)
        if lacks or root in deaths:
            return Loss(deaths, lacks)
        try:
            job.run_on(without={*deaths, *gone})
        except AssertionError as hung:
            if _deaths(job) == deaths:
                return Loss(deaths, f"the others do not run on: {hung}")
        else:
            return Loss(deaths, "")


def limit(tally: Tally) -> None:
    """A failure if more jobs are lost than CRIU loses by itself: then the proofs are none."""
    lost = sum(count for what, count in tally.counts.items() if what.startswith("LOST"))
    tried = sum(tally.counts[f"{what}in {CRIUS_PHASE}"] for what in ("", "the dump "))
    if lost > most(tried):
        tally.failures.append(
            f"{lost} jobs lost, of {tried} in {CRIUS_PHASE}: more than CRIU loses by itself, "
            f"{most(tried)} at most"
        )


def most(tried: int) -> int:
    """So many of those killed in CRIUS_PHASE are lost at most, if each is with the probability
    _SHARE: no more are in _CERTAINTY of all cases. One always may be, and never more than a third
    of many."""
    lost, chance = 0, (1 - _SHARE) ** tried
    while chance < _CERTAINTY:
        lost += 1
        chance += math.comb(tried, lost) * _SHARE**lost * (1 - _SHARE) ** (tried - lost)
    return max(1, min(lost, tried // 3))


def _lacks(job: Tree, deaths: Mapping[int, str], proofs: Mapping[int, str]) -> str:
    if not deaths:
        return "the job hangs"
    root = job.pids[0]
    for pid, how in deaths.items():
        if how == "SIGKILL" and pid != root and root in deaths:
            continue  # it was killed with its root
        if how not in _CRIUS_SIGNALS:
            return f"that is not how CRIU's code in a task ends: {_told(deaths)}"
        if pid not in proofs:
            return f"no code of CRIU's was seen in pid {pid} when criu was killed; {_told(deaths)}"
    if root in deaths and len(deaths) < len(job.pids):
        return f"children outlive their root; {_told(deaths)}"
    return ""


def _deaths(job: Tree) -> dict[int, str]:
    return {pid: _how(status) for pid, status in job.ended().items()}


def _deaths_of_all(job: Tree) -> dict[int, str]:
    """Of a tree whose root has ended, when the others have as well."""
    deadline = time.monotonic() + _END_S
    while len(deaths := _deaths(job)) < len(job.pids) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return deaths


def _how(status: int | None) -> str:
    if status is None:
        return "nobody knows what"
    return signal.Signals(-status).name if status < 0 else f"exit {status}"


def _told(deaths: Mapping[int, str]) -> str:
    return ", ".join(f"pid {pid}: {how}" for pid, how in deaths.items()) or "nobody died"
