"""Mounts of a container that its config.json does not speak of: CRIU cannot put them back."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# File systems of which CRIU makes a new one by itself where the mount shows all of it.
_MADE_ANEW = {
    *("proc", "sysfs", "tmpfs", "devpts", "mqueue", "devtmpfs", "cgroup", "cgroup2"),
    *("debugfs", "tracefs", "securityfs", "fusectl", "configfs", "pstore", "binfmt_misc"),
}


@dataclass(frozen=True, slots=True)
class Mount:
    """root: what of the file system is mounted, "/": all. point: where, in the container."""

    root: str
    point: str
    kind: str
    source: str


def read_mounts(pid: int) -> list[Mount]:
    """The mounts that a process sees; proc(5), /proc/PID/mountinfo."""
    found = []
    for line in Path(f"/proc/{pid}/mountinfo").read_text(errors="replace").splitlines():
        own, _, filesystem = line.partition(" - ")
        words, kind = own.split(" "), filesystem.split(" ")
        if len(words) >= 6 and len(kind) >= 2:
            found.append(Mount(_plain(words[3]), _plain(words[4]), kind[0], _plain(kind[1])))
    return found


def unknown(mounts: list[Mount], config: dict[str, Any]) -> list[Mount]:
    """Those that came from elsewhere after the container's configuration was written."""
    linux = _object(config.get("linux"))
    points = {"/", "/dev/console"}
    points |= {_path(item.get("path")) for item in _objects(linux.get("devices"))}
    for key in ("maskedPaths", "readonlyPaths"):
        listed = linux.get(key)
        points |= {_path(item) for item in listed} if isinstance(listed, list) else set()
    groups = []
    for item in _objects(config.get("mounts")):
        point = _path(item.get("destination"))
        points.add(point)
        if item.get("type") in ("cgroup", "cgroup2"):
            groups.append(point)
    return [
        mount
        for mount in mounts
        if mount.point not in points
        and not any(mount.point.startswith(f"{group}/") for group in groups)
        and (mount.root != "/" or mount.kind not in _MADE_ANEW)
    ]


def _plain(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _path(value: object) -> str:
    """As mountinfo has it: links that everybody has are followed."""
    text = str(value).rstrip("/") or "/"
    return re.sub(r"^/var/run(?=/|$)", "/run", text)


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _objects(value: object) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
