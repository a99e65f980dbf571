# SPDX-License-Identifier: Apache-2.0
"""A container that runs on this host, found by what people call it, and its mounts."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from shutil import which
from typing import Any

from gpustasis import process
from gpustasis.errors import CheckpointError

PROC = Path("/proc")
_TIMEOUT_S = 30.0
_LARGEST = 16 << 20  # bytes of a config.json
_ID = re.compile(r"[0-9a-f]{12,64}")
_MONITOR = "crio-conmon-"  # the group of CRI-O's conmon has the container's id too
_BUNDLES = (  # of containers that are found by their control group: containerd's and CRI-O's
    "/run/containerd/io.containerd.runtime.v2.task/*/{}*",
    "/run/containers/storage/overlay-containers/{}*/userdata",
    "/var/lib/containers/storage/overlay-containers/{}*/userdata",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """init: its first process. tasks: all its processes, in the order of their pids. group: its
    path in the control group hierarchy that its runtime freezes. config: config.json, as it was
    made from; None: it was not found. resume: of one of a Kubernetes pod, the command that lets it
    run on if its runtime has left it paused."""

    name: str
    init: int
    tasks: tuple[int, ...]
    group: str
    config: dict[str, Any] | None
    resume: str = ""


def find_container(name: str, environ: Mapping[str, str]) -> Container:
    """name: Podman's name, an id of runc or crun, at least 12 hex digits of an id that a control
    group carries.

    Raises CheckpointError if no running container is meant, or several are.
    """
    path = environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
    for ask in (_podman, _runtime):
        found = ask(name, path)
        if found is not None:
            init, config = found
            break
    else:
        if not _ID.fullmatch(name):
            raise CheckpointError(
                f"no container {name!r} was found: neither Podman, runc nor crun knows it, and it "
                "is no id of 12 hex digits or more"
            )
        init, config = _by_group(name)
    if init <= 0 or not (PROC / str(init)).exists():
        raise CheckpointError(f"container {name!r} does not run")
    group = freezer_group(init)
    return Container(
        name=name,
        init=init,
        tasks=tuple(_tasks(init, group)),
        group=group,
        config=_read_config(config),
    )


def freezer_group(pid: int) -> str:
    """The path of its control group, in the freezer's hierarchy or the unified one."""
    paths = {}
    for line in (PROC / str(pid) / "cgroup").read_text(errors="surrogateescape").splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            paths[controller] = path
    return paths.get("freezer", paths.get("", "/"))


def _podman(name: str, path: str) -> tuple[int, Path | None] | None:
    program = which("podman", path=path)
    if program is None:
        return None
    found = _json([program, "container", "inspect", "--", name])
    if not isinstance(found, list) or len(found) != 1:
        return None
    config = found[0].get("OCIConfigPath")
    return int(found[0]["State"]["Pid"]), Path(config) if config else None


def _runtime(name: str, path: str) -> tuple[int, Path | None] | None:
    for runtime in ("runc", "crun"):
        program = which(runtime, path=path)
        if program is None or name.startswith("-"):
            continue
        found = _json([program, "state", name])
        if isinstance(found, dict) and "pid" in found:
            return int(found["pid"]), Path(found.get("bundle", "/")) / "config.json"
    return None


def _by_group(name: str) -> tuple[int, Path | None]:
    """The first process of the one control group with such an id."""
    groups: dict[str, list[int]] = {}
    for pid in _pids():
        try:
            group = freezer_group(pid)
        except (OSError, ValueError):
            continue  # it has ended
        parts = [part for part in group.split("/") if not part.startswith(_MONITOR)]
        last = next((part for part in reversed(parts) if name in part), None)
        if last is not None and (found := re.search(rf"{name}[0-9a-f]*", last)):
            groups.setdefault(found[0], []).append(pid)
    if not groups:
        raise CheckpointError(f"no process is in a control group with {name} in its name")
    if len(groups) > 1:
        raise CheckpointError(f"{name!r} can be any of {', '.join(sorted(groups))}")
    ((identity, pids),) = groups.items()
    for pattern in _BUNDLES:
        for bundle in Path("/").glob(pattern.format(identity)[1:]):
            if (bundle / "config.json").exists():
                return _first(pids), bundle / "config.json"
    return _first(pids), None


def _first(pids: list[int]) -> int:
    """The one whose parent is not among them."""
    return next((pid for pid in pids if _parent(pid) not in pids), pids[0])


def _parent(pid: int) -> int:
    try:
        stat = (PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return 0
    return int(stat[stat.rindex(")") + 2 :].split()[1])


def _tasks(init: int, group: str) -> list[int]:
    """Those in the control group or below; without one of its own, init and its descendants."""
    found = {init}
    pids = _pids()
    for pid in pids:
        try:
            inside = group != "/" and f"{freezer_group(pid)}/".startswith(f"{group}/")
        except (OSError, ValueError):
            continue
        if inside or _parent(pid) in found:
            found.add(pid)
    return sorted(found)


def _pids() -> list[int]:
    return sorted(int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit())


def _read_config(path: Path | None) -> dict[str, Any] | None:
    """Raises CheckpointError if it is there and cannot be read."""
    if path is None or not path.exists():
        return None
    try:
        with path.open("rb") as file:
            raw = json.loads(file.read(_LARGEST))
    except (OSError, ValueError, RecursionError) as exc:
        raise CheckpointError(f"cannot read {path}: {exc}") from exc
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} is no OCI configuration")
    return raw


def _json(argv: list[str]) -> Any:
    """What a program prints on stdout, whatever it warns of beside; None if it fails."""
    try:
        ended = process.run(argv, timeout_s=_TIMEOUT_S, apart=True)
        return json.loads(ended.output) if ended.status == 0 else None
    except (OSError, TimeoutError, ValueError):
        return None


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
    for line in Path(f"/proc/{pid}/mountinfo").read_text(errors="surrogateescape").splitlines():
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
    return re.sub(r"\\([0-7]{3})", lambda match: os.fsdecode(bytes([int(match[1], 8)])), text)


def _path(value: object) -> str:
    """As mountinfo has it: links that everybody has are followed."""
    text = str(value).rstrip("/") or "/"
    return re.sub(r"^/var/run(?=/|$)", "/run", text)


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _objects(value: object) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
