# SPDX-License-Identifier: Apache-2.0
"""What one process holds, as /proc shows it: descriptors, mappings, threads, sockets, memory."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import TypedDict

_SMAPS_HEAD = re.compile(
    r"^([0-9a-f]+)-([0-9a-f]+) (\S{4}) ([0-9a-f]+) ([0-9a-f]+:[0-9a-f]+) (\d+) *(.*)$"
)
_FLAG_CLOEXEC = 0o2000000  # as fdinfo shows it; os.O_CLOEXEC is the same bit on Linux
_SOCKET_TYPES = {1: "stream", 2: "dgram", 5: "seqpacket"}
_SOCKET_LISTENS = 0x10000  # SO_ACCEPTCON in the flags column of /proc/net/unix


class Descriptor(TypedDict):
    """One open descriptor. `kind` is the st_mode type; `flags` are open flags, `link` the
    target."""

    fd: int
    kind: str
    link: str
    access: str
    nonblock: bool
    cloexec: bool
    device: str | None
    socket: dict[str, object] | None


class Mapping(TypedDict):
    """One mapping. Addresses are hexadecimal, sizes bytes."""

    start: str
    end: str
    perms: str
    offset: str
    inode: int
    path: str
    rss_bytes: int
    huge_bytes: int
    vm_flags: list[str]


class Thread(TypedDict):
    """One thread: its name, its state letter, and the kernel function it waits in ("0": none)."""

    tid: int
    comm: str
    state: str
    wchan: str


class Observation(TypedDict):
    """All of it, at one moment."""

    descriptors: list[Descriptor]
    mappings: list[Mapping]
    threads: list[Thread]
    memory_bytes: dict[str, int]


def observe(pid: int) -> Observation:
    """Return what the live process `pid` holds now.

    Threads and descriptors that vanish while they are read are left out. Raises OSError if the
    process is gone or may not be read.
    """
    return {
        "descriptors": _descriptors(pid),
        "mappings": _mappings(pid),
        "threads": _threads(pid),
        "memory_bytes": _memory(pid),
    }


def _descriptors(pid: int) -> list[Descriptor]:
    sockets = _unix_sockets(pid)
    found: list[Descriptor] = []
    for name in sorted(os.listdir(f"/proc/{pid}/fd"), key=int):
        path = f"/proc/{pid}/fd/{name}"
        try:
            link = os.readlink(path)
            status = os.stat(path)
            info = Path(f"/proc/{pid}/fdinfo/{name}").read_text(encoding="ascii")
        except FileNotFoundError:
            continue
        flags = int(info.partition("flags:")[2].split()[0], 8)
        is_device = stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode)
        found.append(
            {
                "fd": int(name),
                "kind": _kind(status.st_mode, link),
                "link": link,
                "access": ("r", "w", "rw", "?")[flags & os.O_ACCMODE],
                "nonblock": bool(flags & os.O_NONBLOCK),
                "cloexec": bool(flags & _FLAG_CLOEXEC),
                "device": f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
                if is_device
                else None,
                "socket": sockets.get(status.st_ino) if stat.S_ISSOCK(status.st_mode) else None,
            }
        )
    return found


def _kind(mode: int, link: str) -> str:
    if link.startswith("anon_inode:"):
        return link.removeprefix("anon_inode:").strip("[]")
    for test, name in (
        (stat.S_ISCHR, "device"),
        (stat.S_ISFIFO, "pipe"),
        (stat.S_ISSOCK, "socket"),
        (stat.S_ISREG, "file"),
        (stat.S_ISDIR, "directory"),
    ):
        if test(mode):
            return name
    return "other"


def _unix_sockets(pid: int) -> dict[int, dict[str, object]]:
    """Unix sockets of the process's network namespace, by inode."""
    table: dict[int, dict[str, object]] = {}
    text = Path(f"/proc/{pid}/net/unix").read_text(encoding="utf-8", errors="replace")
    for line in text.splitlines()[1:]:
        fields = line.split(maxsplit=7)
        table[int(fields[6])] = {
            "type": _SOCKET_TYPES.get(int(fields[4], 16), fields[4]),
            "listening": bool(int(fields[3], 16) & _SOCKET_LISTENS),
            "name": fields[7] if len(fields) > 7 else "",
        }
    return table


def _mappings(pid: int) -> list[Mapping]:
    found: list[Mapping] = []
    text = Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8", errors="replace")
    for line in text.splitlines():
        head = _SMAPS_HEAD.match(line)
        if head:
            found.append(
                {
                    "start": head[1],
                    "end": head[2],
                    "perms": head[3],
                    "offset": head[4],
                    "inode": int(head[6]),
                    "path": head[7],
                    "rss_bytes": 0,
                    "huge_bytes": 0,
                    "vm_flags": [],
                }
            )
        elif line.startswith("Rss:"):
            found[-1]["rss_bytes"] = int(line.split()[1]) << 10
        elif line.startswith("AnonHugePages:"):
            found[-1]["huge_bytes"] = int(line.split()[1]) << 10
        elif line.startswith("VmFlags:"):
            found[-1]["vm_flags"] = line.split()[1:]
    return found


def _threads(pid: int) -> list[Thread]:
    found: list[Thread] = []
    for name in sorted(os.listdir(f"/proc/{pid}/task"), key=int):
        task = Path(f"/proc/{pid}/task/{name}")
        try:
            comm = (task / "comm").read_text(encoding="utf-8", errors="replace").rstrip("\n")
            state = (task / "stat").read_text(encoding="utf-8", errors="replace")
            wchan = (task / "wchan").read_text(encoding="ascii")
        except (FileNotFoundError, ProcessLookupError):
            continue
        found.append(
            {
                "tid": int(name),
                "comm": comm,
                "state": state.rpartition(")")[2].split()[0],
                "wchan": wchan,
            }
        )
    return found


def _memory(pid: int) -> dict[str, int]:
    wanted = ("VmSize", "VmRSS", "VmLck", "RssAnon", "RssFile", "RssShmem")
    memory: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if key in wanted:
            memory[key] = int(value.split()[0]) << 10
    return memory
