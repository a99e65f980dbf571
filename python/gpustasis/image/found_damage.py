# SPDX-License-Identifier: Apache-2.0
"""What a check of a store has found so far: the damaged chunks of each image, in a file from which
a check goes on that was killed.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpustasis.errors import CheckpointError
from gpustasis.files import replace_file

SHOWN = 8  # damaged chunks of an image that get a sentence each
_STATE_VERSION = 2
_STATE_LIMIT = 256 << 20  # bytes of a state file
_BETWEEN_WRITES = 20  # times as long as a write of it took


@dataclass(slots=True)
class Damage:
    """Of an image. ranges: of damaged chunks, by number: the first, and the one behind the last;
    texts: what is wrong with the first few."""

    ranges: list[tuple[int, int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def add(self, found: Sequence[tuple[int, str]]) -> None:
        """More of them, with higher numbers."""
        for number, what in found:
            if self.ranges and self.ranges[-1][1] == number:
                self.ranges[-1] = (self.ranges[-1][0], number + 1)
            else:
                self.ranges.append((number, number + 1))
            if len(self.texts) < SHOWN:
                self.texts.append(what)

    def numbers(self) -> list[int]:
        return [number for first, end in self.ranges for number in range(first, end)]

    def count(self) -> int:
        return sum(end - first for first, end in self.ranges)


class Progress:
    """What is known already, by file; kept in a file of its own. It is written anew as a whole, so
    no more often than that takes a small part of the time."""

    def __init__(self, store: Path, path: Path | None) -> None:
        self._path = path
        self._store = str(store.resolve())
        self._next_write = 0.0  # on the monotonic clock
        self.checked: dict[str, Damage] = {}
        self.current: tuple[str, int, Damage] = ("", 0, Damage())  # key, next chunk, found so far
        self.continued = path is not None and os.path.lexists(path) and self._read(path)

    def note(self, key: str, following: int, damage: Damage) -> None:
        """All chunks before `following` are checked."""
        self.current = (key, following, damage)
        self._write()

    def finish(self, key: str, damage: Damage) -> None:
        self.checked[key] = damage
        self.current = ("", 0, Damage())
        self._write()

    def remove(self) -> str:
        """The check is done. Why the file cannot be removed; "": it is gone."""
        try:
            if self._path is not None:
                self._path.unlink(missing_ok=True)
        except OSError as exc:
            return f"cannot remove {self._path}: {exc.strerror}"
        return ""

    def _read(self, path: Path) -> bool:
        """Whether it can be gone on from; not from what an older version of this has left."""
        try:
            raw = json.loads(_read_own(path))
            version, store = raw["version"], raw["store"]
            if store == self._store and 0 < int(version) < _STATE_VERSION:
                return False
            if version != _STATE_VERSION or store != self._store:
                raise CheckpointError(
                    f"{path}: is the state of a check of {store}, version {version}, not of "
                    f"{self._store}; name another file"
                )
            self.checked = {str(key): _damage(found) for key, found in raw["checked"].items()}
            key, following, found = raw["current"]
            self.current = (str(key), int(following), _damage(found))
        except (
            *(OSError, ValueError, KeyError, TypeError, AttributeError),
            *(RecursionError, OverflowError),
        ) as exc:
            raise CheckpointError(
                f"{path}: cannot be used as the state of a check; remove it: {exc}"
            ) from exc
        return True

    def _write(self) -> None:
        begin = time.monotonic()
        if self._path is None or begin < self._next_write:
            return
        key, following, found = self.current
        raw = {
            "version": _STATE_VERSION,
            "store": self._store,
            "checked": {key: _stored(damage) for key, damage in self.checked.items()},
            "current": (key, following, _stored(found)),
        }
        data = json.dumps(raw).encode()
        if len(data) <= _STATE_LIMIT:  # else what was noted before stays: longer is not read again
            self._replace(self._path, data)
        now = time.monotonic()
        self._next_write = now + (now - begin) * _BETWEEN_WRITES

    def _replace(self, path: Path, data: bytes) -> None:
        try:
            directory = os.open(path.absolute().parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                replace_file(directory, path.name, data, 0o600)
            finally:
                os.close(directory)
        except OSError as exc:
            raise CheckpointError(f"cannot write {path}: {exc.strerror}") from exc


def _stored(damage: Damage) -> tuple[list[tuple[int, int]], list[str]]:
    return damage.ranges, damage.texts


def _damage(raw: object) -> Damage:
    """Raises TypeError, ValueError."""
    if not isinstance(raw, list):
        raise TypeError("no list of chunks")
    ranges, texts = raw
    return Damage([(int(first), int(end)) for first, end in ranges], [str(text) for text in texts])


def _read_own(path: Path) -> bytes:
    """A file that nobody else could have written: who could would have damaged images called sound.
    Raises OSError; CheckpointError if it is somebody else's, or too long."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, "rb") as file:
        found = os.fstat(handle)
        others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if not stat.S_ISREG(found.st_mode) or found.st_uid not in (0, os.geteuid()) or others:
            raise CheckpointError(f"{path}: is no file that only root or this user can write to")
        raw = file.read(_STATE_LIMIT + 1)
    if len(raw) > _STATE_LIMIT:
        raise CheckpointError(f"{path}: has more than {_STATE_LIMIT} bytes")
    return raw
