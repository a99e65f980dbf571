# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint is made of, and the process that is meant by a pid: held, so that another one
that gets the same pid later is not taken for it."""

from __future__ import annotations

import os
import select
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from gpustasis.errors import AgentError, CheckpointError
from gpustasis.files import changeable_by_others, open_regular
from gpustasis.task import PROC, read_task

CONTAINERS = ("podman", "containerd", "crio")
MAX_NAME = 255
MAX_THREADS = 1 << 16  # of a tree
_PIDFILE_LIMIT = 64  # bytes
_ROOT = 0
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """engine: "": it is the process `pid`, the one that started at `start_time` (clock ticks since
    boot); else one of CONTAINERS, and `name` the container."""

    engine: str = ""
    name: str = ""
    pid: int = 0
    start_time: int = 0

    @property
    def key(self) -> str:
        """Two checkpoints with the same one are never made at once."""
        return f"{self.engine}:{self.name}" if self.engine else f"{self.pid}-{self.start_time}"

    def __str__(self) -> str:
        return f"{self.engine} container {self.name}" if self.engine else f"process {self.pid}"


def parse_container(text: str) -> Subject | None:
    """Of ENGINE:NAME; None: it is nothing like that."""
    engine, _, name = text.partition(":")
    if engine not in CONTAINERS or not 0 < len(name) <= MAX_NAME or not name.isprintable():
        return None
    return Subject(engine=engine, name=name)


class Held:
    """A process, by a pidfd. uids: real, effective, saved and file system's, as they were when it
    was opened."""

    def __init__(self, pid: int, start_time: int | None = None) -> None:
        """start_time: of the process that is meant; None: whichever has the pid now. Raises
        AgentError."""
        try:
            self._fd = os.pidfd_open(pid)
        except (OSError, OverflowError) as exc:
            raise AgentError(f"there is no process {pid}") from exc
        try:
            self.start_time = read_task(pid).start_time
            self.uids = _uids(pid)
            # What /proc said was of this process only if it has not ended: the pid was its own.
            self.require_alive(pid)
            if start_time is not None and start_time != self.start_time:
                raise AgentError(
                    f"process {pid} is another one than was meant: it started at tick "
                    f"{self.start_time}, not {start_time}"
                )
        except (CheckpointError, OSError, ValueError) as exc:
            os.close(self._fd)
            if isinstance(exc, AgentError):
                raise
            raise AgentError(f"process {pid} cannot be looked at: {exc}") from exc
        self.pid = pid

    def is_alive(self) -> bool:
        """It has not ended: until now its pid was nobody else's."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return not poll.poll(0)

    def require_alive(self, pid: int) -> None:
        """Raise AgentError if it has ended."""
        if not self.is_alive():
            raise AgentError(f"process {pid} has ended")

    def close(self) -> None:
        os.close(self._fd)

    def subject(self) -> Subject:
        return Subject(pid=self.pid, start_time=self.start_time)


@contextmanager
def held(pid: int, start_time: int | None = None) -> Iterator[Held]:
    """A process, while the with statement lasts. Raises AgentError."""
    found = Held(pid, start_time)
    try:
        yield found
    finally:
        found.close()


def _uids(pid: int) -> frozenset[int]:
    text = (PROC / str(pid) / "status").read_text(errors="replace")
    line = next(one for one in text.split("\n") if one.startswith("Uid:"))
    return frozenset(map(int, line.split()[1:]))


def tree_pids(root: int) -> tuple[int, ...]:
    """The process and all below it, as far as they are there. Raises AgentError if they have more
    than MAX_THREADS threads: whoever looks at a tree may not be held up by its owner."""
    found, threads = [root], 0
    for pid in found:
        with suppress(OSError):
            for thread in (PROC / str(pid) / "task").iterdir():
                threads += 1
                if threads > MAX_THREADS:
                    raise AgentError(f"the tree of process {root} has over {MAX_THREADS} threads")
                with suppress(OSError):
                    found += map(int, (thread / "children").read_text().split())
    return tuple(dict.fromkeys(found))


def require_not_ours(root: int) -> None:
    """Raise AgentError if this process is in the tree: it would be frozen in its own dump, and
    nobody would be left to let it go."""
    if os.getpid() in tree_pids(root):
        raise AgentError(f"the agent is in the tree of process {root}: it cannot checkpoint itself")


def require_all_of(root: int, uid: int) -> None:
    """Raise AgentError unless every process of the tree is `uid`'s, by all its user ids, and in the
    namespaces of users and pids of the agent."""
    for pid in tree_pids(root):
        try:
            uids = _uids(pid)
            inside = [
                name
                for name in ("user", "pid")
                if os.readlink(PROC / str(pid) / "ns" / name)
                != os.readlink(PROC / "self" / "ns" / name)
            ]
        except (OSError, StopIteration, ValueError):
            if pid == root:
                raise AgentError(f"process {pid} has ended") from None
            continue  # it has ended
        if uids != {uid}:
            raise AgentError(
                f"user {uid} may not checkpoint process {root}: process {pid} of its tree is of "
                f"user {', '.join(map(str, sorted(uids)))}"
            )
        if inside:
            raise AgentError(
                f"user {uid} may not checkpoint process {root}: process {pid} of its tree is in "
                f"another {' and '.join(inside)} namespace; checkpoint its container, as root"
            )


def from_pidfile(path: Path) -> Held:
    """The process that the file names. It must be of the file's owner, unless that is root; then
    nobody else may be able to put another file in its place.

    Raises AgentError.
    """
    try:
        before = os.lstat(path)
        if not stat.S_ISREG(before.st_mode):  # not even to be opened, and nobody's link to follow
            raise AgentError(f"{path} is refused: it is no ordinary file")
        with open_regular(path, os.O_NOFOLLOW) as file:
            found = os.fstat(file.fileno())
            raw = file.read(_PIDFILE_LIMIT + 1)
        wrong = "" if found.st_uid != _ROOT else _why_not_root_s(path)
    except OSError as exc:
        raise AgentError(f"cannot read the pid in {path}: {exc.strerror}") from exc
    if found.st_mode & _OTHERS_WRITE:
        raise AgentError(
            f"{path} is refused: with mode {stat.S_IMODE(found.st_mode):04o} others than its owner "
            "can write to it"
        )
    if wrong:
        raise AgentError(f"{path} is refused: others than root could replace it: {wrong}")
    text = raw.decode("ascii", "replace").strip()
    if len(raw) > _PIDFILE_LIMIT or not text.isdecimal() or int(text) < 2:
        raise AgentError(f"{path} holds no pid: {text[:20]!r}")
    process = Held(int(text))
    if found.st_uid != _ROOT and process.uids != {found.st_uid}:
        process.close()
        raise AgentError(
            f"{path} is refused: it belongs to user {found.st_uid}, and process {text} does not"
        )
    return process


def _why_not_root_s(path: Path) -> str:
    """Why a file of root's may be there by the doing of others; "": only root can have put it
    there. Raises OSError."""
    above = os.stat(path.parent)
    if above.st_mode & _OTHERS_WRITE:  # sticky or not: a file of root's can be moved there
        return f"everybody can write to {path.parent}"
    return next(changeable_by_others(str(path)), "")
