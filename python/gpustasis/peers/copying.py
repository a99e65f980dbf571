# SPDX-License-Identifier: Apache-2.0
"""Copy a checkpoint into the memory of a neighbour, and what it is built on with it; and fetch one
from there."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from gpustasis._core import (
    ARENA_OWNER,
    MANIFEST_NAME,
    PARENT_LINK,
    Manifest,
    read_manifest,
)
from gpustasis.criu.images import INVENTORY_NAME
from gpustasis.criu.images import PARENT_LINK as CRIU_PARENT_LINK
from gpustasis.draining.drain import finished_manifest, owner_of
from gpustasis.errors import CheckpointError, ImageError, PeerError
from gpustasis.image.arena import is_inventory_of, stored_directory
from gpustasis.image.checkpoint import NO_PARENT, image_errors, require_not_sealed
from gpustasis.image.directory import is_there, new_directory, require_free, share
from gpustasis.image.peer_record import PEER_RECORD, PeerRecord, write_peer_record
from gpustasis.peers import wire
from gpustasis.peers.config import Address, Config
from gpustasis.peers.copies import (
    OF_ONE_NODE,
    Copy,
    is_sent,
    key_of,
    require_right,
)
from gpustasis.peers.orders import copy_in
from gpustasis.peers.room import MAX_FILES, OnDisk, require_free_bytes
from gpustasis.peers.wire import Source
from gpustasis.text import mib

# Told the bytes that were sent, and how many there are.
OnProgress = Callable[[int, int], object]
# Told host:port of the neighbour and the name of the copy.
OnKey = Callable[[str, str], object]
_MAX_CHAIN = 200
_MAX_COPIES = 100_000
_MAX_PATH = 4096  # characters
_MAX_LISTING = 64 << 20  # bytes of what is said of all of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """directory: of the checkpoint; key: what the copy is called; peer: where it is, and
    peer_directory: in which directory there. copies: how many were made: those that it is built on
    are copied too, unless they are there. bytes: of all their files."""

    directory: Path
    checkpoint_id: bytes
    key: str
    peer: str
    node: str
    peer_directory: str
    copies: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Link:
    """One checkpoint of a chain. images: with CRIU's files; stored: with ours."""

    images: Path
    stored: Path
    manifest: Manifest
    key: str

    def sources(self) -> list[Source]:
        """What is sent of it."""
        found = {}
        for place in dict.fromkeys((self.images, self.stored)):
            for path in sorted(place.iterdir()):
                name = path.name
                if not is_sent(name):
                    continue
                if path.is_symlink() or not path.is_file():
                    raise PeerError(f"{path} is no file: this checkpoint cannot be copied")
                found[name] = Source(path, name)
        if len(found) > MAX_FILES:
            raise PeerError(f"{self.images} has more than {MAX_FILES} files: it cannot be copied")
        return list(found.values())


def copy(
    directory: Path,
    config: Config,
    *,
    rate: int = 0,
    on_progress: OnProgress | None = None,
    on_key: OnKey | None = None,
    replaces: bool = True,
) -> Copied:
    """Copy the checkpoint in `directory` to the neighbour that the configuration names. The copy is
    whole, and checked by the neighbour, when this returns; of one that is only in memory here its
    directory says so from then on.

    rate: bytes in a second, at most; 0: no limit. on_key: called before anything is sent: if this
    fails later, the neighbour may have the copy all the same, and its answer was lost. replaces:
    the copy takes the place of older ones of its store at once; else they stay until drop_older().

    Raises PeerError if the neighbour cannot be reached or refuses; ImageError if there is no
    checkpoint, or not a whole one.
    """
    begin = time.monotonic()
    require_not_sealed(directory)
    with ExitStack() as held:
        chain = _chain_of(directory, held)
        keys = [link.key for link in chain]
        there, node, base = _have(config, keys)
        missing = [link for link in chain if link.key not in there]
        sizes = {link.key: _size(link.sources()) for link in missing}
        if on_key is not None:
            on_key(str(config.peer), chain[0].key)
        total, done = sum(sizes.values()), 0
        for link in reversed(missing):
            last = replaces and link is chain[0]
            _send(link, chain, config, rate, sizes[link.key], done, total, on_progress, last=last)
            done += sizes[link.key]
    newest = chain[0]
    if missing:
        there, node, base = _have(config, [newest.key])
    if newest.key not in there:
        raise PeerError(f"the neighbour {config.peer} has no copy {newest.key} any more")
    where = f"{base}/{newest.key}"
    if newest.stored != newest.images:
        record = PeerRecord(
            checkpoint=newest.manifest.checkpoint_id.hex(),
            peer=str(config.peer),
            node=node,
            key=newest.key,
            directory=where,
            time=time.time(),
            bytes=done,
        )
        try:
            write_peer_record(directory, record)
        except OSError as exc:
            raise PeerError(
                f"{directory} is copied to {config.peer}, and {PEER_RECORD} cannot say so: {exc}"
            ) from exc
    return Copied(
        directory=directory,
        checkpoint_id=newest.manifest.checkpoint_id,
        key=newest.key,
        peer=str(config.peer),
        node=node,
        peer_directory=where,
        copies=len(missing),
        bytes=done,
        seconds=time.monotonic() - begin,
    )


