# SPDX-License-Identifier: Apache-2.0
"""A store: a directory whose subdirectories are the checkpoints of a job; what lies in it, and
which of it needs which.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from gpustasis._core import (
    ARENA_MARKER,
    MANIFEST_NAME,
    PACK_NAME,
    SEALED_NAME,
    ImageReader,
    Manifest,
)
from gpustasis.criu.images import INVENTORY_NAME
from gpustasis.criu.images import PARENT_LINK as CRIU_PARENT_LINK
from gpustasis.errors import CheckpointError, ImageError, UnsupportedError
from gpustasis.image.arena import Tier, is_inventory_of, stored_directory
from gpustasis.image.checkpoint import (
    NO_PARENT,
    State,
    find_manifest,
    find_sources,
    open_image,
    parent_directory,
    plain_size,
    sealed_error,
    whose,
)
from gpustasis.image.directory import is_directory, is_file, is_there
from gpustasis.image.peer_record import find_peer_record
from gpustasis.image.sealed_entry import SealedEntry, find_sealed, why_unknown

log = logging.getLogger(__name__)

# Refusals that say nothing of what is there: a disk or a server that does not answer now, this
# process out of something, or not let in.
_UNTOLD = frozenset(
    {
        *(errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN),
        *(errno.EMFILE, errno.ENFILE, errno.ENOMEM),
        *(errno.EACCES, errno.EPERM),
    }
)

# The manifest of a sealed checkpoint, out of its sealed files. Raises ImageError, UnsupportedError.
OpenSealed = Callable[[Path], Manifest | None]

_OURS = (MANIFEST_NAME, SEALED_NAME, ARENA_MARKER)
_TRASH = re.compile(r"\.gpustasis-trash-[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A subdirectory of a store, or a link there to a checkpoint.

    manifest: None if there is none that can be read; of a sealed one, without its key. taken: when
    the manifest was written, or the sealed file that holds it, local time. links: where the links
    to earlier checkpoints lead, ours and CRIU's. target: where it leads if it is itself a link;
    that is among `links` too. incomplete: why it is not a whole checkpoint of ours, in this place;
    "": it is one. unread: why it cannot be told now what it is built on; "": that is known, or
    nothing that can be read says it. sealed: None: it is in the clear. stored: where manifest and
    images are; another directory than its own if they are only in memory yet; None: not known.
    """

    directory: Path
    manifest: Manifest | None
    taken: datetime | None
    links: tuple[Path, ...]
    incomplete: str
    target: Path | None = None
    unread: str = ""
    sealed: SealedEntry | None = None
    stored: Path | None = None

    @property
    def tier(self) -> Tier:
        """Where its images are."""
        local = self.stored is not None and self.stored != self.directory
        return Tier.LOCAL if local else Tier.DURABLE

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def checkpoint_id(self) -> bytes | None:
        return None if self.manifest is None else self.manifest.checkpoint_id

    @property
    def identity(self) -> bytes | None:
        """Another one in its place has another; None: nothing is known of it."""
        return self.checkpoint_id if self.sealed is None else self.sealed.header

    @property
    def closed(self) -> str:
        """Why what it holds cannot be looked at; "": it can."""
        if self.sealed is None or self.incomplete:
            return self.incomplete
        return str(sealed_error(str(self.directory)))

    @property
    def size(self) -> int:
        """Bytes of its files, in memory too; what vanishes meanwhile, not being ours, counts 0."""
        total = 0
        for place in {self.directory, self.stored or self.directory}:
            with suppress(OSError), os.scandir(place) as items:
                total += sum(item.stat(follow_symlinks=False).st_size for item in items)
        return total

    @property
    def parent_id(self) -> bytes | None:
        """None: it has no parent, or that cannot be known."""
        if self.manifest is None or self.manifest.parent_id == NO_PARENT:
            return None
        return self.manifest.parent_id


def read_store(store: Path, open_sealed: OpenSealed | None = None) -> dict[str, Entry]:
    """Every subdirectory by name, and every link to a checkpoint. open_sealed: None: there is no
    key. Raises ImageError."""
    try:
        with os.scandir(store) as items:
            names = sorted(item.name for item in items if _belongs(item))
    except OSError as exc:
        raise ImageError(f"cannot list {store}: {exc.strerror}") from exc
    place = store.resolve()
    return {name: read_entry(place / name, open_sealed) for name in names}


def _belongs(item: os.DirEntry[str]) -> bool:
    if not item.is_symlink():
        return item.is_dir(follow_symlinks=False)
    if is_trash(item.name):
        return False
    try:
        return any(is_there(Path(item.path) / name) for name in _OURS)
    except ImageError:
        return True  # its entry says why nobody can tell


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """An entry, and what its images say. memory_bytes: of memory, the GPU's and the CPU's, that is
    in our images; None: they cannot be read. problem: why it is no whole checkpoint; "": it is one,
    as far as can be told without reading chunks. peer: of one that is only in memory here:
    host:port of the neighbour that has a copy; None: none has, or that cannot be read."""

    entry: Entry
    memory_bytes: int | None
    problem: str
    peer: str | None = None


