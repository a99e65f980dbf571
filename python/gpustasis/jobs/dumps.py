# SPDX-License-Identifier: Apache-2.0
"""The record of one rank's dump: what the commit of a job names, and how a dump is compared with
it. A record comes out of the store: it is checked before it is used."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpustasis._core import MANIFEST_NAME
from gpustasis.errors import ImageError, JobError
from gpustasis.files import open_regular
from gpustasis.image.checkpoint import NO_PARENT, find_manifest, is_sealed
from gpustasis.image.store import why_not_whole
from gpustasis.image.verification import verify_directory
from gpustasis.jobs.network import Network, network_of_json

_VERSION = 1
_MAX_TEXT = 4096
_CHUNK = 1 << 20
# Written after the dump is complete, or by a restore.
_NOT_COVERED = re.compile(r".*\.log|stats-(dump|restore)|gpustasis-(dump|restore)\.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpRecord:
    """id: of the checkpoint, empty if gpustasis has stored nothing of it: CRIU has all. parent: of
    the one that it is built on. directory: on `host`. bytes, digest: of its files. addresses: that
    the host, or its network namespace, had. pid: of the root. dump_ms: from the start of criu until
    everything was dumped."""

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

    def to_text(self) -> str:
        value = asdict(self) | {"version": _VERSION, "network": self.network.to_json()}
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
        words = (record.id, record.parent, record.directory, record.host, record.digest, *addresses)
        numbers = (record.bytes, record.pid, record.dump_ms)
        if not all(isinstance(word, str) and len(word) <= _MAX_TEXT for word in words):
            raise ValueError("a text is none, or too long")
        if not all(type(number) is int and 0 <= number < 1 << 63 for number in numbers):
            raise ValueError("a number is none")
        if not record.directory.startswith("/") or ".." in record.directory.split("/"):
            raise ValueError(f"{record.directory!r} is no directory")
        if not re.fullmatch(r"[0-9a-f]{64}", record.digest):
            raise ValueError("the digest is none")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
        raise JobError(f"{whose}: its record cannot be used: {exc}") from exc
    return record


def seal_of(directory: Path) -> tuple[int, str]:
    """Size and digest of a dump. What the manifest has digests of is in it by name and size only.

    Raises OSError; ImageError for what is no ordinary file.
    """
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


def stamp_of(directory: Path) -> str:
    """Another one once one of a dump's files is another one, or was written to, by what the file
    system says: to tell it without reading them. Raises OSError."""
    found = hashlib.sha256()
    for name in sorted(os.listdir(directory)):
        if not _NOT_COVERED.fullmatch(name):
            file = (directory / name).lstat()
            facts = [name, file.st_ino, file.st_size, file.st_mtime_ns, file.st_ctime_ns]
            found.update(json.dumps(facts).encode() + b"\n")
    return found.hexdigest()


def make_durable(directory: Path) -> None:
    """All files of a dump, and their names. Raises OSError."""
    for entry in os.scandir(directory):
        if entry.is_file(follow_symlinks=False):
            descriptor = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
    for place in (directory, directory.parent):
        descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def identity_of(directory: Path) -> tuple[str, str]:
    """Id and parent's id of the checkpoint; empty: there is none. Of one that is sealed too."""
    if is_sealed(directory):
        return "", ""
    manifest = find_manifest(directory)
    if manifest is None:
        return "", ""
    parent = "" if manifest.parent_id == NO_PARENT else manifest.parent_id.hex()
    return manifest.checkpoint_id.hex(), parent


def require_same(record: DumpRecord) -> None:
    """The files are those that were committed. Raises JobError."""
    try:
        size, digest = seal_of(Path(record.directory))
    except (OSError, ImageError) as exc:
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
