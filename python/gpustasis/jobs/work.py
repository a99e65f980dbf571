# SPDX-License-Identifier: Apache-2.0
"""What a keeper asks of whoever does the work on a rank's tasks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from gpustasis.errors import JobError


class Excuse(StrEnum):
    """Why it is not held against a checkpoint that a rank is not back. LOST: it was lost together
    with its keeper: once is bad luck. OTHER: its keeper was told to end, say."""

    NONE = ""
    LOST = "lost"
    OTHER = "other"


class Excused(JobError):
    """The rank is not back, with an excuse."""

    def __init__(self, text: str, excuse: Excuse) -> None:
        super().__init__(text)
        self.excuse = excuse


@dataclass(frozen=True, slots=True)
class Order:
    """What an epoch was begun for. restores: the epoch whose dumps are brought back; 0: it is a
    checkpoint. joined: an earlier keeper of this rank had joined it, and may have done a part."""

    number: int
    leave_running: bool
    restores: int
    joined: bool = False


class Work(Protocol):
    """What can be done with a rank's tasks (messages.Action says what each is for). Each raises an
    exception with its reason; release and finish do only what is still to be done. In an epoch that
    restores, dump brings the tasks back, which stand still then, release ends them, and finish lets
    them run."""

    def enter(self, order: Order) -> None:
        """Before anything else of an epoch."""

    def has_tasks(self) -> bool:
        """Whether the rank's tasks live here."""

    def look(self) -> None: ...

    def lock_cuda(self) -> None: ...

    def lock_network(self) -> None: ...

    def dump(self, number: int) -> str:
        """Epoch `number`. The record, once the dump is durable; the tasks stand still then, and
        until release or finish, also if the keeper is gone."""

    def release(self) -> None: ...

    def finish(self, *, leave_running: bool) -> None: ...

    def stop(self) -> None:
        """Another thread's call: what is being done is to end early, if it can."""

    def slipped(self) -> str:
        """Another thread's call: why the tasks do not stand still any more, although nothing is
        decided; empty: they do."""
