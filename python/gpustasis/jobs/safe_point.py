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
from gpustasis.jobs import epochs
from gpustasis.jobs.lead import LEAD
from gpustasis.jobs.messages import Phase
from gpustasis.jobs.records import Keys
from gpustasis.jobs.store import Put, Require, Snapshot, Store, WatchLost

__all__ = ["SEAT_VARIABLE", "Council", "Seat"]

_STOPPED = "stopped"  # the last round
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

    def take_down(self, asked: int = 0) -> None:
        """All ranks have stopped. asked: of the request; 0: whichever there is."""
        self._write(DOWN, asked or self._words()[ASKED])

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
        """Raises JobError if it cannot."""
        words = self._words()
        if words[FAILED] == asked:
            raise JobError(
                "what the program gave to gpustasis.job.safe_point() as `before` has raised an "
                "exception: see the program's output"
            )
        return words[STANDS] == asked

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
    """All ranks of an epoch in phase `look`. require: raises an exception when to wait no more.
    has_stopped: whether the others may have heard that this rank's program has."""

    def __init__(
        self,
        store: Store,
        keys: Keys,
        number: int,
        place: tuple[int, int],
        require: Callable[[], object],
    ) -> None:
        self._store = store
        self._keys = keys
        self._number = number
        self._rank, self._world = place
        self._require = require
        self.has_stopped = False

    def largest(self, round_: str, value: int) -> int:
        """Of what all ranks say in this round, this one `value`, once all have. Raises JobError."""
        keys, number = self._keys, self._number
        self.has_stopped = self.has_stopped or round_ == _STOPPED
        self._say(keys.said(number, round_, self._rank), value)
        if self._rank == LEAD:
            said = self._all_said(round_)
            self._say(keys.largest(number, round_), max(said.values()))
        key = keys.largest(number, round_)
        return self._await(key, lambda entries: key in entries)[key]

    def _all_said(self, round_: str) -> dict[str, int]:
        keys, number, world = self._keys, self._number, self._world
        wanted = {keys.said(number, round_, rank) for rank in range(world)}

        def are_there(entries: dict[str, int]) -> bool:
            return len(entries) >= world and wanted <= entries.keys()

        found = self._await(keys.round(number, round_), are_there)
        return {key: found[key] for key in wanted}

    def _say(self, key: str, value: int) -> None:
        """Once: what another keeper of this rank has said in this epoch is not replaced."""
        while True:
            self._require()
            try:
                epoch, _ = epochs.phase(self._store, self._keys, self._number)
                if epoch.phase is not Phase.LOOK:
                    raise JobError(f"epoch {self._number} is {epoch.phase} already")
                requires = [
                    Require(self._keys.phase(self._number), epoch.revision),
                    Require(key, 0),
                ]
                if self._store.write(requires, [Put(key, str(value))]).applied:
                    return
                said = self._numbers(self._store.read(key)).get(key)
                if said == value:
                    return  # it was written before, when nobody answered
                if said is not None:
                    raise JobError(f"{key} is {said} already, and this keeper has {value}")
            except StoreError:
                time.sleep(_SLICE_S)

    def _await(self, key: str, is_enough: Callable[[dict[str, int]], bool]) -> dict[str, int]:
        while True:
            self._require()
            try:
                snapshot = self._store.read(key)
                found = self._numbers(snapshot)
                if is_enough(found):
                    return found
                self._watch(key, snapshot.revision, found, is_enough)
                if is_enough(found):
                    return found
            except (StoreError, WatchLost):
                time.sleep(_SLICE_S)

    def _watch(
        self,
        key: str,
        revision: int,
        found: dict[str, int],
        is_enough: Callable[[dict[str, int]], bool],
    ) -> None:
        """What is said from here on is added."""
        watch = self._store.watch(key, revision)
        try:
            while not is_enough(found):
                self._require()
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


def stop_all(
    seat: Seat, council: Council, who: str, limit_s: float, require: Callable[[], object]
) -> None:
    """Have all ranks stop in the same call; this one's program stands afterwards. Of nobody's
    program anything is asked before all ranks are here. Raises JobError."""
    council.largest("ready", 0)
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
    stop = council.largest("calls", calls) + 1
    seat.stop_at(stop)
    wait(
        lambda: seat.waits(asked),
        lambda: (
            f"its program has not come to call {stop} of gpustasis.job.safe_point(), where all "
            f"ranks stop: it is at call {seat.calls()}, and was not further"
        ),
    )
    council.largest(_STOPPED, 0)
    seat.take_down(asked)
    wait(
        lambda: seat.stands(asked),
        lambda: "what its program does `before` the checkpoint was not done",
    )


def let_go(seat: Seat, store: Store, keys: Keys, number: int, council: Council | None) -> None:
    """The epoch is over for this rank: its program goes on. If all ranks had stopped, all of them
    take their communicators down and make new ones, so does this one. Whether they had is not known
    while the store is away, if this rank has said that it had. council: None: an earlier keeper may
    have said so. Raises JobError."""
    while seat.is_asked() and (council is None or council.has_stopped):
        try:
            epoch, _ = epochs.phase(store, keys, number)
            key = keys.largest(number, _STOPPED)
            if key in store.read(key).entries:
                seat.take_down()
                break
            if epoch.phase is not Phase.LOOK:
                break
        except StoreError:
            pass
        time.sleep(_SLICE_S)
    seat.release()