def list_store(store: Path) -> list[Listed]:
    """Every subdirectory, oldest first. Raises ImageError if the store cannot be read."""
    return [_listed(entry) for entry in sorted(read_store(store).values(), key=by_time)]


def why_not_whole(directory: Path) -> str:
    """As Listed.problem, of one directory."""
    return _listed(read_entry(directory)).problem


def by_time(entry: Entry) -> tuple[float, str]:
    """To sort by: oldest first; what has no time before all others."""
    return (0.0 if entry.taken is None else entry.taken.timestamp(), entry.name)


def _listed(entry: Entry) -> Listed:
    memory: int | None = None
    problem, peer = entry.closed, None
    try:
        if entry.manifest is not None:
            images = [
                open_image(entry.directory, entry.manifest, task)
                for task in entry.manifest.tasks
                if task.externalized
            ]
            memory = sum(map(plain_size, images))
            problem = problem or _what_is_missing_below(entry.directory, images)
            if entry.tier == Tier.LOCAL:
                peer = _peer_of(entry.directory, entry.manifest)
    except (ImageError, UnsupportedError) as exc:
        problem = problem or str(exc)
    return Listed(entry=entry, memory_bytes=memory, problem=problem, peer=peer)


def _peer_of(directory: Path, manifest: Manifest) -> str | None:
    """None also if that cannot be read: the checkpoint is whole without it."""
    try:
        found = find_peer_record(directory, manifest.checkpoint_id)
    except ImageError as exc:
        log.warning("whether a neighbour has a copy of %s cannot be told: %s", directory, exc)
        return None
    return None if found is None else found.peer


def _what_is_missing_below(directory: Path, images: list[ImageReader]) -> str:
    """What it is built on and is not there, as the first image says that needs any; "": nothing."""
    for image in images:
        for found in find_sources(directory, image.info.sources):
            if found.state is not State.RIGHT:
                return f"{whose(found.source)}, is {found.state}"
    return ""


def is_trash(name: str) -> bool:
    """Whether prune gives such names to what it is about to delete."""
    return _TRASH.fullmatch(name) is not None


def trash_name() -> str:
    """A new name for a directory that is being removed; is_trash tells it."""
    return f".gpustasis-trash-{secrets.token_hex(16)}"


def read_entry(directory: Path, open_sealed: OpenSealed | None = None) -> Entry:
    """One directory. Raises nothing: what cannot be read is an incomplete checkpoint."""
    manifest, taken, target, sealed, stored = None, None, None, None, None
    refusal: int | None = None
    try:
        target = directory.resolve() if directory.is_symlink() else None
        sealed = find_sealed(directory)
        if sealed is not None:
            taken = _time_of(directory / SEALED_NAME)
            incomplete = _what_is_missing(directory, None, sealed)
            if open_sealed is not None and not sealed.problem:
                manifest = open_sealed(directory)
        else:
            stored = stored_directory(directory)
            manifest = find_manifest(stored)
            if manifest is not None:
                taken = _time_of(stored / MANIFEST_NAME)
            incomplete = _what_is_missing(directory, manifest, None)
    except (ImageError, UnsupportedError) as exc:
        incomplete, refusal = str(exc), exc.errno
    except OSError as exc:
        incomplete, refusal = f"cannot read {directory}: {exc}", exc.errno
    # A loop of links, before Python 3.13; a time beyond all calendars.
    except (RuntimeError, ValueError, OverflowError) as exc:
        incomplete = f"cannot read {directory}: {exc}"
    unread = incomplete if manifest is None and refusal in _UNTOLD else ""
    links, unread_link = _links(directory)
    # It was told of a checkpoint before it became trash; since then its link may have been deleted.
    if sealed is not None and manifest is None and not is_trash(directory.name):
        unread = unread or _why_unknown(directory, sealed)
    if target is not None:
        links = (target, *links)
        incomplete = incomplete or f"a link to {target}"
    return Entry(
        directory=directory,
        manifest=manifest,
        taken=taken,
        links=links,
        incomplete=incomplete,
        target=target,
        unread=unread or unread_link,
        sealed=sealed,
        stored=stored,
    )


def _time_of(path: Path) -> datetime:
    return datetime.fromtimestamp(path.stat().st_mtime).astimezone()


def _why_unknown(directory: Path, sealed: SealedEntry) -> str:
    try:
        parent = parent_directory(directory)
        return why_unknown(directory, sealed, [] if parent is None else [parent])
    except ImageError as exc:
        return str(exc)


