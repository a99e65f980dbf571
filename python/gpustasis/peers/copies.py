# SPDX-License-Identifier: Apache-2.0
"""The copies that a node keeps for its neighbours: image directories in a tmpfs, each whole and
checked before it has its name, and removed when newer ones have taken its place.

A copy is called by the id of its checkpoint and the digest of its manifest: a checkpoint that was
copied from memory and the same one copied from the disk are other bytes, and what is built on the
one cannot use the other.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import math
import os
import re
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from gpustasis import _core
from gpustasis._core import (
    ARENA_MARKER,
    ARENA_OWNER,
    MANIFEST_NAME,
    PARENT_LINK,
    read_manifest,
)
from gpustasis.draining.recycle import RESERVED
from gpustasis.errors import CheckpointError, ImageError, PeerError
from gpustasis.files import open_regular
from gpustasis.image.arena import is_inventory_of
from gpustasis.image.checkpoint import NO_PARENT, image_errors
from gpustasis.image.directory import DirectoryLock, new_directory, try_exclude
from gpustasis.image.peer_record import PEER_RECORD
from gpustasis.image.store import is_trash, trash_name
from gpustasis.image.verification import OnProgress, verify_directory
from gpustasis.peers.built_on import linked_parent, with_parents
from gpustasis.peers.config import Config
from gpustasis.peers.room import Charges, Promise, Room, charge

log = logging.getLogger(__name__)

# Puts a copy into a directory, tells the promise what comes, and how many bytes it was.
Take = Callable[[Path, Promise], int]
NOTE = "gpustasis-peer-copy"
FETCHED = "gpustasis-fetched"  # in a rank's dump on another host than that of its record
# Of one node alone: neither sent nor taken.
OF_ONE_NODE = frozenset(
    {ARENA_MARKER, ARENA_OWNER, RESERVED, PARENT_LINK, PEER_RECORD, NOTE, FETCHED}
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,254}")
# What a dump or a restore has said of itself.
_LEFT_OUT = re.compile(r".*\.log|gpustasis-(dump|restore|undo)\.(json|log)|stats-.*")
_NOTE_LIMIT = 64 << 10  # bytes
_KEY = re.compile(r"[0-9a-f]{32}-[0-9a-f]{16}")
_PART = re.compile(r"\.[0-9a-f]{32}-[0-9a-f]{16}\.part(\.gpustasis)?")
MAX_TIME = 1e11  # seconds since 1970


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """key: its name. node: who sent it, by its certificate; store: the directory there that its
    image directory was in: the newest of each store are kept. name: of that image directory.
    parent: the key of what it is built on, or empty. taken: when the checkpoint was made; received:
    when its copy was whole, but later than that of all before it, also if the clock was set back;
    seconds since 1970. bytes: of its files."""

    key: str
    node: str
    store: str
    name: str
    parent: str
    taken: float
    received: float
    bytes: int

    @property
    def checkpoint(self) -> str:
        """The id of the checkpoint, in hex."""
        return self.key[:32]


def key_of(checkpoint_id: bytes, manifest: bytes) -> str:
    """What a copy with that manifest is called."""
    return f"{checkpoint_id.hex()}-{hashlib.sha256(manifest).hexdigest()[:16]}"


def is_key(text: object) -> bool:
    """Whether a copy can be called so."""
    return isinstance(text, str) and _KEY.fullmatch(text) is not None


def is_sent(name: str) -> bool:
    """Whether a file of that name, of a checkpoint, goes to another node."""
    left_out = name in OF_ONE_NODE or _LEFT_OUT.fullmatch(name)
    return not left_out and _NAME.fullmatch(name) is not None


@dataclass(slots=True)
class _Coming:
    """A copy that is not whole yet. unwanted: its sender has discarded it meanwhile."""

    node: str
    unwanted: bool = False


class Copies:
    """Those in one directory. Calls come from several threads; there is one process."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._pinned: Counter[str] = Counter()
        self._coming: dict[str, _Coming] = {}
        self._held: DirectoryLock | None = None
        self._left: list[Path | None] = []  # trash that could not be deleted
        self._received = 0.0  # of the copy that came last
        self._room = Room(config, Charges(config.directory, is_key).total)
        self.directory = config.directory

    def prepare(self) -> None:
        """Have the directory for this process alone, make it if it is missing, and remove what a
        server that was killed has left. Raises PeerError."""
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            _core.require_arena(self.directory)
            self._held = try_exclude(self.directory)
            if self._held is None:
                raise PeerError(f"another server keeps copies in {self.directory}")
            for name in os.listdir(self.directory):
                path = self.directory / name
                if is_trash(name) or (_PART.fullmatch(name) and path.is_dir()):
                    shutil.rmtree(path)
                elif _PART.fullmatch(name):
                    path.unlink()
        except (OSError, ValueError, ImageError) as exc:
            raise PeerError(f"copies cannot be kept in {self.directory}: {exc}") from exc

    def close(self) -> None:
        """Let another process have the directory."""
        if self._held is not None:
            self._held.close()

    def all(self) -> list[Copy]:
        """Oldest first. A copy whose note cannot be read is left out: the others are of use all the
        same. Raises PeerError if the directory cannot be read."""
        found = []
        for key in self._keys():
            try:
                found.append(self.find(key))
            except PeerError as exc:
                log.warning("%s", exc)
        return _by_age(found)

    def find(self, key: str) -> Copy | None:
        """None: there is none. Raises PeerError if its note cannot be read."""
        if not is_key(key):
            return None
        note = self.directory / key / NOTE
        try:
            with open_regular(note, os.O_NOFOLLOW) as file:
                found = json.loads(file.read(_NOTE_LIMIT).decode("utf-8"))
            is_it = set(found) == {one.name for one in fields(Copy)} and found["key"] == key
            if not is_it or not all(0 <= found[at] < MAX_TIME for at in ("taken", "received")):
                raise ValueError("it says something else than it should")
            return Copy(**found)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, TypeError, RecursionError) as exc:
            raise PeerError(
                f"the copy {key} cannot be told: {note} cannot be read: {exc}; if that stays so, "
                f"remove {note.parent}"
            ) from exc

    def _every(self) -> tuple[list[Copy], dict[str, str]]:
        """As all(), to remove some of them; and by the key of each that has a note, readable or
        not, what it is built on. Raises PeerError if that cannot be told."""
        found, parents = [], {}
        for key in self._keys():
            try:
                if (one := self.find(key)) is not None:
                    found.append(one)
                    parents[key] = one.parent
            except PeerError as exc:
                try:
                    parents[key] = linked_parent(self.directory / key)
                except (OSError, ValueError):
                    raise exc from None
                log.warning("%s; it stays, and so does what it is built on", exc)
        return _by_age(found), parents

    def _keys(self) -> list[str]:
        try:
            return [name for name in os.listdir(self.directory) if is_key(name)]
        except OSError as exc:
            raise PeerError(f"cannot list {self.directory}: {exc.strerror}") from exc

    @contextmanager
    def pinned(self, key: str) -> Iterator[Copy]:
        """That copy, which nobody removes in the block. Raises PeerError if it is not there."""
        with self._lock:
            found = self.find(key)
            if found is None:
                raise PeerError(f"there is no copy {key}")
            self._pinned[key] += 1
        try:
            yield found
        finally:
            with self._lock:
                self._pinned[key] -= 1

    def keep(self, copy: Copy, take: Take, on_progress: OnProgress, *, last: bool) -> Copy:
        """Keep what `take` puts into the directory that it is given, for which it tells the promise
        what comes; what is kept. copy: as the sender says; `received` is set here. on_progress:
        called while it is checked. last: those that it takes the place of can go: nothing that is
        to be built on it follows.

        Raises PeerError if there is no room, or what came is damaged or another checkpoint.
        """
        if copy.parent:
            with self.pinned(copy.parent):
                return self._keep(copy, take, on_progress, last)
        return self._keep(copy, take, on_progress, last)

    def _keep(self, copy: Copy, take: Take, on_progress: OnProgress, last: bool) -> Copy:
        place = self.directory / copy.key
        with self._room.promised(copy.bytes) as promise:
            if self.find(copy.key) is None:
                with self._comes(copy), new_directory(place) as part:
                    size = take(part, promise)
                    if copy.parent:
                        promise.need(charge(len(copy.parent)))
                        (part / PARENT_LINK).symlink_to(f"../{copy.parent}")
                    require_right(part, copy.key, copy.parent, on_progress)
                    copy = Copy(**{**asdict(copy), "received": self._now(), "bytes": size})
                    note = json.dumps(asdict(copy)) + "\n"
                    promise.need(charge(len(note)))
                    (part / NOTE).write_text(note)
            else:
                raise PeerError(f"the copy {copy.key} is there already")
        if last:
            self._remove_old(copy, lambda one: (one.taken, one.received))
        return copy

    def _now(self) -> float:
        """In seconds since 1970, and later than all copies that came before. Raises PeerError."""
        with self._lock:
            latest = max([self._received, *(one.received for one in self.all())])
            self._received = max(time.time(), math.nextafter(latest, math.inf))
            return self._received

    @contextmanager
    def _comes(self, copy: Copy) -> Iterator[None]:
        """In the block a copy comes, and has its name at its end. Raises PeerError if there is one
        already that comes, or if its sender has discarded it meanwhile: then it is removed."""
        coming = _Coming(copy.node)
        with self._lock:
            if copy.key in self._coming:
                raise PeerError(f"the copy {copy.key} is being sent already")
            self._coming[copy.key] = coming
        try:
            yield
        finally:
            with self._lock:
                del self._coming[copy.key]
                is_there = coming.unwanted and self.find(copy.key) is not None
                trash = self._take_away(copy.key) if is_there else None
            self._delete([trash])
        if coming.unwanted:
            raise PeerError(f"the copy {copy.key} was discarded while it was sent")

    def _remove_old(self, latest: Copy, age: Callable[[Copy], tuple[float, ...]]) -> None:
        """Remove, of its store, what is older than it in all of `age`, but for the newest and what
        others are built on: whoever asks late must not remove what has come since. Of what store
        one is whose note cannot be read is not known: it stays. Nothing goes while it cannot be
        told of one what it is built on."""
        gone: list[Path | None] = []
        try:
            with self._lock:
                gone, self._left = self._left, []
                every, parents = self._every()
                of_store = [
                    one for one in every if (one.node, one.store) == (latest.node, latest.store)
                ]
                of_store.sort(key=age)
                needed = parents.keys() - {one.key for one in of_store[: -self._config.keep]}
                needed |= {latest.key, *(key for key, count in self._pinned.items() if count)}
                needed = with_parents(needed, parents)
                for one in reversed(of_store):
                    is_older = one.received < latest.received and age(one) < age(latest)
                    if is_older and one.key not in needed:
                        gone.append(self._take_away_if_possible(one.key))
        except PeerError as exc:
            log.warning("older copies of %s, of %s, stay: %s", latest.store, latest.node, exc)
        finally:  # what is trash by now takes memory, and nobody else knows of it
            self._delete(gone)

    def discard(self, key: str, node: str) -> None:
        """Remove a copy that this node has sent; empty: any node. One that is still coming is not
        kept. Raises PeerError if it is another's, is not there, or somebody needs it, or that
        cannot be told."""
        with self._lock:
            coming = self._coming.get(key)
            if coming is not None and node in ("", coming.node):
                coming.unwanted = True
                return
            found = self.find(key)
            if found is None:
                raise PeerError(f"there is no copy {key}")
            if node and found.node != node:
                raise PeerError(f"the copy {key} is of {found.node}")
            above = [one for one, parent in self._every()[1].items() if parent == key]
            if above:
                raise PeerError(f"the copy {above[0]} is built on {key}")
            trash = None if self._pinned[key] else self._take_away(key)
            if trash is None:
                raise PeerError(f"somebody is reading the copy {key}")
        self._delete([trash])

    def drop_older(self, key: str, node: str) -> None:
        """Remove what a copy that this node has sent takes the place of. Raises PeerError if it is
        another's, or not there."""
        found = self.find(key)
        if found is None:
            raise PeerError(f"there is no copy {key}")
        if found.node != node:
            raise PeerError(f"the copy {key} is of {found.node}")
        # Its sender had committed it: that says more than the clock of a node.
        self._remove_old(found, lambda one: (one.received,))

    def _take_away(self, key: str) -> Path | None:
        """A copy is no copy any more; where it lies, to be deleted: that takes long, and is for
        when nobody waits for the lock. None: a restore from it holds a lock."""
        path = self.directory / key
        lock = try_exclude(path)
        if lock is None:
            return None
        with lock:
            trash = self.directory / trash_name()
            path.rename(trash)
        return trash

    def _take_away_if_possible(self, key: str) -> Path | None:
        """The same of one among others, which go all the same if it cannot."""
        try:
            return self._take_away(key)
        except (ImageError, OSError) as exc:
            log.warning("the copy %s cannot be removed: %s", key, exc)
            return None

    def _delete(self, places: Iterable[Path | None]) -> None:
        """What cannot be deleted takes memory: the next time that copies go, or that a server
        starts, it is tried again."""
        for place in places:
            if place is None:
                continue
            try:
                shutil.rmtree(place)
            except OSError as exc:
                shutil.rmtree(place, ignore_errors=True)  # as much of it as goes
                if os.path.lexists(place):
                    log.warning("%s is left, which was a copy: %s", place, exc)
                    with self._lock:
                        self._left.append(place)


