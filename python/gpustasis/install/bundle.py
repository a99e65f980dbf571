# SPDX-License-Identifier: Apache-2.0
"""gpustasis itself with a Python of its own, at /opt/gpustasis, for hosts that have none.

packaging/bundle.py makes such a tree. The Debian package and the image hold it; from the image it
is copied to the host. Its list names every file with mode and hash, and the record of an
installation holds the list's hash. So it can be told which files are ours and which are not.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from dataclasses import dataclass, field
from pathlib import Path

from gpustasis.errors import InstallError
from gpustasis.install.change import Action, Change, digest
from gpustasis.install.layout import BUNDLE as PLACE
from gpustasis.install.layout import packages
from gpustasis.install.root import PART_SUFFIX, Root

SOURCE = Path(PLACE)  # the tree that this program runs from, if it runs from one
LIST = "files.json"
_PART = f"/opt/.gpustasis{PART_SUFFIX}"  # a new tree until it is whole; an old one until it is gone
_MAX_LIST = 4 << 20  # bytes
_MODES = {"644": 0o644, "755": 0o755}
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_SHOWN = 5
_SPARE = 16 << 20  # bytes that must be left free


@dataclass(frozen=True, slots=True)
class Bundle:
    """What a list says. gpustasis: its version. sha256: of the list. files: path within the tree ->
    mode, SHA-256."""

    gpustasis: str
    sha256: str
    files: dict[str, tuple[int, str]]

    def directories(self) -> set[str]:
        """Of the tree, without itself."""
        found = set[str]()
        for name in self.files:
            while name := name.rpartition("/")[0]:
                found.add(name)
        return found


def own(root: Root) -> Bundle | None:
    """The tree that this program runs from, to be put into the root too. None: it runs from none,
    or the root's is this one.

    Raises InstallError if its list is damaged.
    """
    if sys.prefix != PLACE or packages() != f"{PLACE}/packages":
        return None
    there = root.directory / PLACE[1:]
    if there.exists() and os.path.samefile(there, PLACE):
        return None
    return parse((SOURCE / LIST).read_bytes())


def parse(data: bytes) -> Bundle:
    """A list. Raises InstallError if it is none, or if a name in it leads out of the tree."""
    try:
        raw = json.loads(data)
        version, files = raw["gpustasis"], raw["files"]
        if not isinstance(version, str):
            raise TypeError("its version is no text")
        found = {name: (_MODES[mode], sha256) for name, (mode, sha256) in files.items()}
        for name, (_, sha256) in found.items():
            if not all(part not in ("", ".", "..") for part in name.split("/")) or "\0" in name:
                raise ValueError(f"{name!r} is no name within it")
            if not _SHA256.match(sha256):
                raise ValueError(f"{name}: no SHA-256")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
        raise InstallError(f"{LIST} of {PLACE} is damaged ({type(exc).__name__}: {exc})") from exc
    return Bundle(version, digest(data), found)


def plan(root: Root, wanted: Bundle, recorded: tuple[str, ...]) -> Change:
    """What is to be done for the tree.

    recorded: hashes of lists of ours. Raises InstallError if somebody else's is there, if one of
    ours holds files that would be lost, or if there is too little room.
    """
    change = Change(PLACE, Action.CREATE, f"gpustasis {wanted.gpustasis} with its Python")
    status = root.status(PLACE)
    if status is not None:
        found = installed(root, recorded) if stat.S_ISDIR(status.st_mode) else None
        if found is None:
            raise InstallError(
                f"{PLACE} is there already, and no installation by this command put it there: "
                "remove it, or the package that it belongs to"
            )
        there = _compare(root, found)
        if there.foreign:
            raise InstallError(
                f"{PLACE} holds {_shown(there.foreign)}, which gpustasis has not put there; move "
                "that elsewhere"
            )
        if found.sha256 == wanted.sha256 and there == _Comparison():
            return Change(PLACE, Action.UNCHANGED)
        note = f"gpustasis {found.gpustasis} with {wanted.gpustasis}"
        change = Change(PLACE, Action.REPLACE, note)
    needed = sum((SOURCE / name).stat().st_size for name in wanted.files)
    if (free := root.free_bytes(PLACE)) < needed + _SPARE:
        raise InstallError(f"{PLACE} needs {needed >> 20} MiB, and {free >> 20} MiB are free there")
    return change


def put(root: Root, wanted: Bundle) -> None:
    """Copy this program's tree there, in place of one of ours, in one step.

    Raises InstallError if a file here is not as the list says; OSError. Nothing of it is left then.
    """
    discard_part(root)
    try:
        _copy(root, wanted)
        if root.exists(PLACE):
            root.exchange(_PART, PLACE)
        else:
            root.rename(_PART, PLACE)
    finally:
        discard_part(root)


def _copy(root: Root, wanted: Bundle) -> None:
    root.make_directory(_PART, new=True)
    for name in sorted(wanted.directories()):  # parents first
        root.make_directory(f"{_PART}/{name}", new=True)
    for name, (mode, sha256) in wanted.files.items():
        data = (SOURCE / name).read_bytes()
        if digest(data) != sha256:
            raise InstallError(f"{SOURCE}/{name} was changed since it was made; get it anew")
        root.write(f"{_PART}/{name}", data, mode, durable=False)
    root.write(f"{_PART}/{LIST}", (SOURCE / LIST).read_bytes(), 0o644, durable=False)
    root.sync(_PART)


def discard_part(root: Root) -> None:
    """Remove what a killed put() or remove() has left."""
    if root.status(_PART) is not None:
        root.remove_tree(_PART)


def remove(root: Root, recorded: tuple[str, ...], dry_run: bool) -> Change:
    """Take it off again, in one step, unless there are files in it that are not ours, or were
    changed since."""
    if not dry_run:
        discard_part(root)
    status = root.status(PLACE)
    if status is None:
        return Change(PLACE, Action.SKIP, "it is not there")
    found = installed(root, recorded) if stat.S_ISDIR(status.st_mode) else None
    if found is None:
        text = f"it has another {LIST} than the one that was installed; remove it yourself"
        return Change(PLACE, Action.KEEP, text)
    there = _compare(root, found)
    if theirs := [*there.changed, *there.foreign]:
        text = f"{_shown(theirs)}: not ours, or changed since; remove {PLACE} yourself"
        return Change(PLACE, Action.KEEP, text)
    if not dry_run:
        root.rename(PLACE, _PART)
        discard_part(root)
    return Change(PLACE, Action.REMOVE)


def installed(root: Root, recorded: tuple[str, ...]) -> Bundle | None:
    """The tree that is there, if its list is one of these."""
    found = root.read(f"{PLACE}/{LIST}", _MAX_LIST)
    if found is None or digest(found.data) not in recorded:
        return None
    return parse(found.data)


@dataclass(slots=True)
class _Comparison:
    """Names within a tree. foreign: what its list does not know. changed: files with other content.
    wrong: what is missing, or has another mode or owner."""

    foreign: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def _compare(root: Root, bundle: Bundle) -> _Comparison:
    there = root.survey(PLACE)
    wanted = {**dict.fromkeys(bundle.directories(), 0o755), LIST: 0o644}
    wanted |= {name: mode for name, (mode, _) in bundle.files.items()}
    result = _Comparison(foreign=[name for name in there if name not in wanted])
    for name, mode in wanted.items():
        status = there.get(name)
        is_file = name in bundle.files or name == LIST
        if status is None:
            result.wrong.append(name)
        elif not (stat.S_ISREG if is_file else stat.S_ISDIR)(status.st_mode):
            result.foreign.append(name)
        elif stat.S_IMODE(status.st_mode) != mode or status.st_uid not in (0, os.geteuid()):
            result.wrong.append(name)
    for name, (_, sha256) in bundle.files.items():
        if name in there and name not in result.foreign:
            data = root.read(f"{PLACE}/{name}")
            if data is not None and digest(data.data) != sha256:
                result.changed.append(name)
    return result


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(sorted(names)[:_SHOWN]) + more
