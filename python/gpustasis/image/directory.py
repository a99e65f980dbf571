# SPDX-License-Identifier: Apache-2.0
"""Image directories: locked, shared by who reads a chain and exclusively by who removes; and, while
one is made, beside its place under a hidden name.

docs/format.md, "Links". A lock is a flock(2): the kernel drops it when its holder dies.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from gpustasis.criu.images import INVENTORY_NAME
from gpustasis.errors import CheckpointError, ImageError
from gpustasis.files import open_new, open_regular, sync_directory

PATIENCE_S = 10.0  # waited for who holds a directory for itself
_POLL_S = 0.02
_MARKER_LIMIT = 32  # bytes
# A link that leads nowhere, through a file, in a circle, or to what can be no name.
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


def is_there(place: Path) -> bool:
    """Whether anything has this name, a link too. Raises ImageError if that cannot be told.

    Unlike pathlib's, whose answer to a name from elsewhere may be an OSError.
    """
    return _status(place, follow=False) is not None


def is_directory(place: Path) -> bool:
    """Whether a directory is there, or where a link leads. Raises ImageError as is_there."""
    found = _status(place, follow=True)
    return found is not None and stat.S_ISDIR(found.st_mode)


def is_file(place: Path) -> bool:
    """The same for an ordinary file."""
    found = _status(place, follow=True)
    return found is not None and stat.S_ISREG(found.st_mode)


def _status(place: Path, *, follow: bool) -> os.stat_result | None:
    try:
        return os.stat(place, follow_symlinks=follow)
    except OSError as exc:
        if exc.errno in _NOT_THERE:
            return None
        raise ImageError(f"cannot look at {place}: {exc.strerror}") from exc


class DirectoryLock:
    """A lock on a directory, held until closed. Make one with `share` or `try_exclude`.

    fd: of the directory; -1 once closed.
    """

    def __init__(self, directory: Path, fd: int) -> None:
        self.directory = directory
        self.fd = fd

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1


def share(directory: Path) -> DirectoryLock:
    """A shared lock; waits for who removes the directory, but not for ever: whoever may open it can
    hold a lock. Raises ImageError if it is gone then, or still locked."""
    lock = _open(directory)
    try:
        _wait_shared(lock)
        if not _still_there(lock):
            raise ImageError(f"{directory} was removed or renamed a moment ago")
    except BaseException:
        lock.close()
        raise
    return lock


def _wait_shared(lock: DirectoryLock) -> None:
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            fcntl.flock(lock.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                raise ImageError(
                    f"{lock.directory} has been locked for {PATIENCE_S:g} s: somebody is removing "
                    "that checkpoint, or keeps others from reading it"
                ) from None
            time.sleep(_POLL_S)
        else:
            return


def try_exclude(directory: Path) -> DirectoryLock | None:
    """An exclusive lock; None if somebody holds one, or the directory is another by now.

    Raises ImageError if it cannot be opened, or locked.
    """
    lock = _open(directory)
    try:
        fcntl.flock(lock.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    except OSError as exc:
        lock.close()
        raise ImageError(f"cannot lock {directory}: {exc.strerror}") from exc
    if not _still_there(lock):
        lock.close()
        return None
    return lock


@contextmanager
def shared(directories: Iterable[Path]) -> Iterator[None]:
    """Hold a shared lock on each. Raises as share."""
    with ExitStack() as held:
        for directory in directories:
            held.enter_context(share(directory))
        yield


def allow_many_files() -> None:
    """Let this process open as many files as it may: a chain has a directory and more per link."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _open(directory: Path) -> DirectoryLock:
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as exc:
        raise ImageError(f"cannot open {directory}: {exc.strerror}") from exc
    return DirectoryLock(directory, fd)


def _still_there(lock: DirectoryLock) -> bool:
    """Whether what was locked is what is at the path: it may have been renamed meanwhile. What
    cannot be looked at counts as gone."""
    try:
        return os.path.samestat(os.fstat(lock.fd), os.stat(lock.directory))
    except OSError:
        return False


def require_free(out: Path) -> None:
    """Raise CheckpointError unless `out` is not there, or an empty directory that another can take
    the place of."""
    if not os.path.lexists(out):
        return
    if out.name in ("", "..") or os.path.realpath(out) == os.path.realpath("."):
        raise CheckpointError(f"{out} is where you are, or above that; name another directory")
    if _is_mount_point(out):
        raise CheckpointError(
            f"{out} is a mount point, which a new directory cannot take the place of; name one "
            "below it"
        )
    try:
        free = not os.path.islink(out) and next(out.iterdir(), None) is None
    except OSError:  # no directory, or one that cannot be looked into
        free = False
    if not free:
        raise CheckpointError(f"{out} is there already and no empty directory; name another one")


