# SPDX-License-Identifier: Apache-2.0
"""The record of one rank's dump: what the commit of a job names, and how a dump is compared with
it. A record comes out of the store: it is checked before it is used."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpustasis._core import ARENA_OWNER, MANIFEST_NAME
from gpustasis.criu.images import inventory_plugins
from gpustasis.draining.recycle import RESERVED, SYNCING
from gpustasis.errors import CheckpointError, ImageError, JobError
from gpustasis.files import open_regular
from gpustasis.image.arena import OVER, find_marker, require_durable, stored_directory
from gpustasis.image.checkpoint import (
    NO_PARENT,
    find_manifest,
    is_sealed,
    open_image,
    plain_size,
)
from gpustasis.image.directory import is_there, shared
from gpustasis.image.store import why_not_whole
from gpustasis.image.verification import verify_directory
from gpustasis.jobs.network import Network, network_of_json
from gpustasis.peers.config import parse_address
from gpustasis.peers.copies import is_key

_VERSION = 1
_MAX_TEXT = 4096
_CHUNK = 1 << 20
_NAMED = "checkpoint-"  # and the id, in CRIU's inventory: src/cuda_plugin/inventory_names.hpp
# Written after the dump is complete, or by a restore.
_NOT_COVERED = re.compile(r".*\.log|stats-(dump|restore)|gpustasis-(dump|restore)\.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpRecord:
    """id: of the checkpoint, empty if gpustasis has stored nothing of it: CRIU has all. parent: of
    the one that it is built on. directory: on `host`. bytes, digest: of its files; of one that has
    a copy, of its content (content_of). addresses: that the host, or its network namespace, had.
    pid: of the root. dump_ms: from the start of criu until everything was dumped, and copied. peer:
    host:port of the neighbour that has a copy in memory; key: what the copy is called; both are
    empty where the dump was durable when it was committed."""

    id: str
    parent: str
    directory: str
    host: str
    bytes: int
    digest: str
    pid: int
    dump_ms: int
    addresses: tuple[str, ...]
    network: Network
    peer: str = ""
    key: str = ""

    @property
    def is_copied(self) -> bool:
        """Whether a neighbour has got a copy of it."""
        return self.peer != ""

    def to_text(self) -> str:
        value = asdict(self) | {"version": _VERSION, "network": self.network.to_json()}
        if not self.is_copied:  # an older build does not know these, and need not
            del value["peer"], value["key"]
        return json.dumps(value, sort_keys=True)


def record_of(text: str, whose: str) -> DumpRecord:
    """Raises JobError."""
    try:
        value: dict[str, Any] = json.loads(text)
        if value.pop("version") != _VERSION:
            raise ValueError("another version")
        network = network_of_json(value.pop("network"))
        addresses = tuple(value.pop("addresses"))
        if value["parent"] == NO_PARENT.hex():  # as an older version had it
            value["parent"] = ""
        record = DumpRecord(**value, addresses=addresses, network=network)
        words = (record.id, record.parent, record.directory, record.host, record.digest)
        words += (record.peer, record.key, *addresses)
        numbers = (record.bytes, record.pid, record.dump_ms)
        if not all(isinstance(word, str) and len(word) <= _MAX_TEXT for word in words):
            raise ValueError("a text is none, or too long")
        if not all(type(number) is int and 0 <= number < 1 << 63 for number in numbers):
            raise ValueError("a number is none")
        if not record.directory.startswith("/") or ".." in record.directory.split("/"):
            raise ValueError(f"{record.directory!r} is no directory")
        if not re.fullmatch(r"[0-9a-f]{64}", record.digest):
            raise ValueError("the digest is none")
        if (record.peer, record.key) != ("", ""):
            parse_address(record.peer)
            if not is_key(record.key) or not record.id:
                raise ValueError(f"{record.key!r} names no copy")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
        raise JobError(f"{whose}: its record cannot be used: {exc}") from exc
    return record


def seal_of(directory: Path) -> tuple[int, str]:
    """Size and digest of a dump. What the manifest has digests of is in it by name and size only.

    Raises OSError; ImageError for what is no ordinary file; LocalError for one that is only in
    memory.
    """
    require_durable(directory, "take it as a rank's part of a checkpoint")
    covered = _covered_by_manifest(directory)
    total = 0
    digest = hashlib.sha256()
    for name in sorted(os.listdir(directory)):
        if _NOT_COVERED.fullmatch(name):
            continue
        found = (directory / name).lstat()
        if stat.S_ISLNK(found.st_mode) or stat.S_ISDIR(found.st_mode):
            continue  # to a parent; a directory of ours holds nothing of the tasks
        content = "" if name in covered else _digest_of(directory / name)
        digest.update(json.dumps([name, found.st_size, content]).encode() + b"\n")
        total += found.st_size
    return total, digest.hexdigest()


def content_of(directory: Path) -> tuple[int, str]:
    """Size and digest of what is in a dump, however its images are stored: the same in memory, when
    it is drained, and of its copy. The size is that of CRIU's files and of all memory in ours.

    Raises OSError; ImageError for what is no whole checkpoint, or no ordinary file.
    """
    stored = stored_directory(directory)
    with shared(() if stored == directory else (stored,)):  # it may be drained meanwhile
        manifest = find_manifest(stored)
        if manifest is None:
            raise ImageError(f"{directory}: there is no manifest")
        if manifest.pack is not None:  # CRIU's files would come out of it, which are not read here
            raise ImageError(f"{directory} is packed, which no dump that was copied is")
        digest = hashlib.sha256(manifest.checkpoint_id + manifest.parent_id)
        images = {one.image_name: one for one in manifest.tasks if one.externalized}
        total = 0
        for name in _files_of_criu(directory):
            size = (directory / name).lstat().st_size
            facts = [name, size, _digest_of(directory / name)]
            digest.update(json.dumps(facts).encode() + b"\n")
            total += size
        for name in sorted(images):
            image = open_image(stored, manifest, images[name])
            regions = [[one.address, one.length, one.protection] for one in image.info.regions]
            digest.update(json.dumps([name, regions]).encode() + b"\n")
            digest.update(b"".join([image.chunk(at).hash for at in range(len(image))]))
            total += plain_size(image)
    return total, digest.hexdigest()


def _files_of_criu(directory: Path) -> list[str]:
    """Names of what CRIU has written."""
    return sorted(
        item.name
        for item in os.scandir(directory)
        if not item.name.startswith((".", "gpustasis-"))
        and not _NOT_COVERED.fullmatch(item.name)
        and not item.is_symlink()
        and not item.is_dir(follow_symlinks=False)
    )


def stamp_of(directory: Path) -> str:
    """Another one once one of a dump's files is another one, or was written to, by what the file
    system says: to tell it without reading them. Of a dump in memory it does not change while that
    is drained, and does once it is. Raises OSError, ImageError if it is lost."""
    stored = stored_directory(directory)
    if stored == directory:
        return _stamp(
            directory, [n for n in os.listdir(directory) if not _NOT_COVERED.fullmatch(n)]
        )
    ours = [
        name for name in os.listdir(stored) if name not in (ARENA_OWNER, RESERVED, SYNCING, OVER)
    ]
    return f"{criu_stamp_of(directory)}-{_stamp(stored, ours)}"


def criu_stamp_of(directory: Path) -> str:
    """As stamp_of, of CRIU's files alone, to which a drain does nothing. Raises OSError."""
    return _stamp(directory, _files_of_criu(directory))


