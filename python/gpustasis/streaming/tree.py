# SPDX-License-Identifier: Apache-2.0
"""The processes that are dumped, held by pidfds: it is known of each whether it has ended."""

from __future__ import annotations

import errno
import os
import re
import select
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from gpustasis._core import ImageReader
from gpustasis.criu.images import read_pstree
from gpustasis.criu.statistics import find_statistics
from gpustasis.dump_records import find_missing
from gpustasis.errors import CheckpointError, ImageError, StreamError
from gpustasis.image.arena import find_marker
from gpustasis.recovery import GUARDIAN_COMM, WORKER_COMM
from gpustasis.task import PROC, Task, find_users, read_task

SETTLE_S = 90.0  # longer than the plugin's worker has for its calls
_POLL_S = 0.05
_KILLED_S = 1.0
# By whether the hierarchy has controllers (version 1): file system, file, line if frozen.
_FREEZERS = {
    True: ("cgroup", "freezer.state", "FROZEN"),
    False: ("cgroup2", "cgroup.events", "frozen 1"),
}
_GPU_IMAGE = re.compile(r"gpustasis-[1-9][0-9]*\.img")
_FLAGS, _EXITING = 6, 0x4  # of /proc/PID/stat after the name, and PF_EXITING of linux/sched.h


class Tree:
    """A process and all below it, as they were found. Each pidfd is held until close."""

    def __init__(self, root: int) -> None:
        self.root = root
        self._fds: dict[int, int] = {}
        self._were_dead: tuple[int, ...] = ()
        self._needed = {root}
        try:
            for pid in _walk(root):
                try:
                    self._fds[pid] = os.pidfd_open(pid)
                except ProcessLookupError:
                    if pid == root:
                        raise
        except ProcessLookupError as exc:
            self.close()
            raise CheckpointError(f"there is no process {root}") from exc
        except OSError as exc:
            self.close()
            raise CheckpointError(
                f"cannot hold all processes below {root}, {len(self._fds)} so far: {exc.strerror}"
            ) from exc
        self._were_dead = self.ended()
        if root in self._were_dead:
            self.close()
            raise CheckpointError(f"process {root} is dead")

    @property
    def pids(self) -> tuple[int, ...]:
        """Of all its processes, the root first."""
        return tuple(self._fds)

    def note_dropped(self) -> None:
        """Called while they stand: one whose memory is taken out of it, and put back, must live on
        as the root must. An end of one of the others is its own, for nobody was told to end it."""
        self._needed |= {pid for pid in self._fds if _is_missing(pid)}

    def note_stored(self, images: Path) -> str:
        """The same of a dump that failed before they stood: those that it had to do with, and those
        whose memory is in `images`. Why it cannot be said of all; empty: each is alive."""
        try:
            statistics = find_statistics(images, "dump")
            found = {path.name: ImageReader.open(path).info for path in _gpu_images(images)}
        except (ImageError, OSError, ValueError, NotImplementedError) as exc:
            return f"it cannot be told whose memory was dumped: {exc}"
        live = {pid: task for pid in set(self._fds) - set(self.ended()) if (task := _task(pid))}
        asked = {task.pid for task in statistics.tasks} if statistics is not None else set()
        here = {(task.inner_pid, task.start_time): pid for pid, task in live.items()}
        stored = {(info.pid, info.start_time) for info in found.values()}
        gone = (asked - live.keys()) | {pid for pid, start in stored if (pid, start) not in here}
        if gone:
            return f"process {', '.join(map(str, sorted(gone)))} has ended in the dump"
        self._needed |= asked | {here[one] for one in stored}
        return ""

    def close(self) -> None:
        """Let go of them."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds = {}

    def require_all(self, images: Path) -> None:
        """Raise StreamError unless these are as many processes as the dump in `images` holds.

        By number: the images name them as their own pid namespaces do.
        """
        dumped = len(read_pstree(images))
        if dumped != len(self._fds):
            raise StreamError(
                f"the dump holds {dumped} processes, and {len(self._fds)} are below process "
                f"{self.root}: it could not be told whether all have ended"
            )

    def ended(self) -> tuple[int, ...]:
        """Those that have ended, zombies among them."""
        poll = select.poll()
        for fd in self._fds.values():
            poll.register(fd, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(0)}
        return tuple(pid for pid, fd in self._fds.items() if fd in ready)

    def died(self) -> tuple[int, ...]:
        """Those that have ended since they were found."""
        return tuple(pid for pid in self.ended() if pid not in self._were_dead)

    def all_ended(self, timeout_s: float, check: Callable[[], None]) -> bool:
        """Whether every one has, after at most `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while len(self.ended()) < len(self._fds):
            if time.monotonic() > deadline:
                return False
            check()
            time.sleep(_POLL_S)
        return True

    def is_ending(self) -> bool:
        """Whether any has ended since it was found, or is about to."""
        if self.died():
            return True
        for pid in self._fds:
            if pid not in self._were_dead:
                try:
                    if _is_being_killed(pid):
                        return True
                except OSError:
                    return True
        return False

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send this signal to those that have not ended."""
        for fd in self._fds.values():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, number)

    def why_not_running(self, images: Path, *, maybe_killed: bool = False) -> str:
        """What keeps it from being said that the job runs on, if that has not passed after a while.
        Empty: every process was seen alive, traced by nobody, and with all its memory; or it has
        ended since, and that is its own affair (note_dropped).

        maybe_killed: who might have killed them is gone only just now. A process that was killed
        lives on for an instant in which nothing shows it: so there are two looks, and any end is
        wrong.
        """
        needed = set(self._fds) if maybe_killed else self._needed
        looks = 2 if maybe_killed else 1
        deadline = time.monotonic() + SETTLE_S
        while True:
            wrong = self._what_is_wrong(images, needed)
            if not wrong and looks > 1:
                looks -= 1
                time.sleep(_KILLED_S)
                continue
            if needed.intersection(self.died()):  # for good, whatever was found before that
                return self._what_is_wrong(images, needed)
            if not wrong or time.monotonic() > deadline:
                return wrong
            time.sleep(_POLL_S)

    def _what_is_wrong(self, images: Path, needed: set[int]) -> str:
        if ended := [pid for pid in self.died() if pid in needed]:
            return f"process {', '.join(map(str, ended))} has ended"
        if _is_in_use(images):
            return f"memory of process {self.root} is still being put back from {images}"
        for pid in self._fds:
            if pid in self._were_dead:
                continue
            wrong = _what_is_wrong(pid, images)
            if wrong and (pid in needed or pid not in self.died()):
                return wrong
        return ""


def _is_in_use(images: Path) -> bool:
    """Whether memory may still be put back from the dump in `images`. Of one that is in memory
    first, who does that holds the directory in the arena, and not the image directory."""
    places = [images]
    with suppress(CheckpointError):  # what cannot be read names no directory
        if (marker := find_marker(images)) is not None:
            places.append(Path(marker.directory))
    for place in places:
        with suppress(FileNotFoundError, NotADirectoryError):
            if find_users(place, WORKER_COMM, GUARDIAN_COMM):
                return True
    return False


def _what_is_wrong(pid: int, images: Path) -> str:
    """Why it cannot be said that this process runs on; empty: it does."""
    try:
        task = read_task(pid)
        killed = _is_being_killed(pid)
        frozen = _frozen_cgroup(pid)
        is_missing = find_missing(pid) is not None
    except (CheckpointError, OSError, ValueError) as exc:
        return str(exc)
    if killed:
        return f"process {pid} is being killed"
    if frozen:
        return f"process {pid} is frozen by its cgroup {frozen}"
    if task.tracer or task.state == "t":
        return f"process {pid} is still traced by process {task.tracer}"
    if is_missing:
        return (
            f"memory of process {pid} is only in {images}: `gpustasis recover {pid} -D {images}` "
            "puts it back"
        )
    return ""


def _gpu_images(images: Path) -> list[Path]:
    """What is in them may have been taken out of their processes."""
    return [path for path in images.iterdir() if _GPU_IMAGE.fullmatch(path.name)]


def _task(pid: int) -> Task | None:
    try:
        return read_task(pid)
    except CheckpointError:
        return None  # it has ended


def _is_missing(pid: int) -> bool:
    """Also if that cannot be told."""
    try:
        return find_missing(pid) is not None
    except CheckpointError:
        return True


def _walk(root: int) -> list[int]:
    """Pids from the root down, as CRIU finds them. Raises ProcessLookupError if there is no root;
    others end at any time."""
    found = [root]
    for pid in found:
        try:
            threads = list((PROC / str(pid) / "task").iterdir())
        except (FileNotFoundError, ProcessLookupError) as exc:
            if pid == root:
                raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH)) from exc
            continue
        for thread in threads:
            # A thread that ends meanwhile hands its children to another of the process.
            with suppress(FileNotFoundError, ProcessLookupError):
                found += map(int, (thread / "children").read_text().split())
    return found


def _is_being_killed(pid: int) -> bool:
    """Whether SIGKILL is on its way to any thread, or the first is ending. Raises OSError if it has
    ended."""
    stat = (PROC / str(pid) / "stat").read_text(errors="replace")
    if int(stat.rpartition(") ")[2].split()[_FLAGS]) & _EXITING:
        return True
    bit = 1 << (signal.SIGKILL - 1)
    for thread in (PROC / str(pid) / "task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            for line in (thread / "status").read_text(errors="replace").split("\n"):
                name, _, value = line.partition(":")
                if name in ("SigPnd", "ShdPnd") and int(value, 16) & bit:
                    return True
    return False


def _frozen_cgroup(pid: int) -> str:
    """The cgroup that keeps a process from running; empty: none does. Raises OSError if the process
    has ended."""
    for line in _lines(PROC / str(pid) / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and "freezer" not in controllers.split(","):
            continue
        kind, name, word = _FREEZERS[bool(controllers)]
        for root, place in _mounts(kind, "freezer" if controllers else ""):
            found = place / os.path.relpath(path, root)
            with suppress(OSError):  # not in this mount of it, or the root, which cannot be frozen
                if word in (found / name).read_text().splitlines():
                    return str(found)
    return ""


def _lines(path: Path) -> list[str]:
    """As the kernel ends them: str.splitlines knows more ends, which are part of a name here."""
    return path.read_text(errors="replace").rstrip("\n").split("\n")


def _mounts(kind: str, option: str) -> list[tuple[str, Path]]:
    """Mounts of a file system of that kind and option: what of it is mounted, and where."""
    found = []
    for line in _lines(PROC / "self/mountinfo"):
        place, _, rest = line.partition(" - ")
        words, (name, _, options) = place.split(" "), rest.split(" ", 2)  # a source may be empty
        if name == kind and (not option or option in options.split(",")):
            found.append((words[3], Path(words[4])))
    return found


def resident_bytes(root: int) -> int:
    """Memory that the tree has in use; what it shares counts several times. Raises CheckpointError
    if there is no such process."""
    total = 0
    try:
        pids = _walk(root)
    except ProcessLookupError as exc:
        raise CheckpointError(f"there is no process {root}") from exc
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            pages = int((PROC / str(pid) / "statm").read_text().split()[1])
            total += pages * os.sysconf("SC_PAGE_SIZE")
    return total