def list_copies(address: Address, config: Config) -> list[Copy]:
    """All that a neighbour keeps, oldest first. Raises PeerError."""
    found: list[Copy] = []
    with wire.connect(address, config) as connection:
        connection.say({"version": wire.PROTOCOL_VERSION, "ask": "list"})
        while "copy" in (answer := connection.hear()):
            if len(found) >= _MAX_COPIES:
                raise PeerError(
                    f"{connection.place} says that it has more than {_MAX_COPIES} copies"
                )
            if connection.heard > _MAX_LISTING:
                raise PeerError(
                    f"{connection.place} says more than {mib(_MAX_LISTING)} of its copies"
                )
            found.append(copy_in(answer, connection.place))
    return found


def discard(address: Address, config: Config, key: str) -> None:
    """Have a neighbour remove a copy that this node has sent. Raises PeerError."""
    _discard(address, config, key, here=False)


def discard_here(config: Config, key: str) -> None:
    """Have the server of this node remove a copy, whoever has sent it. Raises PeerError."""
    if config.listen is None:
        raise PeerError("the configuration has no `listen`: this node keeps no copies")
    everywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - addresses to be replaced
    host = everywhere.get(config.listen.host, config.listen.host)
    _discard(Address(host, config.listen.port), config, key, here=True)


def _discard(address: Address, config: Config, key: str, *, here: bool) -> None:
    with wire.connect(address, config, here=here) as connection:
        connection.say({"version": wire.PROTOCOL_VERSION, "ask": "discard", "key": key})
        connection.hear()


def drop_older(address: Address, config: Config, key: str) -> None:
    """Have a neighbour remove what the copy `key`, which this node has sent, takes the place of: as
    `replaces` of copy(), at another time. Raises PeerError."""
    with wire.connect(address, config) as connection:
        connection.say({"version": wire.PROTOCOL_VERSION, "ask": "drop-older", "key": key})
        connection.hear()


def fetch(address: Address, config: Config, key: str, out: Path) -> list[Path]:
    """Bring a copy that a neighbour keeps to `out`, a new directory, and what it is built on beside
    it, each under its key; all of them, `out` first. Every byte is checked. Raises PeerError,
    CheckpointError if a place is taken."""
    require_free(out)
    copies = {one.key: one for one in list_copies(address, config)}
    chain: list[Copy] = []
    at = key
    while at:
        if at not in copies or len(chain) > _MAX_CHAIN:
            raise PeerError(f"the neighbour {address} has no copy {at}")
        chain.append(copies[at])
        at = copies[at].parent
    places = {one.key: out if one.key == key else out.absolute().parent / one.key for one in chain}
    needed = sum(one.bytes for one in chain if one.key == key or not is_there(places[one.key]))
    with suppress(OSError):  # new_directory() says it better
        require_free_bytes(out.absolute().parent, needed, out)
    for one in reversed(chain):
        place = places[one.key]
        if one.key != key and is_there(place):
            _require_fetched(place, one.key)  # before, with another that is built on it
            continue
        with wire.connect(address, config) as connection, new_directory(place) as part:
            connection.say({"version": wire.PROTOCOL_VERSION, "ask": "fetch", "key": one.key})
            found = copy_in(connection.hear(), connection.place)
            if (found.key, found.bytes) != (one.key, one.bytes):
                raise PeerError(
                    f"{connection.place} sends another copy than the {one.key} it lists"
                )
            wire.take_files(connection, part, found.bytes, OnDisk(part, place), never=OF_ONE_NODE)
            if one.parent:
                parent = places[one.parent]
                (part / PARENT_LINK).symlink_to(os.path.relpath(parent, place))
            require_right(part, one.key, one.parent, connection.working())
            connection.say({"whole": True})
            _sync(part)
    return [places[one.key] for one in chain]


