# SPDX-License-Identifier: Apache-2.0
"""The keepers of the other ranks look after that of rank 0, which looks after all of them and
leads (leading.py)."""

from __future__ import annotations

import time
from dataclasses import replace

from gpustasis.jobs import epochs
from gpustasis.jobs.lead import LEAD
from gpustasis.jobs.lives import Failure, Life, Stage, Way, standing_of
from gpustasis.jobs.records import Keys
from gpustasis.jobs.store import Store


class Following:
    """Of one keeper. after() is called again and again."""

    def __init__(self, store: Store, keys: Keys, ttl_s: int) -> None:
        self._store, self._keys, self._ttl_s = store, keys, ttl_s
        self._missing_at: float | None = None

    def forget(self) -> None:
        """Whoever cannot be reached has not gone."""
        self._missing_at = None

    def after(self, life: Life) -> Life | None:
        """What becomes of the job since rank 0's keeper is gone; None: it is there, or may have its
        seat again soon, or nothing waits for it. Raises JobError, StoreError."""
        keys = self._keys
        mine, keeper = keys.in_life(life.number, LEAD), keys.keeper(LEAD)
        entries = self._store.read(mine, keeper).entries
        is_gone = mine in entries and standing_of(mine, entries[mine]).way is Way.HERE
        is_here = keeper in entries  # mostly: then nothing else is read
        if is_here or not (self._is_left(life) or (is_gone and life.stage is Stage.RUNS)):
            self._missing_at = None
            return None
        now = time.monotonic()
        if self._missing_at is None:
            self._missing_at = now
        missing_s = now - self._missing_at
        if missing_s < self._ttl_s / 2:
            return None
        if life.stage is Stage.LOOKS:  # nobody else says that this is over
            return replace(life, stage=Stage.STOPS)
        reason = f"rank {LEAD}: its keeper's lease is gone"
        unnoticed_s = missing_s + self._ttl_s
        failure = Failure(rank=LEAD, reason=reason, at=time.time(), unnoticed_s=unnoticed_s)
        # In a restore nobody says that the job is back.
        return life.failed(failure) if life.stage is Stage.RUNS else life.not_back(failure)

    def _is_left(self, life: Life) -> bool:
        """Whether this stage goes on by rank 0's keeper alone, once its epoch is decided."""
        if life.stage not in {Stage.LOOKS, Stage.RESTORES}:
            return False
        if not life.epoch:
            return True
        return epochs.phase(self._store, self._keys, life.epoch)[0].phase.is_final
