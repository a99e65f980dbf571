# SPDX-License-Identifier: Apache-2.0
"""A rank's dump in memory on two nodes: how it is copied to the neighbour before it is committed,
how it is given up, and how it comes back when its own node has lost it. docs/jobs.md, "Memory
first"."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from enum import StrEnum
from pathlib import Path

from gpustasis._core import (
    ARENA_MARKER,
    MANIFEST_NAME,
    PARENT_LINK,
    ArenaMarker,
    CorruptDataError,
    find_arena_marker,
    read_manifest,
)
from gpustasis._core import stored_directory as core_stored_directory
from gpustasis.draining import room
from gpustasis.draining.recycle import arena_of, recycle
from gpustasis.errors import CheckpointError, ImageError, JobError, PeerError
from gpustasis.files import open_new, sync, sync_directory
from gpustasis.image.arena import find_marker, note_over, own_marker
from gpustasis.image.checkpoint import image_errors
from gpustasis.image.directory import PATIENCE_S, is_there, try_exclude
from gpustasis.image.peer_record import find_peer_record
from gpustasis.image.store import why_not_whole
from gpustasis.jobs.dumps import DumpRecord, content_of
from gpustasis.peers import copying
from gpustasis.peers.config import Address, Config, load, parse_address
from gpustasis.peers.copies import FETCHED, is_key
from gpustasis.peers.copying import Copied

log = logging.getLogger(__name__)

_POLL_S = 0.05
_PART = ".fetching"  # behind the name of a dump that is not there yet
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ID = 32  # characters of a key that are the checkpoint's id
_ERRAND_S = 10  # a neighbour that stalls, where nothing depends on its answer


class CommitAt(StrEnum):
    """durable: when it is on the disk. peer: when it is in memory here and at the neighbour."""

    DURABLE = "durable"
    PEER = "peer"


def require(name: str, commit_at: CommitAt, alone: AbstractContextManager[None]) -> Config | None:
    """The configuration, if copies are needed: then the neighbour is there, and can be spoken to.
    name: of the rank. alone: entered and left: no earlier dump is being copied, which copy_out()
    would have to wait for with tasks that stand. Raises JobError."""
    if commit_at is CommitAt.DURABLE:
        return None
    try:
        config = load(None)
        copying.require_peer(config)
    except PeerError as exc:
        raise JobError(f"{name}: no copy can be made at the neighbour: {exc}") from exc
    with alone:
        return config


def copy_out(
    images: Path,
    config: Config,
    alone: AbstractContextManager[None],
    goes_on: Callable[[], bool],
    on_key: copying.OnKey,
) -> Copied:
    """Copy a dump whose criu waits at the gate. What the neighbour has of earlier ones stays: this
    one may never be committed. alone: in it nobody else copies, and to wait for that counts as
    well. goes_on: asked now and then; False: it is given up. on_key: as for
    copying.copy(). Raises JobError, ImageError, PeerError."""

    def tell(done: int, total: int) -> None:
        if not goes_on():
            raise JobError(f"the epoch is over, and {done} of {total} bytes were copied")

    if find_marker(images) is None:
        raise JobError(
            f"{images} holds no memory that gpustasis has stored, such as that of a GPU: it cannot "
            "be committed at the peer; give this rank --commit-at durable"
        )
    begin = time.monotonic()
    with alone:
        done = copying.copy(images, config, on_progress=tell, on_key=on_key, replaces=False)
    return replace(done, seconds=time.monotonic() - begin)


def find_copy(images: Path) -> tuple[str, str] | None:
    """host:port and key of the copy of a dump that is in memory; None: there is none, or nothing is
    known of it."""
    try:
        marker = find_marker(images) if is_there(images / ARENA_MARKER) else None
        found = None if marker is None else find_peer_record(images, marker.checkpoint_id)
    except CheckpointError as exc:
        log.info("%s: %s", images, exc)
        return None
    return None if found is None else (found.peer, found.key)


def id_in(key: str) -> str:
    """Of the checkpoint that a copy of this name is of."""
    return key[:_ID]


def forget(peer: str, key: str) -> None:
    """Have the neighbour remove a copy. Raises PeerError."""
    copying.discard(_address(peer), _hurried(), key)


def drop_older(peer: str, key: str) -> None:
    """Have it remove what this copy, whose epoch is committed, takes the place of. Raises
    PeerError."""
    copying.drop_older(_address(peer), _hurried(), key)


def copy_durable(images: Path, goes_on: Callable[[], bool]) -> None:
    """Copy a dump that was drained: the next one is built on it as it is on the disk, and is copied
    the faster for it. Raises as copy_out."""
    copying.copy(images, load(None), on_progress=lambda *_: _require(goes_on), replaces=False)


def _require(goes_on: Callable[[], bool]) -> None:
    if not goes_on():
        raise JobError("the keeper ends")


def remove(images: Path) -> None:
    """All of a dump, in memory too. Raises OSError, CheckpointError if a drain is at work."""
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            give_up(images)
            break
        except CheckpointError:  # what criu has started may hold the lock for a moment
            if time.monotonic() >= end:
                raise
            time.sleep(_POLL_S)
    with suppress(FileNotFoundError):
        shutil.rmtree(images)


def give_up(images: Path) -> None:
    """What a dump has in memory here, if it has: its directory in the arena is gone, unless another
    dump is built on it. Raises CheckpointError if a drain is at work."""
    try:
        marker = find_marker(images) if is_there(images / ARENA_MARKER) else None
        if marker is None:
            return
        kept = Path(marker.directory)
        if is_there(images / MANIFEST_NAME):
            _end_drain(images, marker)
        else:
            room.discard(images)
        end = time.monotonic() + PATIENCE_S
        # What has put memory back may hold it for a moment. Without its image directory nobody
        # would know any more whose it is.
        while is_there(kept) and room.is_held(kept) and time.monotonic() < end:
            time.sleep(_POLL_S)
            recycle(kept.parent)
        if is_there(kept) and room.is_held(kept):
            log.warning("%s is still in use: `gpustasis arena discard %s` removes it", kept, kept)
    except ImageError as exc:
        log.warning("%s: what it had in memory is gone, or left there: %s", images, exc)


def _end_drain(images: Path, marker: ArenaMarker) -> None:
    """What a drain that was killed in its last steps has left to be done. Not by drain(): who calls
    this may hold the directory alone. Raises CheckpointError if a drain is at work, ImageError."""
    try:
        with own_marker(images, marker.checkpoint_id) as own:
            with image_errors():
                durable = read_manifest(images).checkpoint_id
            if own is not None and durable == marker.checkpoint_id:
                note_over(images, marker)
                own.unlink()
    except BlockingIOError as exc:
        raise CheckpointError(f"{images / ARENA_MARKER} is locked: a drain is at work") from exc
    if (arena := arena_of(marker)) is not None:
        recycle(arena)


def is_lost(images: Path) -> str:
    """Why there is no whole dump in `images`, where one was; empty: there is, or nobody can tell
    now. Without a marker and a manifest, a host has lost its power before the names were on the
    disk."""
    if not is_there(images):
        return "it is not there"
    if is_there(images / MANIFEST_NAME):
        return ""
    try:
        marker = find_arena_marker(images)
        if marker is None:
            return f"{images} has no manifest"
        if marker.boot_id != _BOOT_ID.read_text(encoding="ascii").strip():
            return "it was in memory, and the host was started anew since"
        Path(marker.directory).lstat()
        stored = core_stored_directory(images)
    except (FileNotFoundError, NotADirectoryError) as exc:
        return f"its images in memory are lost: {exc}"
    except CorruptDataError as exc:
        return str(exc)
    except (OSError, ValueError, NotImplementedError) as exc:
        log.warning("%s: whether it is lost cannot be told: %s", images, exc)
        return ""
    return "" if is_there(stored / MANIFEST_NAME) else f"{images} has no manifest"


def bring_back(record: DumpRecord) -> bool:
    """Where the dump is lost, fetch the copy from the neighbour into its directory. What is there
    gets another name once the copy is whole, and is found to be what was committed: from then on it
    is not lost any more, and no other copy is tried. Whether it was fetched. Raises JobError."""
    images = Path(record.directory)
    if not record.is_copied or not (lost := is_lost(images)):
        return False
    part = images.with_name(f"{images.name}{_PART}")
    try:
        if not _is_fetched(part, record):
            images.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _fetch(record, part)
        sync_directory(part)
        _put(part, images, lost)
    except (CheckpointError, OSError) as exc:
        raise JobError(f"{images} is lost ({lost}), and was not fetched: {exc}") from exc
    log.warning(
        "%s was lost, and is fetched from %s; what another node has sent there, and is lost for "
        "good, stays until `gpustasis peer discard KEY --here` is run on that neighbour",
        images,
        record.peer,
    )
    return True


def _is_fetched(part: Path, record: DumpRecord) -> bool:
    """Whether a keeper has fetched all of it, and was killed before it gave it its name. The copy
    may be gone at the neighbour meanwhile: this one is not removed to fetch it once more."""
    try:
        if not is_there(part / FETCHED) or why_not_whole(part):
            return False
        return content_of(part) == (record.bytes, record.digest)
    except (CheckpointError, OSError) as exc:
        log.warning("%s is fetched once more: %s", part, exc)
        return False


def _fetch(record: DumpRecord, part: Path) -> None:
    """Fetch what was committed to `part`, and note there that it is. Raises CheckpointError,
    OSError."""
    config, address = load(None), _address(record.peer)
    copies = copying.list_copies(address, config)
    keys = [one.key for one in reversed(copies) if one.checkpoint == record.id]
    if not keys:
        raise PeerError(f"the neighbour {address} has no copy of checkpoint {record.id}")
    # It may have the drained one by now: other bytes, the same content. And another node's.
    keys.sort(key=lambda one: one != record.key)
    key = _fetch_right(record, part, address, config, keys)
    with open_new(part / FETCHED) as file:
        file.write(f"from {address}, as {key}\n".encode())
        sync(file)


def _fetch_right(
    record: DumpRecord, part: Path, address: Address, config: Config, keys: list[str]
) -> str:
    """Fetch, to `part`, the first of these copies that is what was committed; its key. Raises
    CheckpointError if none is; OSError."""
    problems = []
    unused: list[list[Path]] = []  # what the others are built on: the next may be as well
    before = set(os.listdir(part.parent))
    try:
        for key in keys:
            with suppress(FileNotFoundError):
                shutil.rmtree(part)  # of a keeper that was killed
            try:
                copying.fetch(address, config, key, part)
                size, digest = content_of(part)
                if (size, digest) == (record.bytes, record.digest):
                    return key
                problem = f"{size} bytes, digest {digest[:16]}: it is not what was committed"
            except CheckpointError as exc:
                problem = str(exc)
            problems.append(f"the copy {key}: {problem}")
            log.warning("%s: of %s, %s", record.directory, address, problems[-1])
            unused.append([one for one in fetched_below(part) if one.name not in before])
            with suppress(FileNotFoundError):
                shutil.rmtree(part)
    finally:
        for chain in unused:
            _clear_away(chain)
    raise PeerError("; ".join(problems))


def _clear_away(fetched: list[Path]) -> None:
    try:
        remove_fetched(fetched, ())
    except (CheckpointError, OSError) as exc:
        log.warning("cannot remove what was fetched: %s", exc)


def _put(part: Path, images: Path, lost: str) -> None:
    """Give what was fetched its name, and another to what is left of the dump. Raises OSError;
    all is as before then, unless only the names could not be synced."""
    aside: Path | None = None
    if is_there(images):
        number = 1
        while is_there(images.with_name(f"{images.name}.lost-{number}")):
            number += 1
        aside = images.rename(images.with_name(f"{images.name}.lost-{number}"))
        log.warning("%s is lost: %s; what is left of it is now %s", images, lost, aside)
    try:
        part.rename(images)
    except OSError:
        if aside is not None:
            aside.rename(images)
        raise
    sync_directory(images.parent)


def fetched_below(images: Path) -> list[Path]:
    """Copies that were fetched together with a dump, because that is built on them, and lie beside
    it; nearest first. Raises OSError."""
    found: list[Path] = []
    at = images
    while (at / PARENT_LINK).is_symlink():
        at = Path(os.path.realpath(at / PARENT_LINK))
        if not is_key(at.name) or at.parent != Path(os.path.realpath(images.parent)) or at in found:
            break
        found.append(at)
    return found


def remove_fetched(places: list[Path], needed: Collection[str]) -> list[Path]:
    """Remove those of fetched_below() that nothing is built on any more, and nobody reads; which
    they are. needed: ids of checkpoints that are needed. Raises OSError, ImageError."""
    removed = []
    for place in places:
        beside = (place.parent / name / PARENT_LINK for name in os.listdir(place.parent))
        links = {os.path.realpath(link) for link in beside if link.is_symlink()}
        if id_in(place.name) in needed or str(place) in links:
            break  # and with it what is below
        lock = try_exclude(place) if is_there(place) else None
        if lock is None:
            break
        with lock:
            shutil.rmtree(place)
        removed.append(place)
    return removed


def _address(peer: str) -> Address:
    try:
        return parse_address(peer)
    except ValueError as exc:
        raise PeerError(str(exc)) from exc


def _hurried() -> Config:
    """The configuration, where an answer is not worth a long wait. Raises PeerError."""
    config = load(None)
    return replace(config, timeout_s=min(_ERRAND_S, config.timeout_s))