def _stamp(directory: Path, names: Iterable[str]) -> str:
    found = hashlib.sha256()
    for name in sorted(names):
        file = (directory / name).lstat()
        facts = [name, file.st_ino, file.st_size, file.st_mtime_ns, file.st_ctime_ns]
        found.update(json.dumps(facts).encode() + b"\n")
    return found.hexdigest()


def identity_of(directory: Path) -> tuple[str, str]:
    """Id and parent's id of the checkpoint; empty: there is none. Of one that is sealed too."""
    if is_sealed(directory):
        return "", ""
    manifest = find_manifest(directory)
    if manifest is None:
        return "", ""
    parent = "" if manifest.parent_id == NO_PARENT else manifest.parent_id.hex()
    return manifest.checkpoint_id.hex(), parent


def may_be_in_memory(record: DumpRecord) -> bool:
    """Whether it may be so alone. It is not if it is found drained, or fetched, in its place: of a
    directory that is not seen from this host nobody can tell."""
    if not record.is_copied:
        return False
    place = Path(record.directory)
    try:  # a drain writes the manifest when all else is on the disk
        return not is_there(place / MANIFEST_NAME) or identity_of(place)[0] != record.id
    except CheckpointError:
        return True


def named_in(directory: Path) -> set[str]:
    """Ids of the checkpoint in a directory, by each of its files that names one and can be read: of
    one that is lost, or half removed, too. None of one that is sealed. Raises ImageError."""
    found: set[str] = set()
    if is_sealed(directory):
        return found
    with suppress(CheckpointError):
        found.add(identity_of(directory)[0])
    with suppress(CheckpointError):
        marker = find_marker(directory)
        found.add("" if marker is None else marker.checkpoint_id.hex())
    with suppress(CheckpointError):
        names = inventory_plugins(directory)
        found.update(name[len(_NAMED) :] for name in names if name.startswith(_NAMED))
    return found - {""}


def require_same(record: DumpRecord) -> None:
    """The files are those that were committed. Raises JobError."""
    try:
        directory = Path(record.directory)
        size, digest = content_of(directory) if record.is_copied else seal_of(directory)
    except (OSError, CheckpointError) as exc:
        raise JobError(f"{record.directory} cannot be read: {exc}") from exc
    if (size, digest) != (record.bytes, record.digest):
        raise JobError(
            f"{record.directory} is not what was committed: {size} bytes, digest {digest[:16]}; "
            f"the record says {record.bytes} with {record.digest[:16]}"
        )


def require_chain(record: DumpRecord) -> None:
    """What it is built on is there, as far as can be told without reading all of it. Raises
    JobError."""
    if record.parent and (wrong := why_not_whole(Path(record.directory))):
        raise JobError(f"{record.directory} cannot be restored: {wrong}")


def problems_of(record: DumpRecord, threads: int = 0) -> list[str]:
    """What is wrong with a dump on this host; every byte of it is looked at."""
    try:
        require_same(record)
    except JobError as exc:
        return [str(exc)]
    if not record.id:
        return []  # every file is in the digest
    return verify_directory(Path(record.directory), threads).problems


def _covered_by_manifest(directory: Path) -> set[str]:
    """Files whose content the manifest vouches for, which is in the digest itself."""
    if is_sealed(directory) or not (directory / MANIFEST_NAME).exists():
        return set()
    manifest = find_manifest(directory)
    if manifest is None:
        return set()
    return {task.image_name for task in manifest.tasks if task.externalized}


def _digest_of(path: Path) -> str:
    digest = hashlib.sha256()
    with open_regular(path, os.O_NOFOLLOW) as file:
        while data := file.read(_CHUNK):
            digest.update(data)
    return digest.hexdigest()
