# SPDX-License-Identifier: Apache-2.0
"""A keeper's part in the life of its job, beside the epochs: it says that it is there, reads in
which life the job is, and reports what has failed. The keeper of rank 0 leads (leading.py)."""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from gpustasis.errors import JobError, StoreError
from gpustasis.files import replace_file
from gpustasis.jobs.following import Following
from gpustasis.jobs.lead import LEAD
from gpustasis.jobs.leading import Leading, last_standing
from gpustasis.jobs.lives import (
    Failure,
    Life,
    Stage,
    Standing,
    Terms,
    Way,
    Where,
    keeper_of,
    keeper_text,
    life_of,
    standing_of,
    standing_text,
)
from gpustasis.jobs.records import Keys, usable_number
from gpustasis.jobs.store import LeaseGone, Put, Require, Store, Watch, WatchLost
from gpustasis.task import boot_id

log = logging.getLogger(__name__)

_AGAIN_S = 0.2
_TOLD_AFTER = 3  # times: somebody else may have been quicker
_UUID = Path("/sys/class/dmi/id/product_uuid")
_PLACE_NAME = "place"
_WAYS = list(Way)


def where(run: Path) -> Where:
    """Of a keeper that keeps its state in this directory. Raises JobError.

    The directory has a name of its own, which goes with what is noted there; and a process of
    another pid namespace does not see the tasks.
    """
    try:
        machine = _UUID.read_text().strip()
    except OSError:
        machine = ""
    name = run / _PLACE_NAME
    try:
        if not name.exists():
            directory = os.open(run, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                replace_file(directory, _PLACE_NAME, uuid.uuid4().hex.encode(), 0o600, durable=True)
            finally:
                os.close(directory)
        place = f"{name.read_text()} {os.readlink('/proc/self/ns/pid')}"
    except (OSError, UnicodeDecodeError) as exc:
        raise JobError(f"{name} cannot be used: {exc}") from exc
    return Where(host=socket.gethostname(), boot=boot_id().hex(), machine=machine, run=place)


class Guard:
    """Of one rank. told: hears what happens. verify_s: how long a restored rank may be verified."""

    def __init__(
        self,
        store: Store,
        keys: Keys,
        rank: int,
        world: int,
        terms: Terms,
        place: Where,
        *,
        ttl_s: int,
        told: Callable[[str], object],
        verify_s: float = 0.0,
    ) -> None:
        self._store, self._keys = store, keys
        self._rank, self._world, self._terms = rank, world, terms
        self._where, self._ttl_s = place, ttl_s
        self._told = told
        self._name = uuid.uuid4().hex
        self._starts = True
        self._lease, self._beaten = 0, -1e9
        self._watch: Watch | None = None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._following = Following(store, keys, ttl_s) if rank != LEAD else None
        self._leading = Leading(store, keys, ttl_s, told, verify_s) if rank == LEAD else None
        self._life: Life | None = None
        self._lock = threading.Lock()  # of the seat: it is given up once
        self._wrong = ("", 0)  # what, in what the store holds, and how often it was so
        self.unseated = ""  # why another keeper is this rank's

    @property
    def life(self) -> Life:
        """As it was read last."""
        assert self._life is not None
        return self._life

    def as_it_runs(self) -> list[Require] | None:
        """That the life is still the one that was read last; None: it is at another stage than that
        in which its ranks run."""
        life = self.life
        if life.stage is not Stage.RUNS:
            return None
        return [Require(self._keys.life, life.revision)]

    # Before the keeper has tasks.

    def begin(self, *, new: bool, newest: bool = False, starts: bool = True) -> Life:
        """Have the rank's seat, and the life of the job. new: the rank is to be started: if the
        last life is over, another one begins; newest: with what is restored. starts: there is a
        command. Raises JobError, StoreError."""
        self._starts = starts
        self._sit()
        self._beaten = time.monotonic()
        self._life = self._entered(new, newest)
        self._thread = threading.Thread(target=self._serve, daemon=True, name="life")
        self._thread.start()
        return self._life

    def has_seat(self) -> bool:
        """Whether another keeper's seat is not in the way. Raises JobError, StoreError."""
        key = self._keys.keeper(self._rank)
        entry = self._store.read(key).entries.get(key)
        return entry is None or keeper_of(key, entry)[1].is_mine(self._where)

    def is_begun(self) -> bool:
        """Whether the rank has had tasks, or the job is over: else its first keeper, which has the
        command, is still to come. Raises JobError, StoreError."""
        entry = self._store.read(self._keys.life).entries.get(self._keys.life)
        if entry is None:
            return False
        life = life_of(self._keys.life, entry)
        is_first = life.begun == 0 and not life.stage.is_final
        return not is_first or self.standing(life.number) is not None

    def _sit(self) -> None:
        key = self._keys.keeper(self._rank)
        entry = self._store.read(key).entries.get(key)
        if entry is not None:
            name, other = keeper_of(key, entry)
            # Of this host, and this process holds the rank's lock there: that keeper has died.
            if name != self._name and not other.is_mine(self._where):
                raise JobError(
                    f"job {self._keys.job}: rank {self._rank} has a keeper on {other.host}; end "
                    "that one first, or wait with --standby"
                )
        lease = self._store.grant(self._ttl_s)
        put = Put(key, keeper_text(self._name, self._where, starts=self._starts), lease)
        require = Require(key, entry.revision if entry else 0)
        if self._store.write([require], [put]).applied:
            self._lease = lease  # not before: without an answer the seat may not be there
            return
        entry = self._store.read(key).entries.get(key)
        if entry is not None and keeper_of(key, entry)[0] != self._name:
            raise JobError(
                f"job {self._keys.job}: rank {self._rank} has got another keeper just now"
            )
        self._sit()  # an earlier seat of this keeper's has ended meanwhile, or has come to be

    def _entered(self, new: bool, newest: bool) -> Life:
        keys, key = self._keys, self._keys.life
        while True:
            entry = self._store.read(key).entries.get(key)
            life = None if entry is None else life_of(key, entry)
            if life is not None and not (new and life.stage.is_final):
                if (life.world, life.terms) != (self._world, self._terms):
                    raise JobError(
                        f"job {keys.job}: its ranks were started with --world {life.world} and "
                        f"{life.terms}; this one with {self._world} and {self._terms}"
                    )
                return life
            started = Failure(rank=self._rank, reason="it was started", at=time.time())
            fresh = Life(
                run=uuid.uuid4().hex,
                number=1 if life is None else life.number + 1,
                stage=Stage.STOPS if newest else Stage.RUNS,
                world=self._world,
                terms=self._terms,
                ended=0 if life is None else life.ended,
                failure=started if newest else None,
            )
            require = Require(key, 0 if life is None else life.revision)
            self._store.write([require], [Put(key, fresh.to_text())])

    def close(self) -> None:
        """The seat is free with it."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        self._unwatch()
        if self._leading is not None and self._life is not None:
            self._leading.end(self._life)
        with self._lock:
            if self._lease:
                try:
                    self._store.revoke(self._lease)
                except StoreError as exc:
                    log.info("rank %d: its seat ends by itself: %s", self._rank, exc)
                self._lease = 0

    # What the rank says.

    def standing(self, number: int) -> Standing | None:
        """Of this rank in a life. None: it has not been in it. Raises JobError, StoreError."""
        key = self._keys.in_life(number, self._rank)
        entry = self._store.read(key).entries.get(key)
        return None if entry is None else standing_of(key, entry)

    def say(self, number: int, way: Way) -> bool:
        """How far the rank is in this life. False: it is farther, or another place has said
        something of it. Raises JobError, StoreError."""
        key = self._keys.in_life(number, self._rank)
        found = self.standing(number)
        if found is not None:
            if not found.where.is_mine(self._where):
                return False  # what has become of its tasks there cannot be told from here
            ahead = _WAYS.index(found.way) - _WAYS.index(way)
            # Said before another boot it is said anew: the next keeper goes by where it was said.
            if ahead > 0 or (ahead == 0 and found.where == self._where):
                return ahead == 0
        elif way in {Way.HERE, Way.LOOKED}:
            self.require_none_before(number)
        text = standing_text(Standing(way=way, where=self._where))
        require = Require(key, 0 if found is None else found.revision)
        return self._store.write([require], [Put(key, text)]).applied

    def require_none_before(self, number: int) -> None:
        """Of a job that was given up nobody may have stopped all ranks. Raises JobError,
        StoreError."""
        last = last_standing(self._store, self._keys, self._rank, number - 1)
        if last is None or not last[1].may_run or last[1].where.is_mine(self._where):
            return  # what was here is stopped before (recovering.py)
        raise JobError(
            f"job {self._keys.job}: rank {self._rank} was on {last[1].where.host} in life {last[0]}"
            ", where no keeper says that its tasks have ended: start it there, or make sure that "
            f"they have and say `gpustasis job fence` with --rank {self._rank}"
        )

    def told(self, number: int) -> None:
        """The rank's tasks have ended well, and upon a signal, in this life. What is there and
        cannot be used is overwritten. Raises StoreError."""
        key = self._keys.told
        while usable_number(key, entry := self._store.read(key).entries.get(key)) < number:
            require = Require(key, entry.revision if entry else 0)
            self._store.write([require], [Put(key, str(number))])

    def was_told(self, number: int) -> bool:
        """Whether the tasks of any rank have. Raises StoreError."""
        key = self._keys.told
        return usable_number(key, self._store.read(key).entries.get(key)) == number

    def read(self) -> Life:
        """As it is now. Raises JobError, StoreError."""
        before, key = self._life, self._keys.life
        entry = self._store.read(key).entries.get(key)
        if entry is None or (before is not None and entry.revision < before.revision):
            raise JobError(f"{key} is not what it was: the store has lost what it held")
        self._note(life_of(key, entry))
        return self.life

    def newest(self) -> int:
        """The number of the job's life, before this keeper has a seat; 0: it has none. Raises
        JobError, StoreError."""
        entry = self._store.read(self._keys.life).entries.get(self._keys.life)
        return 0 if entry is None else life_of(self._keys.life, entry).number

    def replace(self, life: Life, by: Life) -> bool:
        """Whether it was. Raises JobError, StoreError."""
        key = self._keys.life
        put = Put(key, by.to_text())
        applied = self._store.write([Require(key, life.revision)], [put]).applied
        self.read()
        return applied

    def report(
        self,
        number: int,
        reason: str,
        *,
        unnoticed_s: float,
        held_s: float = 0,
        hung: bool = False,
        told_at: float = math.inf,
    ) -> None:
        """A life has failed; of several reports one is taken. told_at: as of Life.given_up. Raises
        JobError, StoreError."""
        failure = Failure(rank=self._rank, reason=reason, at=time.time(), unnoticed_s=unnoticed_s)
        failure, life = replace(failure, held_s=held_s, hung=hung), self.read()
        failure = replace(failure, hung=failure.hung_at(told_at))
        while life.number == number and life.stage is Stage.RUNS:
            if self.replace(life, life.failed(failure)):
                return
            life = self.life

    def give_up(self, reason: str, told_at: float = math.inf) -> None:
        """told_at: as of Life.given_up. Raises JobError, StoreError."""
        failure = Failure(rank=self._rank, reason=reason, at=time.time())
        life = self.read()
        while not life.stage.is_final and life.stage is not Stage.RESTORES:
            if self.replace(life, life.given_up(failure, told_at)):
                return
            life = self.life

    def end(self, reason: str, run: str) -> None:
        """The job, as started then, was ended as it should be. Raises JobError, StoreError."""
        life = self.read()
        while life.run == run and not life.stage.is_final:
            failure = Failure(rank=self._rank, reason=reason, at=time.time())
            if self.replace(life, replace(life, stage=Stage.DONE, failure=failure)):
                return
            life = self.life

    # What goes on meanwhile.

    def _note(self, life: Life) -> None:
        with self._lock:
            if self._life is None or life.revision > self._life.revision:
                self._life = life

    def _serve(self) -> None:
        while not self._over.is_set():
            self.turn()

    def turn(self) -> None:
        """What is to be done now, and a moment of waiting."""
        try:
            self._turn()
        except LeaseGone:
            self._sit_again()
        except WatchLost:
            self._unwatch()
        except StoreError as exc:
            log.info("rank %d waits for the store: %s", self._rank, exc)
            self._begin_again("")
        except Exception as exc:  # noqa: BLE001 - without this thread the seat is lost
            self._begin_again(str(exc) if isinstance(exc, JobError) else repr(exc))

    def _begin_again(self, wrong: str) -> None:
        """Soon, with what is read then. wrong: with what was read before; if that stays so, it is
        told once."""
        times = self._wrong[1] + 1 if wrong == self._wrong[0] else 1
        self._wrong = (wrong, times)
        if wrong and times == _TOLD_AFTER:
            with suppress(OSError):  # who is told may be gone
                self._told(f"job {self._keys.job}, rank {self._rank} is not looked after: {wrong}")
        if self._following is not None:
            self._following.forget()
        if self._leading is not None:
            self._leading.forget()
        self._unwatch()
        self._over.wait(_AGAIN_S)

    def _turn(self) -> None:
        if self._watch is None:
            life = self.read()
            self._watch = self._store.watch(self._keys.life, life.revision)
        if time.monotonic() >= self._beaten + self._ttl_s / 4:
            if not self.unseated:
                self._store.keep(self._lease)
            self._beaten = time.monotonic()
            life = self.life
            if self._following is not None and (after := self._following.after(life)) is not None:
                self.replace(life, after)
        for change in self._watch.wait(_AGAIN_S):
            if change.entry is not None:
                self._note(life_of(change.key, change.entry))
        if self._leading is not None and not self.unseated:
            self._leading.turn(self.life)

    def _unwatch(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _sit_again(self) -> None:
        """The store had not heard of this keeper for too long."""
        try:
            self._sit()
        except JobError as exc:
            self.unseated = str(exc)
        except StoreError as exc:
            log.info("rank %d has no seat: %s", self._rank, exc)
            self._over.wait(_AGAIN_S)
