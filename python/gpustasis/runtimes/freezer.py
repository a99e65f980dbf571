# SPDX-License-Identifier: Apache-2.0
"""Control groups of a container that are frozen: that is what a runtime's pause does.

Source: the kernel's Documentation/admin-guide/cgroup-v1/freezer-subsystem.rst and cgroup-v2.rst;
names of groups: CRI-O 1.36, internal/config/cgmgr; containerd 2.1, internal/cri/server/helpers.go;
crun puts tasks one below, into `container`.
"""

from __future__ import annotations

import errno
import math
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

from gpustasis.errors import EngineError

GROUPS = Path("/sys/fs/cgroup")
# File that says whether a group itself is frozen; file that changes it, and what to write there.
_V1 = ("freezer.self_freezing", "freezer.state", "THAWED")
_V2 = ("cgroup.freeze", "cgroup.freeze", "0")
# What is written to freeze it; file that says whether all tasks stand, and the line that says so.
_FREEZES = {_V1: ("FROZEN", "freezer.state", "FROZEN"), _V2: ("1", "cgroup.events", "frozen 1")}
_GONE = (errno.ENOENT, errno.ENODEV)
_FROZEN_S = 10.0
_TRIES = 4  # how often a runtime is asked for a checkpoint if it cannot freeze the container
_PAUSE_S = 0.5  # before the second one; twice as long before the third one, ...
_TICK_S = 0.1
TOO_BUSY = (
    f"it was asked up to {_TRIES} times. Nothing was dumped, and the container runs on: the node "
    "is too busy to freeze all of its tasks"
)
_POLL_S = 0.01
_AFTER_PAUSE = re.compile(
    r"failed to (checkpoint|write config dumps for|write file system changes of) container "
    r"|reached waiting for the cgroup to freeze"
    r'|expected "cgroup.freeze" to be in state'
)
_CONTAINER = re.compile(r"(?:crio-|cri-containerd-)?([0-9a-f]{64})(?:\.scope)?")
_BELOW = "container"


def was_not_frozen(error: str) -> bool:
    """Whether a runtime says that runc could not freeze a container for its checkpoint. Nothing was
    dumped then, and the container runs on. With cgroup v1 runc gives up after about a quarter of a
    second, and on a busy node some of many tasks get no processor within that time. Source:
    opencontainers/cgroups 0.0.4, fs/freezer.go."""
    return "unable to freeze" in error


def may_be_left_paused(error: str) -> bool:
    """Whether a runtime says that a checkpoint has failed for which it has paused the container,
    and may not have resumed it.

    CRI-O does so only if its runtime says that the container is paused. With cgroup v1 crun says so
    once all tasks stand; on a busy node, or if the checkpoint fails at once, CRI-O has asked before
    that. With cgroup v2 runc gives up after 10 s if they do not, and leaves them to freeze later.
    Source: CRI-O 1.36, internal/lib/checkpoint.go; crun 1.28, src/libcrun/cgroup.c;
    opencontainers/cgroups 0.0.6 (runc 1.3), fs2/freezer.go."""
    return _AFTER_PAUSE.search(error) is not None


class Tries:
    """To have a container checkpointed by a runtime within timeout_s, more than once if it cannot
    be frozen. left_s: of that time, for the next one."""

    def __init__(self, timeout_s: int) -> None:
        self._timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s
        self._count = 1
        self.left_s = timeout_s

    def again(self, stop: Callable[[], bool] = lambda: False) -> bool:
        """After one that could not freeze it, and a pause: whether to ask once more. Not with less
        than half of the time: a dump that is cut off for want of time can leave the container
        paused. stop: asked again and again whether to end the pause; also then it is False."""
        goes_on = time.monotonic() + _PAUSE_S * self._count
        self.left_s = math.floor(self._end - goes_on)
        if self._count == _TRIES or self.left_s < max(self._timeout_s / 2, 1):
            return False
        while (left := goes_on - time.monotonic()) > 0:
            if stop():
                return False
            time.sleep(min(left, _TICK_S))
        self._count += 1
        return not stop()


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
    """Of a group that has gone, nothing stands still. Raises EngineError."""
    _, change, value = _files(group)
    try:
        (group / change).write_text(value)
    except OSError as exc:
        if exc.errno not in _GONE:
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
    except OSError as exc:
        if exc.errno in _GONE:
            return False
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
