# SPDX-License-Identifier: Apache-2.0
"""Control groups of a container that are frozen: that is what a runtime's pause does.

Source: the kernel's Documentation/admin-guide/cgroup-v1/freezer-subsystem.rst and cgroup-v2.rst.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
GROUPS = Path("/sys/fs/cgroup")
# File that says whether a group itself is frozen; file that changes it, and what to write there.
_V1 = ("freezer.self_freezing", "freezer.state", "THAWED")
_V2 = ("cgroup.freeze", "cgroup.freeze", "0")


def frozen_groups(container_id: str) -> list[Path]:
    """Directories of its groups that are frozen themselves, the uppermost first. container_id: the
    whole id, which is in the name of its group."""
    return [group for group in _groups(container_id) if _is_frozen(group)]


def thaw(group: Path) -> None:
    """Raises OSError."""
    _, change, value = _files(group)
    (group / change).write_text(value)


def _is_frozen(group: Path) -> bool:
    try:
        return (group / _files(group)[0]).read_text().strip() == "1"
    except OSError:
        return False  # it is gone


def _files(group: Path) -> tuple[str, str, str]:
    return _V1 if (group / _V1[0]).exists() else _V2


def _groups(container_id: str) -> list[Path]:
    """Those that its processes are in, and those between them and the one with its id."""
    found: dict[Path, None] = {}
    for entry in PROC.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            text = (entry / "cgroup").read_text(errors="surrogateescape")
        except OSError:
            continue  # it has ended
        for line in text.splitlines():
            _, controllers, path = line.split(":", 2)
            if container_id in path:
                found |= dict.fromkeys(_below(container_id, controllers.split(","), path))
    return sorted(found)


def _below(container_id: str, controllers: list[str], path: str) -> Iterator[Path]:
    if "freezer" in controllers:
        at = GROUPS / "freezer"
    elif controllers == [""]:
        at = GROUPS
    else:
        return
    inside = False
    for part in Path(path.lstrip("/")).parts:
        at /= part
        inside = inside or container_id in part
        if part == "..":  # not below the groups that this process sees
            return
        if inside:
            yield at