def _by_age(found: Iterable[Copy | None]) -> list[Copy]:
    return sorted((one for one in found if one), key=lambda one: (one.received, one.key))


def require_right(part: Path, key: str, parent: str, on_progress: OnProgress) -> None:
    """Raise PeerError unless the checkpoint of that copy is in `part`, a directory of
    new_directory(), whole, and every byte of its memory is right. parent: the key of what it is
    built on, or empty."""
    fcntl.flock(int(part.name), fcntl.LOCK_SH)  # who verifies wants it too
    try:
        with image_errors():
            manifest = read_manifest(part)
        if key_of(manifest.checkpoint_id, (part / MANIFEST_NAME).read_bytes()) != key:
            raise PeerError(f"what came is not {key}")
        below = "" if manifest.parent_id == NO_PARENT else manifest.parent_id.hex()
        if below != parent[:32]:
            raise PeerError(f"{key} is not built on {parent[:32] or 'nothing'}, as is said")
        if not is_inventory_of(part, manifest):
            raise PeerError(f"CRIU's images of {key} are of another checkpoint")
        problems = verify_directory(part, on_progress=on_progress).problems
    except PeerError:
        raise
    except (CheckpointError, OSError) as exc:
        raise PeerError(f"what came is no checkpoint: {exc}") from exc
    if problems:
        raise PeerError(f"what came is damaged: {problems[0]}")
