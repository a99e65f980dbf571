# SPDX-License-Identifier: Apache-2.0
"""Whether the files that a checkpoint's processes had mapped are still what they were."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpustasis._core import FilePlace, RequiredFile, Requirements, file_difference, identity_text
from gpustasis.diagnosis import Finding, note, ok, problem
from gpustasis.text import plural

_LONGEST_PATH = 4096  # bytes, PATH_MAX of linux/limits.h
_NAME = "mapped files"
_ROOT = "root file system"
_SHOWN = 5
_REMEDY = (
    "put back what was there when the checkpoint was made, or restore all the same with "
    'requirements = "ignore" (gpustasis restore --ignore-requirements)'
)


@dataclass(slots=True)
class _Compared:
    """same: files that are as they were. different: a sentence each. absent: missing in the root
    file system, which the container may have made itself. engine: those that the engine or CRIU
    makes anew. root: of the container's root file system, which was not named. inner: of mount
    namespaces within."""

    same: int = 0
    different: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    engine: int = 0
    root: int = 0
    inner: int = 0


def check(
    requirements: Requirements | None,
    mounts: Mapping[str, str | None],
    rootfs: Path | None,
    *,
    has_changes: bool,
) -> Iterator[Finding]:
    """Compare the recorded files with those of this host.

    mounts: what the container has mounted, by its place there: a path of the host; None: nothing
    of the host. rootfs: an unpacked root file system of the container's image; None: not at hand.
    has_changes: the container has made files of its own, which rootfs need not have.
    """
    if requirements is None:
        yield note(_NAME, "not recorded: an older gpustasis made it; CRIU compares sizes")
        return
    done = _Compared()
    for file in requirements.files:
        if file.place == FilePlace.HOST:
            _compare(done, file, Path("/"), file.path, has_changes=False)
        elif file.place == FilePlace.INNER:
            done.inner += 1
        else:
            _compare_inside(done, file, mounts, rootfs, has_changes=has_changes)
    yield from _findings(done, requirements.unrecorded)


def mounts_of(spec: bytes | None) -> dict[str, str | None]:
    """What a container has mounted, from its OCI configuration, for check. Raises ValueError if
    that is none."""
    if spec is None:
        return {}
    try:
        mounts: list[dict[str, Any]] = json.loads(spec).get("mounts") or []
        return {mount["destination"].rstrip("/"): _source(mount) for mount in mounts}
    except (AttributeError, KeyError, TypeError, RecursionError) as exc:
        raise ValueError(repr(exc)) from exc


def _source(mount: Mapping[str, Any]) -> str | None:
    options = mount.get("options") or []
    is_bind = mount.get("type") == "bind" or "bind" in options or "rbind" in options
    source = mount.get("source")
    if not is_bind or not isinstance(source, str) or not source.startswith("/"):
        return None
    # Python would take a surrogate for a byte, and another file would be compared.
    if "\0" in source or len(source.encode()) >= _LONGEST_PATH:
        raise ValueError(f"a mount of {source!r}, which is no path")
    return source


def _compare_inside(
    done: _Compared,
    file: RequiredFile,
    mounts: Mapping[str, str | None],
    rootfs: Path | None,
    *,
    has_changes: bool,
) -> None:
    above = [place for place in mounts if file.path == place or file.path.startswith(f"{place}/")]
    if above:
        place = max(above, key=len)
        source = mounts[place]
        if source is None:
            done.engine += 1
        else:
            _compare(done, file, Path("/"), source + file.path[len(place) :], has_changes=False)
    elif rootfs is None:
        done.root += 1
    else:
        _compare(done, file, rootfs, file.path, has_changes=has_changes)


def _compare(
    done: _Compared, file: RequiredFile, root: Path, path: str, *, has_changes: bool
) -> None:
    try:
        found = file_difference(root, path, file)
    except (OSError, ValueError) as exc:  # such as a name that is too long
        found = f"cannot be compared ({exc})"
    if found is None:
        done.same += 1
    elif found == "is missing" and has_changes:
        done.absent.append(file.path)
    else:
        where = file.path if path == file.path else f"{file.path} (here {path})"
        done.different.append(f"{where} {found}; expected: {identity_text(file)}")


def _findings(done: _Compared, unrecorded: int) -> Iterator[Finding]:
    left = [
        (done.engine, "which the engine or CRIU makes anew"),
        (done.inner, "of mount namespaces within"),
        (unrecorded, "which the dump could not record"),
    ]
    skipped = ", ".join(f"{count} {what}" for count, what in left if count)
    rest = f"; not compared: {skipped}" if skipped else ""
    if done.different:
        more = len(done.different) - _SHOWN
        shown = "; ".join(done.different[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")
        yield problem(_NAME, shown + rest, _REMEDY)
    elif done.same:
        yield ok(_NAME, f"{plural(done.same, 'file')} as at the dump{rest}")
    elif rest:
        yield note(_NAME, f"none compared{rest}")
    if done.absent:
        more = len(done.absent) - _SHOWN
        shown = ", ".join(done.absent[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
        text = f"{shown} missing in it; the checkpoint's own changes may bring them"
        yield note(_ROOT, text, "name one that is of the same image, with these changes")
    if done.root:
        text = f"{plural(done.root, 'mapped file')} in it not compared"
        yield note(_ROOT, text, "name a copy of it, unpacked: --rootfs DIR")