def _chain_of(directory: Path, held: ExitStack) -> list[_Link]:
    """The checkpoint and all that it is built on, newest first, each with a lock on it."""
    images, stored = directory, stored_directory(directory)
    found: list[_Link] = []
    while True:
        for place in dict.fromkeys((images, stored)):
            held.enter_context(share(place))
        if is_there(images / CRIU_PARENT_LINK):
            raise PeerError(
                f"{images}: pages of CPU memory are in an earlier dump (--prev-images-dir): such a "
                "checkpoint cannot be copied"
            )
        if stored != images and not found:
            manifest = finished_manifest(images, stored)
        else:
            manifest = _whole(images, stored)
        with image_errors():
            raw = (stored / MANIFEST_NAME).read_bytes()
        found.append(_Link(images, stored, manifest, key_of(manifest.checkpoint_id, raw)))
        if manifest.parent_id == NO_PARENT:
            return found
        if len(found) >= _MAX_CHAIN:
            raise PeerError(f"{directory} is built on more than {_MAX_CHAIN} others")
        stored = _parent_of(stored, manifest)
        images = owner_of(stored) if is_there(stored / ARENA_OWNER) else stored


def _whole(images: Path, stored: Path) -> Manifest:
    if not is_there(images / INVENTORY_NAME):
        raise ImageError(f"{images}: no {INVENTORY_NAME}: there is no checkpoint to copy")
    with image_errors():
        manifest = read_manifest(stored)
    if not is_inventory_of(images, manifest):
        raise ImageError(f"{images / INVENTORY_NAME} is of another checkpoint than {stored}")
    return manifest


def _parent_of(stored: Path, manifest: Manifest) -> Path:
    link = stored / PARENT_LINK
    try:
        found = link.resolve(strict=True)
        with image_errors():
            right = read_manifest(found).checkpoint_id == manifest.parent_id
    except (OSError, RuntimeError) as exc:
        raise ImageError(f"{link}: what the checkpoint is built on is not there: {exc}") from exc
    if not right:
        raise ImageError(f"{link} leads to {found}, which is another checkpoint")
    return found


def _send(
    link: _Link,
    chain: list[_Link],
    config: Config,
    rate: int,
    size: int,
    done: int,
    total: int,
    on_progress: OnProgress | None,
    *,
    last: bool,
) -> None:
    assert config.peer is not None
    at = chain.index(link)
    real = Path(os.path.realpath(link.images))
    order: dict[str, object] = {
        "version": wire.PROTOCOL_VERSION,
        "ask": "keep",
        "key": link.key,
        "parent": chain[at + 1].key if at + 1 < len(chain) else "",
        "store": str(real.parent),
        "name": real.name,
        "taken": (link.stored / MANIFEST_NAME).stat().st_mtime,
        "bytes": size,
        "last": last,
    }

    def tell(count: int) -> None:
        if on_progress is not None:
            on_progress(done + count, total)

    with wire.connect(config.peer, config) as connection:
        connection.say(order)
        connection.hear()
        try:
            wire.send_files(connection, link.sources(), rate=rate, on_bytes=tell)
        except OSError as exc:
            raise PeerError(f"{link.images} cannot be read: {exc}") from exc
        connection.hear_end(lambda: tell(size))


def require_peer(config: Config) -> None:
    """Raise PeerError unless there is a neighbour, and it can be spoken to."""
    _have(config, [])


def _have(config: Config, keys: list[str]) -> tuple[set[object], str, str]:
    """Those of these copies that the neighbour has, its name, and the directory of its copies."""
    if config.peer is None:
        raise PeerError("the configuration has no `peer`: there is no neighbour to copy to")
    with wire.connect(config.peer, config) as connection:
        connection.say({"version": wire.PROTOCOL_VERSION, "ask": "have", "keys": keys})
        answer = connection.hear()
        found, base = answer.get("have"), answer.get("directory")
        if not isinstance(found, list) or not isinstance(base, str):
            raise PeerError(f"{connection.place} does not say what it has")
        if len(base) > _MAX_PATH:  # it is written into a file that nobody could read again
            raise PeerError(
                f"{connection.place} names a directory of its copies with {len(base)} characters: "
                f"no path has more than {_MAX_PATH}"
            )
        return {one for one in found if isinstance(one, str)}, connection.other, base


def _require_fetched(place: Path, key: str) -> None:
    """Raise PeerError unless that copy lies there, as an earlier fetch has left it."""
    with suppress(OSError, CheckpointError):
        with image_errors():
            manifest = read_manifest(place)
        found = key_of(manifest.checkpoint_id, (place / MANIFEST_NAME).read_bytes())
        if found == key and is_there(place / INVENTORY_NAME):
            return
    raise PeerError(f"{place} is in the way: it is not, or not the whole of, the copy of this name")


def _size(sources: list[Source]) -> int:
    return sum(source.path.stat().st_size for source in sources)


def _sync(directory: Path) -> None:
    for path in directory.iterdir():
        if not path.is_symlink():
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
