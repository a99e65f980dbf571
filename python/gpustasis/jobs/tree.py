# SPDX-License-Identifier: Apache-2.0
"""The entries of a store of our own, with revisions, leases and a journal: what server.py serves.

Every change is in the journal before anybody is told; and on disk, if an entry without a lease is
in it: one with a lease is of no use once the host has failed, and all its ranks with it. A journal
whose last line was not finished is one whose last change was not told to anybody: it is left out.
Anything else that is wrong in it is an error, since a decision may have been in it.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from gpustasis.errors import StoreError
from gpustasis.files import replace_file
from gpustasis.jobs.store import (
    MAX_KEY_BYTES,
    MAX_VALUE_BYTES,
    Answer,
    Change,
    Entry,
    LeaseGone,
    Put,
    Require,
    Snapshot,
    WatchLost,
)

HISTORY = 100_000  # changes that a watch may lag behind
MAX_TTL_S = 86_400
_VERSION = 1


class Tree:
    """time: seconds that only go forward. Methods may be called by several threads. Raises
    StoreError if the journal cannot be used."""

    def __init__(self, journal: Path, time: Callable[[], float]) -> None:
        self._time = time
        self._revision = 1
        self._entries: dict[str, Entry] = {}
        self._owners: dict[str, int] = {}  # key -> lease
        self._ttls: dict[int, int] = {}
        self._deadlines: dict[int, float] = {}
        self._history: deque[Change] = deque(maxlen=HISTORY)
        self._forgotten = 1  # the newest revision that is not in the history
        self._path = journal
        self._broken = ""
        self.changed = threading.Condition()
        self._lock = _locked(journal)
        try:
            self._load()
            self._file = self._rewritten()
        except BaseException:
            os.close(self._lock)
            raise

    def close(self) -> None:
        """No more changes are taken."""
        with self.changed:
            self._broken = "the store is closed"
            self._file.close()
            os.close(self._lock)
            self.changed.notify_all()

    def read(self, keys: Iterable[str]) -> Snapshot:
        """As Store.read."""
        with self.changed:
            self._expire()
            wanted = list(keys)
            found = {
                key: entry
                for key, entry in self._entries.items()
                if any(_is_meant(key, name) for name in wanted)
            }
            return Snapshot(self._revision, found)

    def write(self, requires: Sequence[Require], puts: Sequence[Put]) -> Answer:
        """As Store.write."""
        for put in puts:
            _check(put)
        with self.changed:
            self._expire()
            for put in puts:
                if put.lease and put.lease not in self._ttls:
                    raise LeaseGone(f"lease {put.lease} has expired")
            for require in requires:
                entry = self._entries.get(require.key)
                if (entry.revision if entry else 0) != require.revision:
                    return Answer(False, self._revision)
            if puts:
                entries = [[put.key, put.value, put.lease] for put in puts]
                durable = not all(put.lease for put in puts)
                self._record({"puts": entries, "revision": self._revision + 1}, durable=durable)
                self._put(puts, self._revision + 1)
            return Answer(True, self._revision)

    def grant(self, ttl_s: int) -> int:
        """As Store.grant."""
        if not 1 <= ttl_s <= MAX_TTL_S:
            raise StoreError(f"a lease of {ttl_s} s: must be 1 to {MAX_TTL_S}")
        with self.changed:
            lease = int.from_bytes(os.urandom(7)) | 1
            self._record({"lease": lease, "ttl": ttl_s}, durable=False)
            self._grant(lease, ttl_s)
            return lease

    def keep(self, lease: int) -> None:
        """As Store.keep."""
        with self.changed:
            self._expire()
            if lease not in self._ttls:
                raise LeaseGone(f"lease {lease} has expired")
            self._deadlines[lease] = self._time() + self._ttls[lease]

    def revoke(self, lease: int) -> None:
        """As Store.revoke."""
        with self.changed:
            self._end([lease] if lease in self._ttls else [])

    def changes(self, key: str, after: int) -> tuple[list[Change], int]:
        """Those that are later than this revision, and the revision up to which that is all. Raises
        WatchLost if some are forgotten."""
        with self.changed:
            self._expire()
            if after < self._forgotten:
                raise WatchLost(f"changes after revision {after} are forgotten")
            # Backwards: a watch lags behind by a few changes, and there may be many older ones.
            newer = takewhile(lambda change: change.revision > after, reversed(self._history))
            return [c for c in newer if _is_meant(c.key, key)][::-1], max(after, self._revision)

    def changed_since(self, revision: int) -> bool:
        """Whether there may be changes later than this revision; or none will come any more."""
        with self.changed:
            return self._revision > revision or bool(self._broken)

    def _expire(self) -> None:
        now = self._time()
        self._end([lease for lease, deadline in self._deadlines.items() if deadline <= now])

    def _end(self, leases: list[int]) -> None:
        if leases:
            self._record({"ended": leases, "revision": self._revision + 1}, durable=False)
            self._remove(leases, self._revision + 1)

    def _grant(self, lease: int, ttl_s: int) -> None:
        self._ttls[lease] = ttl_s
        self._deadlines[lease] = self._time() + ttl_s

    def _put(self, puts: Sequence[Put], revision: int) -> None:
        self._revision = revision
        for put in puts:
            self._entries[put.key] = Entry(put.value, revision)
            self._owners[put.key] = put.lease
            self._note(Change(put.key, self._entries[put.key], revision))
        self.changed.notify_all()

    def _remove(self, leases: Iterable[int], revision: int) -> None:
        self._revision = revision
        gone = set(leases)
        for lease in gone:
            self._ttls.pop(lease, None)
            self._deadlines.pop(lease, None)
        for key in sorted(key for key, lease in self._owners.items() if lease in gone):
            del self._entries[key], self._owners[key]
            self._note(Change(key, None, revision))
        self.changed.notify_all()

    def _note(self, change: Change) -> None:
        if len(self._history) == HISTORY:
            self._forgotten = self._history[0].revision
        self._history.append(change)

    # The journal.

    def _record(self, line: dict[str, Any], *, durable: bool) -> None:
        if self._broken:
            raise StoreError(f"the store takes no more changes: {self._broken}")
        try:
            self._file.write(_line(line))
            self._file.flush()
            if durable:
                os.fdatasync(self._file.fileno())
        except OSError as exc:
            # What is on disk is not known any more; only reading it again can tell.
            self._broken = f"{self._path}: {exc.strerror}"
            raise StoreError(f"cannot write {self._path}: {exc.strerror}") from exc

    def _load(self) -> None:
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as exc:
            raise StoreError(f"cannot read {self._path}: {exc.strerror}") from exc
        lines = data.split(b"\n")
        for number, line in enumerate(lines[:-1], 1):  # the last one was not finished
            try:
                self._replay(json.loads(line), first=number == 1)
            except (ValueError, KeyError, TypeError, RecursionError) as exc:
                raise StoreError(f"{self._path}, line {number}, is damaged: {exc!r}") from exc
        self._forgotten = self._revision
        self._history.clear()

    def _replay(self, line: dict[str, Any], *, first: bool) -> None:
        if first != ("version" in line):
            raise ValueError("the version must stand in the first line, and there only")
        if first and line["version"] != _VERSION:
            raise ValueError(f"version {line['version']!r}, this build reads {_VERSION}")
        revision = int(line.get("revision", self._revision))
        with self.changed:
            if "lease" in line:
                self._grant(int(line["lease"]), int(line["ttl"]))
            elif "ended" in line:
                self._remove([int(lease) for lease in line["ended"]], revision)
            elif "entry" in line:
                key, value, lease, written = line["entry"]
                self._entries[str(key)] = Entry(str(value), int(written))
                self._owners[str(key)] = int(lease)
            elif "puts" in line:
                puts = [Put(str(key), str(value), int(lease)) for key, value, lease in line["puts"]]
                self._put(puts, revision)
            elif not first:
                raise ValueError("no change that is known")
            self._revision = revision

    def _rewritten(self) -> Any:
        """The journal with nothing but what is there now, open for more."""
        lines: list[dict[str, Any]] = [{"version": _VERSION, "revision": self._revision}]
        lines += [{"lease": lease, "ttl": ttl} for lease, ttl in self._ttls.items()]
        lines += [
            {"entry": [key, entry.value, self._owners[key], entry.revision]}
            for key, entry in self._entries.items()
        ]
        try:
            directory = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                data = b"".join(_line(line) for line in lines)
                replace_file(directory, self._path.name, data, 0o600)
            finally:
                os.close(directory)
            return open(self._path, "ab")
        except OSError as exc:
            raise StoreError(f"cannot write {self._path}: {exc.strerror}") from exc


def _locked(journal: Path) -> int:
    """A lock that ends with this process, so that two servers never use one journal."""
    path = journal.with_name(f"{journal.name}.lock")
    try:
        lock = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise StoreError(f"cannot open {path}: {exc.strerror}") from exc
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        os.close(lock)
        raise StoreError(f"{journal} is in use by another server") from exc
    return lock


def _line(line: dict[str, Any]) -> bytes:
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"


def _is_meant(key: str, name: str) -> bool:
    return key.startswith(name) if name.endswith("/") else key == name


def _check(put: Put) -> None:
    if not put.key or len(put.key.encode()) > MAX_KEY_BYTES or put.key.endswith("/"):
        raise StoreError(f"key {put.key[:80]!r}: 1 to {MAX_KEY_BYTES} bytes, no / at the end")
    if len(put.value.encode()) > MAX_VALUE_BYTES:
        raise StoreError(f"the value of {put.key} has more than {MAX_VALUE_BYTES} bytes")