def _is_mount_point(path: Path) -> bool:
    """Also if the same file system is mounted there as around it, unlike os.path.ismount."""
    place = os.fsencode(os.path.realpath(path))
    for byte in b"\\ \t\n":
        place = place.replace(bytes((byte,)), b"\\%03o" % byte)
    with suppress(OSError), open("/proc/self/mountinfo", "rb") as table:
        return any(line.split(b" ")[4] == place for line in table)
    return os.path.ismount(path)


def require_outside(out: Path, directory: Path) -> None:
    """Raise CheckpointError if `out` would be in `directory`, which is read to make it."""
    above = os.path.realpath(out.absolute().parent)
    inner = os.path.realpath(directory)
    if os.path.commonpath((above, inner)) == inner:
        raise CheckpointError(f"{out} would be in {directory}: name a place outside of it")


@contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """An empty directory to fill; it gets the name `out` when the block ends, with all names in it
    on the disk, and is removed if the block raises. Until then it is .NAME.part beside `out`,
    locked, mode 0700.

    The path that is given leads through a descriptor: whoever else may write beside `out` cannot
    put another directory in its place. What a process that was killed has left is used up, if a
    file .NAME.part.gpustasis says that it is that; anything else of that name is left alone.

    Raises CheckpointError, for an OSError in the block as well.
    """
    part = out.absolute().with_name(f".{out.absolute().name}.part")
    fd = _make(part, out)
    inside = f"/proc/self/fd/{fd}"
    try:
        try:
            _empty(fd)
            yield Path(inside)
            os.fsync(fd)
            _require_same(fd, part, part, out)
            os.rename(part, out)
            _require_same(fd, out, part, out)
            with suppress(OSError):  # one that is left says nothing of another directory
                _marker(part).unlink()
            sync_directory(out.absolute().parent)
        except BaseException as exc:
            with suppress(OSError):
                _empty(fd)
                part.rmdir()
            with suppress(OSError):
                _marker(part).unlink()
            if isinstance(exc, OSError):
                text = str(exc).replace(inside, str(part))
                raise CheckpointError(f"cannot write {out}: {text}") from exc
            if isinstance(exc, CheckpointError):
                exc.args = (str(exc).replace(inside, str(part)),)
            raise
    finally:
        os.close(fd)


def _make(part: Path, out: Path) -> int:
    """A descriptor of the directory, locked."""
    busy = CheckpointError(f"another process is writing {out}")
    try:
        with suppress(FileExistsError):
            part.mkdir(mode=0o700)
        fd = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError as exc:
        if os.path.isdir(part.parent):
            raise busy from exc  # it has renamed or removed it just now
        raise CheckpointError(f"cannot make {part}: {exc.strerror}") from exc
    except OSError as exc:
        if os.path.islink(part):
            raise CheckpointError(
                f"{part} is a link, which gpustasis does not make: look who made it, and remove it"
            ) from exc
        raise CheckpointError(f"cannot make {part}: {exc.strerror}") from exc
    try:
        found = os.fstat(fd)
        if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise CheckpointError(
                f"{part} is there already, and user {found.st_uid} or others may write to it "
                f"(mode {stat.S_IMODE(found.st_mode):04o}): look who made it, and remove it"
            )
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(found, os.lstat(part)):
                raise busy
        except (BlockingIOError, FileNotFoundError):
            raise busy from None
        if os.listdir(fd) and not _is_marked(part, found.st_ino):
            raise CheckpointError(
                f"{part} is there already, and {_marker(part).name} beside it does not say that "
                "gpustasis made it: look what is in it, and remove it"
            )
        os.fchmod(fd, 0o700)
        _mark(part, found.st_ino, out)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _marker(part: Path) -> Path:
    """The file that says which directory was made as `part`. Beside it: in it, it would get the
    final name with the rest, or be gone a moment before that."""
    return part.with_name(f"{part.name}.gpustasis")


def _mark(part: Path, inode: int, out: Path) -> None:
    marker = _marker(part)
    try:
        with suppress(FileNotFoundError):
            marker.unlink()
        with open_new(marker) as file:
            file.write(b"%d\n" % inode)
    except OSError as exc:
        raise CheckpointError(f"cannot write {out}: cannot make {marker}: {exc.strerror}") from exc


def _is_marked(part: Path, inode: int) -> bool:
    """Only this user's word is taken."""
    try:
        with open_regular(_marker(part), os.O_NOFOLLOW) as file:
            own = os.fstat(file.fileno()).st_uid == os.geteuid()
            return own and file.read(_MARKER_LIMIT) == b"%d\n" % inode
    except OSError:
        return False


def _require_same(fd: int, path: Path, part: Path, out: Path) -> None:
    """Raise CheckpointError unless `path` is what is behind the descriptor."""
    with suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(fd), os.lstat(path)):
            return
    raise CheckpointError(f"{part} was exchanged for another while {out} was written")


def _empty(fd: int) -> None:
    """The inventory goes first: what is half removed must not look whole either."""
    with suppress(FileNotFoundError):
        os.unlink(INVENTORY_NAME, dir_fd=fd)
    for name in os.listdir(fd):
        os.unlink(name, dir_fd=fd)