class Needs:
    """Which entry of a store needs which."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._entries = entries
        self._by_place = {entry.directory: entry for entry in entries.values()}
        self._by_id: dict[bytes, list[Entry]] = {}
        for entry in entries.values():
            if entry.checkpoint_id is not None:
                self._by_id.setdefault(entry.checkpoint_id, []).append(entry)

    def of(self, names: Iterable[str]) -> dict[str, str]:
        """What the chains of `names` are made of, each with the name of one that needs it.

        Followed are ids of parents, wherever in the store they are, and links, also through
        places outside of it. One in an arena may be in the store as well, drained: what is built on
        it may need it there. Raises CheckpointError if it cannot be told of one.
        """
        found: dict[str, str] = {}
        outside: set[Path] = set()
        todo = [(name, self._entries[name]) for name in names]
        while todo:
            child, entry = todo.pop()
            if entry.unread:
                raise CheckpointError(
                    f"what {entry.name} is built on cannot be told: {entry.unread}; nothing "
                    "was removed"
                )
            parents = self._parents(entry)
            for place in entry.links:
                if place not in self._by_place and place not in outside and is_directory(place):
                    outside.add(place)
                    below = read_entry(place)
                    todo.append((child, below))
                    if below.checkpoint_id is not None:
                        parents += self._by_id.get(below.checkpoint_id, [])
            for parent in parents:
                if parent.name not in found and parent.name != child:
                    found[parent.name] = child
                    todo.append((parent.name, parent))
        return found

    def outside(self) -> dict[str, list[Path]]:
        """Places outside the store that links lead to, by name of the entry with the link."""
        found = {
            entry.name: [place for place in entry.links if place not in self._by_place]
            for entry in self._entries.values()
        }
        return {name: places for name, places in found.items() if places}

    def _parents(self, entry: Entry) -> list[Entry]:
        known = [] if entry.parent_id is None else self._by_id.get(entry.parent_id, [])
        return [*known, *(self._by_place[p] for p in entry.links if p in self._by_place)]


def _what_is_missing(directory: Path, manifest: Manifest | None, sealed: SealedEntry | None) -> str:
    if directory.name.startswith("."):
        return "hidden: not done, or not meant for others"
    if manifest is None and sealed is None:
        if is_file(directory / INVENTORY_NAME):
            return "no manifest: a checkpoint of CRIU alone, or one that has lost its manifest"
        return "no manifest: no checkpoint, or a dump that is not done"
    if not is_file(directory / INVENTORY_NAME):
        return f"no {INVENTORY_NAME}: a dump that is not done or was broken off"
    if manifest is not None and (why := _why_not_its_inventory(directory, manifest)):
        return why
    if sealed is not None and sealed.problem:
        return sealed.problem
    for task in () if manifest is None else manifest.tasks:
        if task.externalized and not is_file(stored_directory(directory) / task.image_name):
            return f"{task.image_name} is missing"
    if manifest is not None and manifest.pack is not None and not is_file(directory / PACK_NAME):
        return f"{PACK_NAME} is missing"
    with os.scandir(directory) as items:
        below = next((item.name for item in items if item.is_dir(follow_symlinks=False)), None)
    return "" if below is None else f"holds a directory, {below}"


def _why_not_its_inventory(directory: Path, manifest: Manifest) -> str:
    """CRIU syncs none: after a loss of power there may be an empty one, beside a manifest that was
    synced. "": it is its own, or cannot be read now: then nothing says that it is not."""
    if (directory / INVENTORY_NAME).stat().st_size == 0:
        return f"{INVENTORY_NAME} is empty: the dump was broken off, or the power was lost after it"
    try:
        is_own = is_inventory_of(directory, manifest)
    except ImageError as exc:
        if exc.errno not in _UNTOLD:
            raise
        return ""
    return "" if is_own else f"{INVENTORY_NAME} is not of the checkpoint of {MANIFEST_NAME}"


def _links(directory: Path) -> tuple[tuple[Path, ...], str]:
    """Where they lead, and why one of them cannot be read now; "": what is no link leads
    nowhere."""
    found: list[Path] = []
    unread = ""
    try:
        if (parent := parent_directory(directory)) is not None:
            found.append(parent)
    except ImageError as exc:
        unread = str(exc) if exc.errno in _UNTOLD else ""
    except UnsupportedError as exc:  # a later version may lead to what must stay
        unread = str(exc)
    try:
        os.readlink(directory / CRIU_PARENT_LINK)
        found.append((directory / CRIU_PARENT_LINK).resolve())
    except OSError as exc:
        if exc.errno in _UNTOLD:
            unread = f"cannot read {directory / CRIU_PARENT_LINK}: {exc.strerror}"
    except RuntimeError:  # a loop of links, before Python 3.13
        pass
    return tuple(dict.fromkeys(found)), unread
