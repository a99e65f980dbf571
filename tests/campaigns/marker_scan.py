# SPDX-License-Identifier: Apache-2.0
"""Looks for markers of a process in files: in all that a path leads to, and in all that a process
holds open without one.

A file counts if it was changed since a moment that the searcher names, and is read once for each
change. Each half of a marker is looked for by itself, so that one that is cut at the end of a block
is found as well. What is held open and has no path counts too, in every process that this one has
started, but in those that the searcher names: the job's memory, and criu's with that of its helpers
while they live, are no places to be searched (docs/security.md says why); nor is the memory of an
emulated GPU. Only a search that is alone on this machine looks into other processes: what is opened
here is "used outside of the tree" to a dump that somebody else's test makes of it.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from gpustasis.recovery import GUARDIAN_COMM, WORKER_COMM

# Where something may be written beside the campaign's own directory.
SHARED_PLACES = (Path("/tmp"), Path("/dev/shm"), Path("/run"))
_TESTS = "pytest-of-"  # files of other tests, gigabytes of them; a searcher names its own directory
_CRIU = ("criu", "ld-linux-x86-64", WORKER_COMM, GUARDIAN_COMM)
_GPU = "/memfd:gpustasis-emulated-vram (deleted)"
_NO_FILES = {
    *("proc", "sysfs", "devpts", "cgroup", "cgroup2", "securityfs", "debugfs", "tracefs", "bpf"),
    *("mqueue", "pstore", "configfs", "fusectl", "binfmt_misc", "nsfs", "autofs", "efivarfs"),
}
_BLOCK = 4 << 20
_GONE = (FileNotFoundError, ProcessLookupError, NotADirectoryError)


@dataclass(slots=True)
class Scanner:
    """markers: by where the process has them. since: nanoseconds; older files are left out. alone:
    nothing else runs on this machine that minds.

    files, scanned_bytes: what was looked into so far."""

    markers: Mapping[str, bytes]
    since: int
    alone: bool = False
    files: int = 0
    scanned_bytes: int = 0
    _pieces: dict[str, tuple[bytes, bytes]] = field(init=False)
    _clean: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._pieces = {
            place: (marker[: len(marker) // 2], marker[len(marker) // 2 :])
            for place, marker in self.markers.items()
        }

    def below(self, roots: Sequence[Path]) -> dict[str, set[str]]:
        """Paths with a marker, and of which places. Links are not followed, nor is another file
        system entered."""
        found: dict[str, set[str]] = {}
        for root in dict.fromkeys(roots):
            for path, status in self._changed(root):
                place, version = (
                    (status.st_dev, status.st_ino),
                    (status.st_ctime_ns, status.st_size),
                )
                if self._clean.get(place) == version:
                    continue
                if places := self._of_name(path) | self._of_file(path):
                    found[path] = places
                else:
                    self._clean[place] = version
        return found

    def everywhere(self) -> dict[str, set[str]]:
        """In every file system that is mounted here and can hold files, each file anew."""
        found: dict[str, set[str]] = {}
        self._clean.clear()
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            words = line.split()
            if words[words.index("-") + 1] not in _NO_FILES:
                point = words[4].encode().decode("unicode_escape")
                found |= self.below([Path(point)])
        return found

    def held_open(self, without: Collection[int] = ()) -> dict[str, set[str]]:
        """The same of files without a name that processes hold; not those of these pids, nor of
        those that root itself may not look into."""
        found: dict[str, set[str]] = {}
        pids = map(int, filter(str.isdecimal, os.listdir("/proc"))) if self.alone else _own()
        for pid in sorted(set(pids) - set(without)):
            with suppress(*_GONE, PermissionError):
                for number in os.listdir(f"/proc/{pid}/fd"):
                    path = f"/proc/{pid}/fd/{number}"
                    with suppress(*_GONE):
                        target = os.readlink(path)
                        nameless = target.endswith(" (deleted)") and target != _GPU
                        # Directories, pipes and terminals may be without a name as well.
                        if not nameless or not stat.S_ISREG(os.stat(path).st_mode):
                            continue
                        if places := self._of_file(path):
                            found[f"{path} ({target})"] = places
        return found

    def _changed(self, root: Path) -> Iterator[tuple[str, os.stat_result]]:
        todo = [os.fspath(root)]
        device = os.stat(root).st_dev
        while todo:
            with suppress(*_GONE), os.scandir(todo.pop()) as entries:
                for entry in entries:
                    with suppress(*_GONE):
                        status = entry.stat(follow_symlinks=False)
                        if stat.S_ISDIR(status.st_mode):
                            others = not self.alone and entry.name.startswith(_TESTS)
                            if status.st_dev == device and not others:
                                todo.append(entry.path)
                        elif stat.S_ISREG(status.st_mode) and status.st_ctime_ns >= self.since:
                            yield entry.path, status

    def _of_name(self, path: str) -> set[str]:
        raw = os.fsencode(path)
        return {place for place, pieces in self._pieces.items() if any(p in raw for p in pieces)}

    def _of_file(self, path: str) -> set[str]:
        found: set[str] = set()
        with suppress(*_GONE), open(path, "rb", buffering=0, opener=_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return found  # it was, a moment ago
            self.files += 1
            for begin, end in _data(file.fileno()):
                file.seek(begin)
                tail = b""
                while block := file.read(min(_BLOCK, end - file.tell())):
                    self.scanned_bytes += len(block)
                    text = tail + block
                    for place, pieces in self._pieces.items():
                        if place not in found and any(piece in text for piece in pieces):
                            found.add(place)
                    tail = text[-max(map(len, self.markers.values())) :]
        return found


def _without_waiting(path: str, flags: int) -> int:
    """For another one to open what has become a pipe since it was looked at."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


def _data(file: int) -> Iterator[tuple[int, int]]:
    """Where a file has data, from and to: a hole may be larger than anybody can read."""
    end = 0
    while True:
        try:
            begin = os.lseek(file, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # no more behind `end`
                return
            raise
        end = os.lseek(file, begin, os.SEEK_HOLE)
        yield begin, end


def _own() -> list[int]:
    """Of this process and those below it, to which those come whose parents end."""
    found = [os.getpid()]
    for pid in found:
        with suppress(*_GONE):
            for thread in os.listdir(f"/proc/{pid}/task"):
                children = Path(f"/proc/{pid}/task/{thread}/children").read_text()
                found += map(int, children.split())
    return found


def running_criu() -> list[int]:
    """Every criu of this machine, with the plugin's helpers."""
    found = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdecimal()):
        with suppress(*_GONE):
            if Path(f"/proc/{pid}/comm").read_text().strip() in _CRIU:
                found.append(pid)
    return found


class Watch:
    """Scans again and again, in a thread, for the length of a with statement. found: all that was
    ever there; rounds: how often it looked."""

    def __init__(self, scanner: Scanner, roots: Sequence[Path]) -> None:
        self._scanner = scanner
        self._roots = roots
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.found: dict[str, set[str]] = {}
        self.rounds = 0
        self.error: BaseException | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ends.set()
        self._thread.join()
        if self.error is not None and value is None:
            raise self.error

    def _run(self) -> None:
        try:
            while not self._ends.is_set():
                self.found |= self._scanner.below(self._roots)
                self.rounds += 1
        except BaseException as failure:  # noqa: BLE001 - told to who waits for the end
            self.error = failure
