# SPDX-License-Identifier: Apache-2.0
"""Control groups of a container that are frozen: that is what a runtime's pause does.

Source: the kernel's Documentation/admin-guide/cgroup-v1/freezer-subsystem.rst and cgroup-v2.rst;
names of groups: CRI-O 1.36, internal/config/cgmgr; crun puts tasks one below, into `container`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from gpustasis.errors import EngineError

PROC = Path("/proc")
GROUPS = Path("/sys/fs/cgroup")
# File that says whether a group itself is frozen; file that changes it, and what to write there.
_V1 = ("freezer.self_freezing", "freezer.state", "THAWED")
_V2 = ("cgroup.freeze", "cgroup.freeze", "0")
_CONTAINER = re.compile(r"(?:crio-)?([0-9a-f]{64})(?:\.scope)?")
_BELOW = "container"


def frozen_groups(container_id: str) -> list[Path]:
    """Directories of its groups that are frozen themselves, the uppermost first. What the
    container has made below them is its own matter.

    Raises EngineError if none of its groups is seen from here.
    """
    groups = _groups(container_id)
    if not groups:
        raise EngineError(
            f"no control group of container {container_id} is seen below {GROUPS}: whether the "
            "container is paused cannot be told from here; ask on the node itself"
        )
    return [group for group in groups if _is_frozen(group)]


def thaw(group: Path) -> None:
    """Raises EngineError."""
    _, change, value = _files(group)
    try:
        (group / change).write_text(value)
    except OSError as exc:
        raise EngineError(f"cannot write {value} to {group / change}: {exc.strerror}") from exc


def _is_frozen(group: Path) -> bool:
    try:
        return (group / _files(group)[0]).read_text().strip() == "1"
    except FileNotFoundError:
        return False  # it is gone
    except OSError as exc:
        raise EngineError(f"cannot read {group / _files(group)[0]}: {exc.strerror}") from exc


def _files(group: Path) -> tuple[str, str, str]:
    return _V1 if (group / _V1[0]).exists() else _V2


def _groups(container_id: str) -> list[Path]:
    """Those of the container that its processes are in, as far as they are seen from here."""
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
            found |= dict.fromkeys(_of_container(container_id, controllers.split(","), path))
    return sorted(group for group in found if group.is_dir())


def _of_container(container_id: str, controllers: list[str], path: str) -> Iterator[Path]:
    """The group of that container on this path, and crun's below it. A group that another container
    has made within itself is not meant, whatever it is called."""
    if "freezer" in controllers:
        at = GROUPS / "freezer"
    elif controllers == [""]:
        at = GROUPS
    else:
        return
    parts = Path(path.lstrip("/")).parts
    for number, part in enumerate(parts):
        at /= part
        if (named := _CONTAINER.fullmatch(part)) is None:
            continue
        if named[1] == container_id:
            yield at
            if parts[number + 1 : number + 2] == (_BELOW,):
                yield at / _BELOW
        return
