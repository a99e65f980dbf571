# SPDX-License-Identifier: Apache-2.0
"""What an installation did to a host: one JSON file, written before anything is done.

It says what may be removed, so it is not trusted: it must be the administrator's own file, and may
name only files that some version of gpustasis installs.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from typing import Any

from gpustasis.errors import InstallError
from gpustasis.install.layout import BLOCK_PATHS, BUNDLE, COMMAND_PATHS, FILE_PATHS
from gpustasis.install.root import PART_SUFFIX, Root

RECORD = "/var/lib/gpustasis/install.json"
VERSION = 1
MAX_BYTES = 1 << 18
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")


@dataclass(frozen=True, slots=True)
class Before:
    """A file as it was before our block was put into it. mtime_ns: since 1970."""

    sha256: str
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One file.

    block: our lines in a file that may be somebody else's; otherwise the file is ours.
    ours: the SHA-256 of what is or was to be put there, in hexadecimal: two during an upgrade.
    before: of a block, the file without it; None: there was none.
    """

    path: str
    block: bool
    ours: tuple[str, ...]
    before: Before | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """gpustasis: the version that wrote it. directories: those that were made, parents first.

    bundle: the SHA-256 of the list of files of the tree that was put there: none, if it was not;
    two during an upgrade.
    """

    gpustasis: str
    directories: tuple[str, ...]
    entries: tuple[Entry, ...]
    bundle: tuple[str, ...] = ()

    def entry(self, path: str) -> Entry | None:
        return next((entry for entry in self.entries if entry.path == path), None)


def load(root: Root) -> Record | None:
    """The record of this root; None: nothing is installed. Raises InstallError if it is unfit."""
    try:
        found = root.read(RECORD, MAX_BYTES)
    except OSError as exc:
        raise InstallError(f"cannot read {RECORD}: {exc.strerror}; run it as root") from exc
    if found is None:
        return None
    if found.status.st_uid not in (0, os.geteuid()) or found.status.st_mode & 0o022:
        raise InstallError(
            f"the record {RECORD} is refused: others than user {os.geteuid()} can write to it; "
            "nothing was changed"
        )
    try:
        return _record(json.loads(found.data))
    except (ValueError, TypeError, KeyError, RecursionError) as exc:
        raise InstallError(
            f"the record {RECORD} is damaged ({type(exc).__name__}: {exc}); nothing was changed"
        ) from exc


def store(root: Root, record: Record) -> None:
    """Write it in one step. Where directories are missing, they appear with it in them."""
    body = (json.dumps(_json(record), indent=2) + "\n").encode()
    missing = root.missing_directories(RECORD)
    if not missing:
        root.write(RECORD, body, 0o600)
        return
    top = missing[0]
    for directory in missing:
        root.make_directory(_staged(directory, top))
    root.write(_staged(RECORD, top), body, 0o600)
    root.rename(_staged(top, top), top)


def discard(root: Root, record: Record) -> None:
    """Remove it in one step, with those of its directories that were made and hold nothing else."""
    top = ""
    name = RECORD
    while True:
        parent, _, last = name.rpartition("/")
        if parent not in record.directories or root.listing(parent) != [last]:
            break
        top = name = parent
    if not top:
        root.remove(RECORD)
        return
    root.rename(top, _staged(top, top))
    clean(root)


def clean(root: Root) -> None:
    """Remove what a killed store() or discard() has left."""
    root.remove_part(RECORD)
    top = RECORD.rpartition("/")[0]
    while top:
        path = _staged(RECORD, top)
        root.remove_part(path)
        root.remove(path)
        while path != _staged(top, top):
            path = path.rpartition("/")[0]
            root.remove_directory(path)
        top = top.rpartition("/")[0]


def _staged(path: str, top: str) -> str:
    """Where `path`, below the directory `top`, lies while `top` is not in place."""
    parent, _, name = top.rpartition("/")
    return f"{parent}/.{name}{PART_SUFFIX}{path[len(top) :]}"


def _json(record: Record) -> dict[str, Any]:
    return {
        "version": VERSION,
        "gpustasis": record.gpustasis,
        "directories": list(record.directories),
        "bundle": list(record.bundle),
        "files": [
            {
                "path": entry.path,
                "block": entry.block,
                "ours": list(entry.ours),
                "before": None
                if entry.before is None
                else {"sha256": entry.before.sha256, "mtime_ns": entry.before.mtime_ns},
            }
            for entry in record.entries
        ],
    }


def _record(raw: Any) -> Record:
    _expect(isinstance(raw, dict), "it is not an object")
    _expect(
        raw["version"] == VERSION, f"version {raw['version']!r}, this gpustasis reads {VERSION}"
    )
    for key, kind in (("gpustasis", str), ("directories", list), ("files", list)):
        _expect(isinstance(raw[key], kind), f"{key!r} is not as expected")
    bundle = raw.get("bundle", [])  # earlier ones know of none
    _hashes(bundle, "bundle")
    known = {*BLOCK_PATHS, *FILE_PATHS, *COMMAND_PATHS, RECORD, BUNDLE}
    for directory in raw["directories"]:
        _expect(isinstance(directory, str), "a directory is not a string")
        _expect(
            any(path.startswith(f"{directory}/") for path in known) and directory != "",
            f"gpustasis makes no directory {directory!r}",
        )
    entries = tuple(_entry(item) for item in raw["files"])
    _expect(len({entry.path for entry in entries}) == len(entries), "a file stands twice")
    return Record(raw["gpustasis"], tuple(raw["directories"]), entries, tuple(bundle))


def _entry(raw: Any) -> Entry:
    _expect(isinstance(raw, dict), "a file is not an object")
    path, block, ours, before = (raw[key] for key in ("path", "block", "ours", "before"))
    _expect(isinstance(block, bool), "'block' is not a boolean")
    allowed = BLOCK_PATHS if block else FILE_PATHS.union(COMMAND_PATHS)
    _expect(path in allowed, f"gpustasis installs no {'block in' if block else 'file'} {path!r}")
    _hashes(ours, "ours")
    if before is None:
        return Entry(path, block, tuple(ours))
    _expect(block and isinstance(before, dict), "'before' is not as expected")
    sha256, mtime_ns = before["sha256"], before["mtime_ns"]
    _expect(isinstance(sha256, str) and _SHA256.match(sha256) is not None, "no SHA-256")
    _expect(type(mtime_ns) is int and 0 <= mtime_ns < 1 << 63, "'mtime_ns' is out of range")
    return Entry(path, block, tuple(ours), Before(sha256, mtime_ns))


def _hashes(raw: Any, name: str) -> None:
    _expect(isinstance(raw, list), f"{name!r} is not a list")
    _expect(all(isinstance(one, str) and _SHA256.match(one) for one in raw), "no SHA-256")


def _expect(condition: bool, otherwise: str) -> None:
    if not condition:
        raise ValueError(otherwise)
