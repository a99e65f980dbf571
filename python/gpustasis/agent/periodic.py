# SPDX-License-Identifier: Apache-2.0
"""Checkpoints at intervals: when each target is due, by what its last checkpoints have cost."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from gpustasis.agent.config import Config, Target
from gpustasis.agent.operations import INTERVAL, Operation, State
from gpustasis.agent.queue import Queue
from gpustasis.agent.requests import find
from gpustasis.errors import AgentError
from gpustasis.intervals import MEASURED, automatic

log = logging.getLogger(__name__)

RETRY_S = 30.0  # after the first failure; then twice as long each time, up to the interval
_ROOT = 0


@dataclass(slots=True)
class _Plan:
    """due: in seconds since 1970. downtimes: that were measured, oldest first. failures: since the
    last success. said: what was logged last."""

    target: Target
    due: float
    downtimes: list[float] = field(default_factory=list)
    failures: int = 0
    said: str = ""

    @property
    def interval_s(self) -> float:
        if self.target.auto:
            return automatic(self.downtimes, self.target.mtbf_s)
        assert self.target.interval_s is not None
        return self.target.interval_s

    def retry_s(self) -> float:
        return min(self.interval_s, RETRY_S * float(1 << min(max(self.failures - 1, 0), 16)))


class Periodic:
    """Of all targets with an interval."""

    def __init__(self, config: Config, queue: Queue, now: float) -> None:
        """Each is due one interval after its last success, or after `now`."""
        self._queue = queue
        self._plans: dict[str, _Plan] = {}
        for target in config.targets:
            if target.is_periodic:
                self._plans[target.name] = _Plan(target, now)
        for plan in self._plans.values():
            plan.due = now + plan.interval_s
        for operation in queue.known():
            self.note(operation)

    def next_due(self, name: str) -> float:
        """Seconds since 1970; 0: it has no interval."""
        plan = self._plans.get(name)
        return 0.0 if plan is None else plan.due

    def note(self, operation: Operation) -> None:
        """A checkpoint has ended, whoever asked for it."""
        plan = self._plans.get(operation.target)
        if plan is None or not operation.state.is_over:
            return
        if operation.state is State.DONE:
            figures = operation.figures
            if figures is not None and figures.downtime_s is not None:
                plan.downtimes = [*plan.downtimes, figures.downtime_s][-MEASURED:]
            plan.failures = 0
            plan.due = operation.ended + plan.interval_s
        else:
            plan.failures += 1
            plan.due = operation.ended + plan.retry_s()

    def submit_due(self, now: float) -> None:
        """Put what is due into the queue, but for what is there already."""
        for plan in self._plans.values():
            plan.due = min(plan.due, now + plan.interval_s)  # the clock may have been set back
            if plan.due > now:
                continue
            try:
                process, subject = find(plan.target)
            except AgentError as exc:  # the job is not there now
                self._say(plan, str(exc))
                plan.due = now + plan.interval_s
                continue
            if self._queue.pending(subject.key):
                if process is not None:
                    process.close()
                plan.due = now + plan.interval_s
                continue
            operation = Operation(
                subject=subject, uid=_ROOT, target=plan.target.name, origin=INTERVAL
            )
            plan.due = now + plan.interval_s  # until it has ended
            try:
                self._queue.submit(operation, process, plan.target)
                plan.said = ""
            except AgentError as exc:
                self._say(plan, str(exc))
                plan.due = now + min(RETRY_S, plan.interval_s)

    def _say(self, plan: _Plan, text: str) -> None:
        """Once, until it is something else."""
        if plan.said != text:
            log.warning("target %s is not checkpointed: %s", plan.target.name, text)
        plan.said = text
