# SPDX-License-Identifier: Apache-2.0
"""Control groups of a container that are frozen: that is what a runtime's pause does.

Source: the kernel's Documentation/admin-guide/cgroup-v1/freezer-subsystem.rst and cgroup-v2.rst;
names of groups: CRI-O 1.36, internal/config/cgmgr; containerd 2.1, internal/cri/server/helpers.go;
crun puts tasks one below, into `container`.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from gpustasis.errors import EngineError

GROUPS = Path("/sys/fs/cgroup")
# File that says whether a group itself is frozen; file that changes it, and what to write there.
_V1 = ("freezer.self_freezing", "freezer.state", "THAWED")
_V2 = ("cgroup.freeze", "cgroup.freeze", "0")
# What is written to freeze it; file that says whether all tasks stand, and the line that says so.
_FREEZES = {_V1: ("FROZEN", "freezer.state", "FROZEN"), _V2: ("1", "cgroup.events", "frozen 1")}
_FROZEN_S = 10.0
_TRIES = 4  # how often a runtime is asked for a checkpoint if it cannot freeze the container
_PAUSE_S = 0.5  # before the second one; twice as long before the third one, ...
TOO_BUSY = (
    f"it was asked up to {_TRIES} times. Nothing was dumped, and the container runs on: the node "
    "is too busy to freeze all of its tasks"
)
_POLL_S = 0.01
_CONTAINER = re.compile(r"(?:crio-|cri-containerd-)?([0-9a-f]{64})(?:\.scope)?")
_BELOW = "container"


def was_not_frozen(error: str) -> bool:
    """Whether a runtime says that runc could not freeze a container for its checkpoint. Nothing was
    dumped then, and the container runs on. With cgroup v1 runc gives up after about a quarter of a
    second, and on a busy node some of many tasks get no processor within that time. Source:
    opencontainers/cgroups 0.0.4, fs/freezer.go."""
    return "unable to freeze" in error


def tries(timeout_s: int) -> Iterator[tuple[int, bool]]:
    """For each time that a runtime may be asked for a checkpoint of a container that it could not
    freeze: how many seconds are left of its time, and whether this is the last one. The first one
    is at once, a pause is before each of the others."""
    end = time.monotonic() + timeout_s
    left_s = timeout_s
    for number in range(1, _TRIES + 1):
        after_s = math.floor(end - time.monotonic() - _PAUSE_S * number)
        is_last = number == _TRIES or after_s < 1
        yield left_s, is_last
        if is_last:
            return
        time.sleep(_PAUSE_S * number)
        left_s = max(math.floor(end - time.monotonic()), 1)


def frozen_groups(container_id: str) -> list[Path]:
    """Directories of its groups that are frozen themselves, the uppermost first. What the
    container has made below them is its own matter.

    Raises EngineError if none of its groups is seen from here.
    """
    groups = groups_by_container().get(container_id)
    if not groups:
        raise EngineError(
            f"no control group of container {container_id} is seen below {GROUPS}: whether the "
            "container is paused cannot be told from here; ask on the node itself"
        )
    return [group for group in groups if is_frozen(group)]


def thaw(group: Path) -> None:
    """Raises EngineError."""
    _, change, value = _files(group)
    try:
        (group / change).write_text(value)
    except OSError as exc:
        raise EngineError(f"cannot write {value} to {group / change}: {exc.strerror}") from exc


def freeze(group: Path) -> None:
    """Until its tasks stand. Raises EngineError, also if they do not within a while."""
    files = _files(group)
    value, state, line = _FREEZES[files]
    deadline = time.monotonic() + _FROZEN_S
    try:
        (group / files[1]).write_text(value)
        while line not in (group / state).read_text().splitlines():
            if time.monotonic() > deadline:
                raise EngineError(f"tasks of {group} do not freeze")
            time.sleep(_POLL_S)
    except OSError as exc:
        raise EngineError(f"cannot freeze {group}: {exc.strerror}") from exc


def is_frozen(group: Path) -> bool:
    """Whether a group is, itself. Raises EngineError."""
    try:
        return (group / _files(group)[0]).read_text().strip() == "1"
    except FileNotFoundError:
        return False  # it is gone
    except OSError as exc:
        raise EngineError(f"cannot read {group / _files(group)[0]}: {exc.strerror}") from exc


def _files(group: Path) -> tuple[str, str, str]:
    return _V1 if os.path.exists(group / _V1[0]) else _V2  # Path.exists raises for a long name


def groups_by_container() -> dict[str, list[Path]]:
    """Directories of containers' groups by the containers' ids, crun's one below included, the
    uppermost first. They are found by their names: the paths in /proc/PID/cgroup mean nothing to
    who is in a cgroup namespace of his own, as in a pod. A group that a container has made within
    its own is not meant, whatever it is called; nor one that another user has made where he may,
    and could freeze."""
    found: dict[str, list[Path]] = {}
    todo = [GROUPS / "freezer" if (GROUPS / "freezer").is_dir() else GROUPS]
    while todo:
        for entry in _directories(todo.pop()):
            if (named := _CONTAINER.fullmatch(entry.name)) is None:
                todo.append(entry)
                continue
            below = [one for one in _directories(entry) if one.name == _BELOW]
            groups = [one for one in (entry, *below) if _is_root_s(one)]
            if groups:
                found.setdefault(named[1], []).extend(groups)
    return found


def _is_root_s(group: Path) -> bool:
    """Whether only root, or this user, can freeze it. The directory itself may belong to the
    container's user: runtimes hand it over, but not this file."""
    try:
        return os.stat(group / _files(group)[1]).st_uid in (0, os.geteuid())
    except OSError:
        return False  # it has gone


def _directories(group: Path) -> list[Path]:
    try:
        with os.scandir(group) as found:
            return [Path(one.path) for one in found if one.is_dir(follow_symlinks=False)]
    except OSError:
        return []  # it has gone
