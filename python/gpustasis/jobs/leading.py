# SPDX-License-Identifier: Apache-2.0
"""Rank 0's keeper leads a job from one life to the next: it finds ranks that are lost, and begins
the epoch that restores. It remembers nothing that matters: what it does follows from the store."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from gpustasis.errors import JobError, StoreError
from gpustasis.jobs import choosing, epochs, kept, verified
from gpustasis.jobs.choosing import Choice
from gpustasis.jobs.lives import (
    Failure,
    Life,
    Recovery,
    Stage,
    Standing,
    Way,
    Where,
    keeper_of,
    keeper_starts,
    recovery_text,
    standing_of,
)
from gpustasis.jobs.messages import Phase
from gpustasis.jobs.records import Keys, Plan, number_of, rank_of
from gpustasis.jobs.store import Put, Require, Store
from gpustasis.jobs.verified import Mark

_LOOKED_S = 60.0  # for evidence, before all is stopped without it
_SETTLED_S = 60.0  # for ranks that are restored to run
_TOLD_S = 10.0
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Ranks:
    """What is stored of all ranks in one life. cannot_start: whose keepers have no command."""

    world: int
    standings: Mapping[int, Standing]
    keepers: Mapping[int, Where]
    cannot_start: frozenset[int] = frozenset()

    def are(self, *ways: Way) -> bool:
        return all(
            rank in self.standings and self.standings[rank].way in ways
            for rank in range(self.world)
        )

    def have_looked(self) -> bool:
        """All that can."""
        standings = self.standings
        return all(
            rank not in standings or standings[rank].way in {Way.LOOKED, Way.STOPPED}
            for rank in self.keepers
        )

    def lost(self) -> list[int]:
        """Those that were there, and have not ended, and whose keepers are not there."""
        return [
            rank
            for rank, one in self.standings.items()
            if one.way is Way.HERE and rank not in self.keepers
        ]

    def awaited(self, life: Life) -> str:
        """Why the job cannot be restored yet; empty: it can."""
        for rank in range(self.world):
            one = self.standings.get(rank)
            if one is not None and one.way is not Way.STOPPED:
                if rank not in self.keepers:
                    return (
                        f"rank {rank} was on {one.where.host}, where no keeper says that its tasks "
                        "have ended: start its keeper there, or make sure that they have and say "
                        f"`gpustasis job fence` with --rank {rank}"
                    )
                if not self.keepers[rank].is_mine(one.where):
                    return (
                        f"rank {rank} was on {one.where.host}, and its keeper is on "
                        f"{self.keepers[rank].host}: make sure that its tasks have ended there and "
                        f"say `gpustasis job fence` with --rank {rank}"
                    )
                return f"rank {rank} has not stopped yet"
            if rank not in self.keepers:
                return f"rank {rank} has no keeper: start one with --standby"
            if one is None:
                return f"rank {rank} has not said that it has no tasks"
        return ""


def read_ranks(store: Store, keys: Keys, life: Life) -> Ranks:
    """Raises JobError, StoreError."""
    entries = store.read(keys.in_life(life.number), keys.keeper()).entries
    standings: dict[int, Standing] = {}
    keepers: dict[int, Where] = {}
    cannot_start: set[int] = set()
    for key, entry in entries.items():
        rank = rank_of(key, life.world)
        if rank is None:
            continue
        if key == keys.keeper(rank):
            keepers[rank] = keeper_of(key, entry)[1]
            if not keeper_starts(key, entry):
                cannot_start.add(rank)
        elif key == keys.in_life(life.number, rank):
            standings[rank] = standing_of(key, entry)
    return Ranks(life.world, standings, keepers, frozenset(cannot_start))


def last_standing(store: Store, keys: Keys, rank: int, number: int) -> tuple[int, Standing] | None:
    """Of a rank, in the newest life up to this one that it was in; None: it was in none. Raises
    JobError, StoreError."""
    for life in range(number, 0, -1):
        key = keys.in_life(life, rank)
        entry = store.read(key).entries.get(key)
        if entry is not None:
            return life, standing_of(key, entry)
    return None


class Leading:
    """turn() is called again and again, and does what can be done by now. It raises JobError and
    StoreError; then it is called again later."""

    def __init__(
        self,
        store: Store,
        keys: Keys,
        ttl_s: int,
        told: Callable[[str], object],
        verify_s: float = 0.0,
    ) -> None:
        self._store = store
        self._keys = keys
        self._ttl_s = ttl_s
        self._told = told
        self._verify_s = verify_s
        self._looked = -1e9
        self._missing: dict[int, float] = {}
        self._since: tuple[int, float] = (0, 0.0)  # a life's revision, and when it was read
        self._committed: tuple[int, float] = (0, 0.0)  # the same, when its restore was
        self._said = ("", -1e9)
        self._marked = 0  # the revision of a life whose checkpoints were marked
        # Until when: a life's revision, its newest epoch, and seconds from its failure.
        self._backs_off = (0, 0, 0.0)

    def forget(self) -> None:
        """The store was away: a lease that it has lost meanwhile says nothing."""
        self._missing = {}

    def end(self, life: Life) -> None:
        """Nobody leads from here on. The job may have come to its end since the last turn."""
        if life.stage.is_final:
            with suppress(JobError, StoreError):
                self.turn(life)

    def turn(self, life: Life) -> None:
        if life.revision != self._since[0]:
            self._since = (life.revision, time.monotonic())
            self._missing = {}
        match life.stage:
            case Stage.RUNS:
                if time.monotonic() >= self._looked + min(1.0, self._ttl_s / 4):
                    self._look(life)
                    self._looked = time.monotonic()
            case Stage.LOOKS:
                self._keep_evidence(life)
            case Stage.STOPS:
                self._restore(life)
            case Stage.RESTORES:
                self._follow(life)
            case Stage.FAILED if life.failure is not None and life.failure.hung:
                # Its next start, which knows of no failure, goes by what is marked.
                if self._marked != life.revision and self._is_decided(self._newest()):
                    self._mark(life)
            case _:
                pass

    def _look(self, life: Life) -> None:
        """Whether all have ended, or one is lost."""
        ranks = read_ranks(self._store, self._keys, life)
        if ranks.are(Way.ENDED):
            self._move(life, life.done(self._newest()))
            return
        now = time.monotonic()
        lost = ranks.lost()
        self._missing = {rank: self._missing.get(rank, now) for rank in lost}
        for rank, since in self._missing.items():
            if now - since >= self._ttl_s / 2:  # it could have taken its seat again
                failure = Failure(
                    rank=rank,
                    reason=f"rank {rank}: its keeper's lease is gone",
                    at=time.time(),
                    unnoticed_s=now - since + self._ttl_s,
                )
                self._move(life, life.failed(failure))
                return

    def _keep_evidence(self, life: Life) -> None:
        """All have looked; then, of a job that only hangs, a checkpoint."""
        waited_s = time.monotonic() - self._since[1]
        ranks = read_ranks(self._store, self._keys, life)
        if life.epoch == 0:
            if not ranks.have_looked() and waited_s < _LOOKED_S:
                return
            hung = life.failure is not None and life.failure.hung
            newest = self._newest()
            if hung and ranks.are(Way.LOOKED) and self._is_decided(newest):
                self._begin(
                    life,
                    replace(life, epoch=newest + 1),
                    Plan(world=life.world, leave_running=True),
                )
                return
        elif not epochs.phase(self._store, self._keys, life.epoch)[0].phase.is_final:
            return
        self._move(life, replace(life, stage=Stage.STOPS))

    def _restore(self, life: Life) -> None:
        """No rank of this life can run any more: a whole checkpoint is brought back."""
        ranks = read_ranks(self._store, self._keys, life)
        if reason := ranks.awaited(life):
            self._say(reason)
            return
        newest = self._newest()
        if not self._is_decided(newest):
            self._say(f"epoch {newest} is not decided yet")
            return
        assert life.failure is not None
        # As long as nothing has changed, what is to be restored then is not looked for.
        if self._backs_off[:2] == (life.revision, newest) and self._is_early(life):
            return
        choice = self._choose(life, ranks)
        if choice is None:
            if life.terms.afresh or life.is_start:
                self._recovered(replace(life, restored=0), epoch=0, restored=0)
            else:
                failure = replace(
                    life.failure,
                    reason=f"{life.failure.reason}; there is no whole checkpoint to restore",
                )
                self._move(life, life.given_up(failure))
            return
        found, is_marked = choice.found, bool(choice.mark.why)
        if found.plan.world != life.world:
            wrong = (
                f"epoch {found.number} is a checkpoint of {found.plan.world} ranks, and the job is "
                f"started with {life.world}: start it with as many, or give the job another name"
            )
            self._move(life, life.given_up(replace(life.failure, reason=wrong)))
            return
        back_off_s = life.back_off_s() if is_marked or found.number == life.restored else 0.0
        self._backs_off = (life.revision, newest, back_off_s)
        if self._is_early(life):
            return
        plan = Plan(world=life.world, leave_running=True, restores=found.number)
        self._begin(life, life.restoring(newest + 1, found.number, is_marked=is_marked), plan)

    def _is_early(self, life: Life) -> bool:
        """Whether it is still waited before the restore; that is said then."""
        back_off_s = self._backs_off[2]
        assert life.failure is not None
        if time.time() >= life.failure.at + back_off_s or self._waited_s() >= back_off_s:
            return False
        self._say(f"it is restored {back_off_s:g} s after it has failed")
        return True

    def _choose(self, life: Life, ranks: Ranks) -> Choice | None:
        """What is to be restored; None: nothing, for there is no checkpoint, the job has come to
        its end since, or it may start afresh, and none of them brings it back."""
        ended = self._mark(life)
        found = choosing.choose(self._store, self._keys, ended)
        may_start = life.terms.afresh and not ranks.cannot_start
        # One that was begun when the job hung, as it seems, is tried once all the same, but for the
        # last restart: that is the command's.
        is_last = 0 < life.terms.restarts <= life.begun
        is_useless = found is not None and found.mark.is_sure and (found.mark.times > 1 or is_last)
        return None if is_useless and may_start else found

    def _mark(self, life: Life) -> int:
        """What its failure says of checkpoints, once. The newest epoch when the job had come to its
        end."""
        store, keys = self._store, self._keys
        ended = max(life.ended, kept.ended_at(store, keys, life.world))
        if self._marked != life.revision:
            choosing.mark(store, keys, life, ended)
        self._marked = life.revision
        return ended

    def _follow(self, life: Life) -> None:
        found = epochs.standing(self._store, self._keys, life.epoch)
        if not found.epoch.phase.is_final:
            return
        assert life.failure is not None
        if found.epoch.phase is Phase.ABORTED:
            reason = f"epoch {life.epoch} has not restored it: {found.epoch.note}"
            # How long it has been down is counted from its failure.
            self._move(life, life.not_restored(replace(life.failure, reason=reason)))
        elif any(found.problems.values()):
            rank, text = min((rank, text) for rank, text in found.problems.items() if text)
            # Who was first has said so before it has killed its tasks; others may end of that.
            verdict = verified.verdict(self._store, self._keys, life.epoch, patience_s=0.0)
            wrong = verdict or f"rank {rank}: {text}"
            reason = f"epoch {life.epoch} has not brought it back: {wrong}"
            self._move(life, life.not_back(replace(life.failure, rank=rank, reason=reason)))
        else:
            if self._committed[0] != life.revision:
                self._committed = (life.revision, time.monotonic())
            waited_s = time.monotonic() - self._committed[1]
            if len(found.settled) == life.world or waited_s > _SETTLED_S + self._verify_s:
                self._recovered(life, epoch=life.epoch, restored=life.restored)

    def _recovered(self, life: Life, *, epoch: int, restored: int) -> None:
        failure = life.failure
        assert failure is not None
        recovery = Recovery(
            life=life.number,
            rank=failure.rank,
            reason=failure.reason,
            at=failure.at,
            unnoticed_s=round(failure.unnoticed_s, 3),
            seconds=round(max(0.0, time.time() - failure.at), 3),
            epoch=epoch,
            restored=restored,
        )
        keys = self._keys
        key = keys.started(life.number) if life.is_start else keys.recovery(life.number)
        why_afresh = "" if epoch else self._why_afresh(life)
        if not self._move(life, life.next(), Put(key, recovery_text(recovery))):
            return
        if life.is_start:
            how = f"goes on from epoch {restored}" if epoch else f"starts: {why_afresh}"
            self._told(f"job {keys.job} {how}")
        else:
            what = f"epoch {restored} restored" if epoch else f"started afresh, for {why_afresh}"
            self._told(
                f"job {keys.job} runs again, {what}, {recovery.seconds:.2f} s after: "
                f"{failure.reason}"
            )

    def _why_afresh(self, life: Life) -> str:
        """What becomes of its newest checkpoint."""
        store, keys = self._store, self._keys
        found = kept.newest_whole_or_none(store, keys)
        if found is None:
            return "it has no checkpoint"
        number = found.number
        if number <= max(life.ended, kept.ended_at(store, keys, life.world)):
            return f"it has ended well after epoch {number}"
        mark = verified.marks(store, keys, [number]).get(number, Mark())
        return f"epoch {number} is of no use, as all others: {mark.why}"

    def _waited_s(self) -> float:
        return time.monotonic() - self._since[1]

    def _is_decided(self, newest: int) -> bool:
        return not newest or epochs.phase(self._store, self._keys, newest)[0].phase.is_final

    def _newest(self) -> int:
        key = self._keys.newest
        return number_of(key, self._store.read(key).entries.get(key))

    def _begin(self, life: Life, after: Life, plan: Plan) -> None:
        """The epoch and the life that waits for it, at once or not at all."""
        keys = self._keys
        puts = [Put(keys.life, after.to_text())]
        if not plan.restores:
            puts.append(Put(keys.evidence(after.epoch), "1"))
        epochs.begin(
            self._store,
            keys,
            plan,
            number=after.epoch,
            requires=[Require(keys.life, life.revision)],
            puts=puts,
        )

    def _move(self, life: Life, after: Life, *puts: Put) -> bool:
        key = self._keys.life
        require = Require(key, life.revision)
        return self._store.write([require], [Put(key, after.to_text()), *puts]).applied

    def _say(self, reason: str) -> None:
        """Now and then."""
        now = time.monotonic()
        if reason != self._said[0] or now > self._said[1] + _TOLD_S:
            self._said = (reason, now)
            self._told(f"job {self._keys.job} waits: {reason}")
