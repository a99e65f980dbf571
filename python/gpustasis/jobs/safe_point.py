# SPDX-License-Identifier: Apache-2.0
"""The keeper's side of safe points: its rank's program is asked to stop, in the same call of
gpustasis.job.safe_point() as those of all other ranks.

Three rounds through the store, in phase `look`. First every rank says that nothing is in the way of
a checkpoint. Then each keeper asks its program, reads how many calls it has made, and says that;
the largest number and one more is where all stop. The program is not waited for in between: it may
be in a step for which it needs another rank, which must not have stopped before that one is done.
At last each says that its program has stopped. Only when all have, `before` is called, and then in
all of them, whatever becomes of the epoch: communicators are taken down by all ranks, or by none.
"""

from __future__ import annotations

import os
import re
import secrets
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from gpustasis.errors import JobError, StoreError
from gpustasis.job import (
    ASKED,
    CALLS,
    DOWN,
    FAILED,
    PID,
    SEAT_BYTES,
    SEAT_VARIABLE,
    STANDS,
    STOP,
    WAITS,
    WORD_BYTES,
    WORDS,
)
from gpustasis.jobs import epochs, store
from gpustasis.jobs.lead import LEAD
from gpustasis.jobs.messages import Phase
from gpustasis.jobs.records import Keys
from gpustasis.jobs.store import Snapshot, Store

__all__ = ["SEAT_VARIABLE", "Council", "Seat"]

Require = Callable[[], object]  # raises an exception when to wait no more
IsEnough = Callable[[dict[str, int]], bool]

_STOPPED = "stopped"  # the last round of an epoch that is not aborted
_DOWN = "down"  # of one that is aborted after it
_POLL_S = 0.005
_SLICE_S = 0.2  # how often a wait looks whether it is to end
# A processor shows what it has stored within microseconds, but not before it reads on. After this
# time a call that has not seen the request has its number in the seat.
_SHOWN_S = 0.01


class Seat:
    """The file that a rank's keeper shares with its program. The program is trusted with nothing
    here: what it writes decides when its own rank is dumped, and no more."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def make(self, *, anew: bool) -> None:
        """Have it there; anew: for a program that has not started yet. Raises JobError."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_TRUNC if anew else 0)
        try:
            descriptor = os.open(self.path, flags, 0o600)
            try:
                if os.fstat(descriptor).st_size != SEAT_BYTES:
                    os.ftruncate(descriptor, SEAT_BYTES)
            finally:
                os.close(descriptor)
        except OSError as exc:
            raise JobError(f"cannot make {self.path}: {exc.strerror}") from exc

    def is_asked(self) -> bool:
        """Whether the program is, or may be."""
        try:
            return self._words()[ASKED] != 0
        except JobError:
            return False

    def release(self) -> None:
        """Nobody asks: a program that waits goes on. Raises JobError."""
        if self.path.exists():
            self._write(ASKED, 0)
            self._write(STOP, 0)

    def take_down(self) -> int:
        """All ranks have stopped. The number of the request."""
        asked = self._words()[ASKED]
        self._write(DOWN, asked)
        return asked

    def has_caller(self) -> bool:
        return self._words()[PID] != 0

    def ask(self) -> tuple[int, int]:
        """The number of the request, and of the last call that may not have seen it."""
        asked = secrets.randbits(62) + 1
        self._write(STOP, 0)
        self._write(ASKED, asked)
        time.sleep(_SHOWN_S)
        return asked, self._words()[CALLS]

    def stop_at(self, call: int) -> None:
        self._write(STOP, call)

    def waits(self, asked: int) -> bool:
        return self._words()[WAITS] == asked

    def stands(self, asked: int) -> bool:
        return self._words()[STANDS] == asked

    def has_failed(self, asked: int) -> bool:
        return self._words()[FAILED] == asked

    def calls(self) -> int:
        return self._words()[CALLS]

    def _words(self) -> tuple[int, ...]:
        try:
            with self.path.open("rb", buffering=0) as file:
                found = file.read(WORDS * WORD_BYTES)
        except OSError as exc:
            raise JobError(f"cannot read {self.path}: {exc.strerror}") from exc
        if len(found) != WORDS * WORD_BYTES:
            raise JobError(f"{self.path} is too short: somebody has cut it")
        return struct.unpack(f"={WORDS}Q", found)

    def _write(self, word: int, value: int) -> None:
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.pwrite(descriptor, struct.pack("=Q", value), word * WORD_BYTES)
            finally:
                os.close(descriptor)
        except OSError as exc:
            raise JobError(f"cannot write {self.path}: {exc.strerror}") from exc


