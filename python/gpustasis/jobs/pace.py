# SPDX-License-Identifier: Apache-2.0
"""When each of many ranks speaks to the store.

All ranks learn of a phase at the same moment. If thousands of them answered at that moment, their
requests would wait in the store for longer than clients wait for them, be asked again, and nothing
would be done in time any more. So each rank waits for its turn; the first few do not wait.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from gpustasis.jobs.messages import Limits

_FREE = 32  # ranks that speak at once
_STARTING = 6  # what a rank asks for until it has joined and looked, in writes
_READ_EACH_TIME = 1024  # ranks: with more of them, each reads less often how things are
_AGAIN_S = 0.2  # before something is asked again that the store did not answer
_AGAIN_PARTS = 2  # of the time in which all ranks have a turn: the first wait of many


@dataclass(frozen=True, slots=True)
class Pace:
    """Of one rank. per_s: writes a second that the whole job may ask of the store."""

    rank: int
    world: int
    per_s: float

    @property
    def turn_s(self) -> float:
        """From the moment at which all ranks have something to say until it is this one's turn."""
        return max(0, self.rank - _FREE) / self.per_s

    @property
    def starting_s(self) -> float:
        """The same when an epoch begins, in which each has more to ask."""
        return _STARTING * self.turn_s

    def limits(self, limits: Limits) -> Limits:
        """With the time that turns take."""
        all_s = max(0, self.world - _FREE) / self.per_s
        return Limits(
            look_s=limits.look_s + 2 * _STARTING * all_s,
            lock_cuda_s=limits.lock_cuda_s + 2 * all_s,
            lock_network_s=limits.lock_network_s + 2 * all_s,
            dump_s=limits.dump_s + 2 * all_s,
        )

    def reads_in(self, beat: int) -> bool:
        """Whether this rank reads in this beat how things are. Some rank does so in each."""
        return (beat + self.rank) % (1 + self.world // _READ_EACH_TIME) == 0

    @property
    def trusts_watches(self) -> bool:
        """Whether a rank whose watch has just told it something does without reading: what the lead
        of many ranks reads is long."""
        return self.world > _READ_EACH_TIME

    def again_s(self, failures: int, most_s: float) -> float:
        """Until something is asked again that the store has not answered so many times before. Of
        many ranks each waits longer: what all of them ask again must be less than the store can
        do, or what waits there never becomes less."""
        first_s = max(_AGAIN_S, self.world / self.per_s / _AGAIN_PARTS)
        longest_s = min(most_s, first_s * 2 ** min(failures, 10))
        return random.uniform(longest_s / 2, longest_s)  # noqa: S311

    def joining_again_s(self, failures: int, ttl_s: float, limits: Limits) -> float:
        """The same of a rank that is to join: an epoch that begins meanwhile must not wait for it
        for too long."""
        return self.again_s(failures, min(ttl_s / 4, self.limits(limits).look_s / 8))
