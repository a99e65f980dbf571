# SPDX-License-Identifier: Apache-2.0
"""A memory cgroup of our own, to see whom the driver's staging memory is charged to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCgroup:
    """procs: file to write a pid to. statistics: its memory.stat; key: the line of it that counts.

    Counted is anonymous memory, which staging is. Files would come and go at times of their own:
    pages of programs, and the memory of emulated GPUs, which is charged to whom it was written by.
    """

    procs: Path
    statistics: Path
    key: str

    def used_bytes(self) -> int:
        """Return the bytes of anonymous memory charged to this cgroup."""
        lines = map(str.split, self.statistics.read_text(encoding="ascii").splitlines())
        return next(int(value) for name, value in lines if name == self.key)


class NoCgroup(Exception):
    """No memory cgroup can be made here; the message says why."""


@contextmanager
def memory_cgroup() -> Iterator[MemoryCgroup]:
    """Make an empty memory cgroup and remove it at the end, when its processes are gone.

    Raises NoCgroup where there is no memory controller or it may not be used.
    """
    folder, key = _new_folder()
    try:
        yield MemoryCgroup(
            procs=folder / "cgroup.procs", statistics=folder / "memory.stat", key=key
        )
    finally:
        folder.rmdir()


def _new_folder() -> tuple[Path, str]:
    name = f"gpustasis-gpu-check-{os.getpid()}"
    reasons: list[str] = []
    for mount, version in _memory_mounts():
        folder = mount / name
        try:
            if version == 2 and "memory" not in (mount / "cgroup.subtree_control").read_text():
                (mount / "cgroup.subtree_control").write_text("+memory")
            folder.mkdir()
        except OSError as exc:
            reasons.append(f"{folder}: {exc.strerror}")
            continue
        return folder, "anon" if version == 2 else "rss"
    raise NoCgroup("; ".join(reasons) or "no memory controller is mounted")


def _memory_mounts() -> Iterator[tuple[Path, int]]:
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        left, _, right = line.partition(" - ")
        mount, (kind, _, options) = Path(left.split()[4]), right.split(maxsplit=2)
        if kind == "cgroup" and "memory" in options.split(","):
            yield mount, 1
        elif kind == "cgroup2" and "memory" in (mount / "cgroup.controllers").read_text().split():
            yield mount, 2