class Council:
    """All ranks of an epoch, and what they say in each round. has_stopped: whether the others may
    have heard that this rank's program has, from this keeper or an earlier one."""

    def __init__(
        self, agreed: Store, keys: Keys, number: int, place: tuple[int, int], *, has_stopped: bool
    ) -> None:
        self._store = agreed
        self._keys = keys
        self._number = number
        self._rank, self._world = place
        self.has_stopped = has_stopped

    def largest(self, round_: str, value: int, require: Require) -> int:
        """Of what all ranks say in this round, this one `value`, once all have. Raises JobError."""
        keys, number = self._keys, self._number
        self.has_stopped = self.has_stopped or round_ == _STOPPED
        self._say(round_, keys.said(number, round_, self._rank), value, require)
        if self._rank == LEAD:
            said = self._all_said(round_, require)
            self._say(round_, keys.largest(number, round_), max(said.values()), require)
        key = keys.largest(number, round_)
        return self._await(key, lambda entries: key in entries, require)[key]

    def all_have_stopped(self) -> bool | None:
        """In an epoch that is aborted; None: it is not yet. False of one that is committed: nothing
        is left to agree on. Raises StoreError; JobError if the store knows of no such epoch."""
        epoch, _ = epochs.phase(self._store, self._keys, self._number)
        key = self._keys.largest(self._number, _STOPPED)
        if not epoch.phase.is_final:
            return None
        return epoch.phase is Phase.ABORTED and key in self._store.read(key).entries

    def _all_said(self, round_: str, require: Require) -> dict[str, int]:
        keys, number, world = self._keys, self._number, self._world
        wanted = {keys.said(number, round_, rank) for rank in range(world)}

        def are_there(entries: dict[str, int]) -> bool:
            return len(entries) >= world and wanted <= entries.keys()

        found = self._await(keys.round(number, round_), are_there, require)
        return {key: found[key] for key in wanted}

    def _say(self, round_: str, key: str, value: int, require: Require) -> None:
        """Once: what another keeper of this rank has said in this epoch is not replaced."""
        while True:
            require()
            try:
                epoch, _ = epochs.phase(self._store, self._keys, self._number)
                wanted = [store.Require(key, 0)]
                if round_ != _DOWN:  # so that an abort and a round are one before the other
                    if epoch.phase is not Phase.LOOK:
                        raise JobError(f"epoch {self._number} is {epoch.phase} already")
                    wanted.append(store.Require(self._keys.phase(self._number), epoch.revision))
                if self._store.write(wanted, [store.Put(key, str(value))]).applied:
                    return
                said = self._numbers(self._store.read(key)).get(key)
                if said == value:
                    return  # it was written before, when nobody answered
                if said is not None:
                    raise JobError(f"{key} is {said} already, and this keeper has {value}")
            except StoreError:
                time.sleep(_SLICE_S)

    def _await(self, key: str, is_enough: IsEnough, require: Require) -> dict[str, int]:
        while True:
            require()
            try:
                snapshot = self._store.read(key)
                found = self._numbers(snapshot)
                if not is_enough(found):
                    self._watch(key, snapshot.revision, found, is_enough, require)
            except (StoreError, store.WatchLost):
                time.sleep(_SLICE_S)
            else:
                return found

    def _watch(
        self,
        key: str,
        revision: int,
        found: dict[str, int],
        is_enough: IsEnough,
        require: Require,
    ) -> None:
        """What is said from here on is added."""
        watch = self._store.watch(key, revision)
        try:
            while not is_enough(found):
                require()
                for change in watch.wait(_SLICE_S):
                    if change.entry is not None:
                        found[change.key] = _number(change.key, change.entry.value)
        finally:
            watch.close()

    def _numbers(self, snapshot: Snapshot) -> dict[str, int]:
        return {key: _number(key, entry.value) for key, entry in snapshot.entries.items()}


def _number(key: str, text: str) -> int:
    if not re.fullmatch(r"0|[1-9][0-9]{0,17}", text):
        raise JobError(f"{key}: {text[:20]!r} is no number of calls")
    return int(text)


def stop_all(seat: Seat, council: Council, who: str, limit_s: float, require: Require) -> None:
    """Have all ranks stop in the same call; this one's program stands afterwards. Of nobody's
    program anything is asked before all ranks are here. Raises JobError."""
    council.largest("ready", 0, require)
    late = time.monotonic() + limit_s

    def wait(what: Callable[[], bool], problem: Callable[[], str]) -> None:
        while not what():
            require()
            if time.monotonic() > late:
                raise JobError(f"{who}: {problem()} within {limit_s:g} s")
            time.sleep(_POLL_S)

    wait(
        seat.has_caller,
        lambda: "its program has not called gpustasis.job.safe_point(), which --safe-points needs,",
    )
    asked, calls = seat.ask()
    stop = council.largest("calls", calls, require) + 1
    seat.stop_at(stop)
    wait(
        lambda: seat.waits(asked),
        lambda: (
            f"its program has not come to call {stop} of gpustasis.job.safe_point(), where all "
            f"ranks stop (the last was call {seat.calls()}),"
        ),
    )
    council.largest(_STOPPED, 0, require)
    seat.take_down()
    wait(
        lambda: seat.stands(asked) or seat.has_failed(asked),
        lambda: "its program has not done what it has to do `before` the checkpoint",
    )
    if seat.has_failed(asked):
        raise JobError(
            f"{who}: what it does `before` a safe point has raised an exception: see its output"
        )


def let_go(seat: Seat, council: Council, limit_s: float, lives: Callable[[], bool]) -> None:
    """The epoch is over for this rank: its program goes on. Raises JobError.

    If all ranks had stopped, all take their communicators down, and none makes new ones before the
    others have, for so long. Whether they had is not known while the store is away, if this rank
    has said that it had: then its program waits.
    """
    while seat.is_asked() and council.has_stopped:
        try:
            stopped = council.all_have_stopped()
        except StoreError:
            stopped = None
        except JobError:  # a store that has lost it
            stopped = False
        if stopped:
            with suppress(JobError):
                _take_all_down(seat, council, limit_s, lives)
        if stopped is not None:
            break
        time.sleep(_SLICE_S)
    seat.release()


def _take_all_down(seat: Seat, council: Council, limit_s: float, lives: Callable[[], bool]) -> None:
    late = time.monotonic() + limit_s

    def require() -> None:
        if time.monotonic() > late:
            raise JobError("the other ranks do not answer")

    asked = seat.take_down()
    while lives() and not seat.stands(asked) and not seat.has_failed(asked):
        require()
        time.sleep(_POLL_S)
    council.largest(_DOWN, 0, require)
