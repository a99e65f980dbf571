# SPDX-License-Identifier: Apache-2.0
"""What a rank's keeper still has to tell the neighbour about copies, in a file: a keeper that is
killed, or a neighbour that cannot be reached, leaves nothing there that takes room for ever."""

from __future__ import annotations

import json
import logging
import os
import threading
from enum import StrEnum
from pathlib import Path

from gpustasis.files import open_regular, replace_file
from gpustasis.image.directory import is_there
from gpustasis.jobs.place import Place
from gpustasis.peers.config import parse_address
from gpustasis.peers.copies import is_key

log = logging.getLogger(__name__)

OWED = ".owed.json"  # in the rank's directory
_MOST = 200  # errands; those of a neighbour that is gone for good: the oldest are forgotten
_MOST_BYTES = 1 << 20


class What(StrEnum):
    """forget: the epoch was aborted: its copy can go. drop-older: it was committed: older copies
    can."""

    FORGET = "forget"
    DROP_OLDER = "drop-older"


Errand = tuple[What, str, str]  # and host:port of the neighbour, and the name of the copy


class Owed:
    """Of one rank; calls come from several threads. What cannot be written is kept by this keeper
    alone, and told in the log."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._lock = threading.Lock()
        # By the name of the image directory, from before it is sent until its epoch is decided.
        self._sent: dict[str, tuple[str, str]] = {}
        self._errands: list[Errand] = []
        self._load()

    def sent(self, images: Path, peer: str, key: str) -> None:
        """From now on the neighbour may have this copy of the dump there."""
        with self._lock:
            self._sent[images.name] = (peer, key)
            self._store()

    def copy_of(self, images: Path) -> tuple[str, str] | None:
        """Neighbour and name of the copy that was sent of the dump there, perhaps by an earlier
        keeper; None: none was, or what became of its epoch is known."""
        with self._lock:
            return self._sent.get(images.name)

    def add(self, what: What, peer: str, key: str) -> None:
        """An errand, in the place of what is known of that copy."""
        with self._lock:
            self._sent = {name: one for name, one in self._sent.items() if one != (peer, key)}
            others = [one for one in self._errands if one[1:] != (peer, key)]
            self._errands = [*others, (what, peer, key)][-_MOST:]
            self._store()

    def first(self) -> Errand | None:
        with self._lock:
            return self._errands[0] if self._errands else None

    def later(self, errand: Errand) -> None:
        """The neighbour was not reached: the others first."""
        with self._lock:
            if errand in self._errands:
                self._errands.remove(errand)
                self._errands.append(errand)

    def done(self, errand: Errand) -> None:
        with self._lock:
            if errand in self._errands:
                self._errands.remove(errand)
                self._store()

    def _load(self) -> None:
        try:
            with open_regular(self._place.directory / OWED, os.O_NOFOLLOW) as file:
                found = json.loads(file.read(_MOST_BYTES).decode("utf-8"))
            for name, (peer, key) in found["sent"].items():
                self._sent[str(name)] = _checked(peer, key)
            for what, peer, key in found["errands"]:
                self._errands.append((What(what), *_checked(peer, key)))
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
            log.warning("%s cannot be used: %s", self._place.directory / OWED, exc)

    def _store(self) -> None:
        # A later dump may get the name of one that is gone, and has another copy.
        for name in [one for one in self._sent if not is_there(self._place.directory / one)]:
            del self._sent[name]
        text = json.dumps({"sent": self._sent, "errands": self._errands}) + "\n"
        try:
            directory = os.open(self._place.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                replace_file(directory, OWED, text.encode(), 0o600)
            finally:
                os.close(directory)
        except OSError as exc:
            log.warning("%s cannot be written: %s", self._place.directory / OWED, exc)


def _checked(peer: object, key: object) -> tuple[str, str]:
    """Raises ValueError."""
    parse_address(str(peer))
    if not is_key(key):
        raise ValueError(f"{key!r} names no copy")
    return str(peer), str(key)
