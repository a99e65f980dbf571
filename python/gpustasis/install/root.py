# SPDX-License-Identifier: Apache-2.0
"""The file system that is installed into: a host's "/", or a directory that is some host's "/".

Every path is looked up as a process with that root would: an absolute link starts at the root
again, and ".." ends there. So nothing outside is ever read or written, whatever links a hostile
root holds. Directories are held open while they are walked: a link put in between is not followed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from gpustasis import files
from gpustasis.errors import InstallError

MAX_FILE = 64 << 20  # bytes; the largest file that is installed is the plugin
PART_SUFFIX = ".gpustasis-part"
LOCK = ".gpustasis-install.lock"  # in the root directory, while somebody works on it
_TRIES = 100  # to lock what others make and remove
_RENAME_EXCHANGE = 2  # linux/fs.h


@dataclass(frozen=True, slots=True)
class Found:
    """A regular file: its bytes, and what stat says."""

    data: bytes
    status: os.stat_result


class Root:
    """Paths are absolute, in terms of the root: "/etc/criu/runc.conf".

    A context manager: within it the process has no umask. One process at a time works on a root.
    Raises InstallError if the directory is not there, if another process is at it, or if a path
    cannot be looked up; OSError for what the kernel refuses.
    """

    def __init__(self, directory: Path, *, alone: bool = True) -> None:
        """alone: False: only to look, beside whoever installs."""
        self.directory = directory
        try:
            self._fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as exc:
            raise InstallError(f"cannot open the root {directory}: {exc.strerror}") from exc
        self._lock = -1
        if not alone:
            return
        try:
            self._lock = self._take_lock()
        except BlockingIOError as exc:
            os.close(self._fd)
            raise InstallError(f"another process is installing into {directory}") from exc
        except OSError as exc:
            os.close(self._fd)
            raise InstallError(f"cannot lock {directory / LOCK}: {exc.strerror}") from exc

    def __enter__(self) -> Self:
        # A chmod after mkdir would leave the wrong mode if this process dies between them.
        self._umask = os.umask(0)
        return self

    def __exit__(self, *_: object) -> None:
        os.umask(self._umask)
        try:
            self._release_lock()
        finally:
            os.close(self._fd)

    def _take_lock(self) -> int:
        """A descriptor that holds it. It lies in the root, where whoever else has that root mounted
        finds it too, and is a file that only this user can open: what others may open, as the
        directory itself, they can lock and keep.

        Raises BlockingIOError if somebody has it, another OSError if it cannot be made.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        for _ in range(_TRIES):
            lock = os.open(LOCK, flags, 0o600, dir_fd=self._fd)
            try:
                if not stat.S_ISREG(os.fstat(lock).st_mode):
                    raise OSError(errno.EINVAL, "it is not a regular file")
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_in_place(lock):
                    return lock
            except OSError:
                os.close(lock)
                raise
            os.close(lock)  # who had it has removed it between the two calls
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    def _release_lock(self) -> None:
        """The file goes first: whoever locks it after that sees that it has no name any more."""
        if self._lock < 0:
            return
        try:
            if self._is_in_place(self._lock):
                os.unlink(LOCK, dir_fd=self._fd)
        finally:
            os.close(self._lock)

    def _is_in_place(self, lock: int) -> bool:
        try:
            found = os.stat(LOCK, dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(found, os.fstat(lock))

    def exists(self, path: str) -> bool:
        """Whether there is anything but a link to nowhere at this path; links are followed."""
        with contextlib.suppress(InstallError):
            fd, missing = self._descend(path.split("/"), any_file=True)
            os.close(fd)
            return not missing
        return False

    def read(self, path: str, limit: int = MAX_FILE) -> Found | None:
        """The regular file at this path; None: there is nothing. Links to files are refused."""
        with self._parent(path) as (directory, name):
            if directory is None:
                return None
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            try:
                fd = os.open(name, flags, dir_fd=directory)
            except FileNotFoundError:
                return None
            except OSError as exc:
                if exc.errno == errno.ELOOP:
                    target = os.readlink(name, dir_fd=directory)
                    raise InstallError(
                        f"{path} is a symbolic link to {target!r}; put the file itself there"
                    ) from exc
                raise
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                os.close(fd)
                raise InstallError(f"{path} is not a regular file")
            with os.fdopen(fd, "rb") as file:
                if status.st_size > limit:
                    raise InstallError(f"{path}: {status.st_size} bytes, at most {limit} expected")
                return Found(file.read(limit + 1), status)

    def listing(self, path: str) -> list[str]:
        """Names in a directory, sorted; none if it is not there."""
        fd, missing = self._descend(path.split("/"))
        try:
            return [] if missing else sorted(os.listdir(fd))
        finally:
            os.close(fd)

    def missing_directories(self, path: str) -> list[str]:
        """The directories above this path that are not there, the uppermost first."""
        parent = path.rpartition("/")[0]
        fd, missing = self._descend(parent.split("/"))
        os.close(fd)
        parts = parent.split("/")
        return ["/".join(parts[: len(parts) - n]) for n in range(len(missing) - 1, -1, -1)]

    def make_directory(self, path: str, mode: int = 0o755, *, new: bool = False) -> None:
        """Its parent must be there. new: it must not be there yet."""
        with self._parent(path) as (directory, name):
            if directory is None:
                raise InstallError(f"{path}: the directory above it is gone")
            try:
                os.mkdir(name, mode, dir_fd=directory)
            except FileExistsError:
                if new:
                    raise
                return
            if not new:
                os.fsync(directory)

    def status(self, path: str) -> os.stat_result | None:
        """Of what is there, a link itself; None: nothing is."""
        with self._parent(path) as (directory, name):
            if directory is None:
                return None
            try:
                return os.stat(name, dir_fd=directory, follow_symlinks=False)
            except FileNotFoundError:
                return None

    def free_bytes(self, path: str) -> int:
        """Of the file system that this path is or would be on."""
        fd, _ = self._descend(path.split("/"))
        try:
            found = os.fstatvfs(fd)
        finally:
            os.close(fd)
        return found.f_bfree * found.f_frsize

    def rename(self, old: str, new: str) -> None:
        """Within one directory; a file or directory that is there as `new` is not replaced."""
        with self._parent(old) as (directory, name):
            last = new.rpartition("/")[2]
            if directory is None or self.exists(new):
                raise InstallError(f"cannot rename {old} to {new}: the tree was changed meanwhile")
            os.rename(name, last, src_dir_fd=directory, dst_dir_fd=directory)
            os.fsync(directory)

    def exchange(self, one: str, other: str) -> None:
        """Swap the names of two files or directories of one directory, in one step."""
        with self._parent(one) as (directory, name):
            if directory is None:
                raise InstallError(f"cannot exchange {one} and {other}: {one} is not there")
            last = other.rpartition("/")[2]
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.renameat2(
                *(directory, os.fsencode(name)), *(directory, os.fsencode(last)), _RENAME_EXCHANGE
            ):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            os.fsync(directory)

    def survey(self, path: str) -> dict[str, os.stat_result]:
        """Everything below a directory, by its path from there; links are not followed."""
        fd, missing = self._descend(path.split("/"))
        found: dict[str, os.stat_result] = {}
        try:
            if missing:
                return found
            for above, directories, names, at in os.fwalk(".", dir_fd=fd):
                for name in (*directories, *names):
                    status = os.stat(name, dir_fd=at, follow_symlinks=False)
                    found[f"{above}/{name}".removeprefix("./")] = status
        finally:
            os.close(fd)
        return found

    def remove_tree(self, path: str) -> None:
        """Remove a file, or a directory with all that is in it; no link is followed."""
        with self._parent(path) as (directory, name):
            if directory is None:
                return
            if stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
                shutil.rmtree(name, dir_fd=directory)
            else:
                os.unlink(name, dir_fd=directory)
            os.fsync(directory)

    def sync(self, path: str) -> None:
        """Have all of the file system that this directory is on, on the disk."""
        fd, missing = self._descend(path.split("/"))
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            if missing or libc.syncfs(fd):
                raise OSError(ctypes.get_errno(), f"cannot sync {path}")
        finally:
            os.close(fd)

    def remove_directory(self, path: str) -> bool:
        """False: it is not empty, and stays."""
        with self._parent(path) as (directory, name):
            if directory is None:
                return True
            try:
                os.rmdir(name, dir_fd=directory)
            except FileNotFoundError:
                return True
            except OSError as exc:
                if exc.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EBUSY):
                    return False
                raise
            return True

    def write(
        self,
        path: str,
        data: bytes,
        mode: int,
        like: Found | None = None,
        mtime_ns: int = -1,
        durable: bool = True,
    ) -> None:
        """Put a file there in one step, synced; one that is there is replaced.

        like: the file whose owner, mode and extended attributes it gets, in place of `mode`.
        mtime_ns: since 1970; negative: now. durable: False: it is not synced.
        """
        with self._parent(path) as (directory, name):
            if directory is None:
                raise InstallError(f"{path}: the directory above it is gone")

            def prepare(fd: int) -> None:
                if like is not None:
                    os.fchown(fd, like.status.st_uid, like.status.st_gid)
                    self._copy_attributes(directory, name, fd)
                if mtime_ns >= 0:
                    os.utime(fd, ns=(mtime_ns, mtime_ns))

            if like is not None:
                mode = stat.S_IMODE(like.status.st_mode)
            part = f".{name}{PART_SUFFIX}"
            files.replace_file(
                directory, name, data, mode, part=part, prepare=prepare, durable=durable
            )

    def remove(self, path: str) -> None:
        """Remove a file, if it is there."""
        with self._parent(path) as (directory, name):
            if directory is not None and files.remove(directory, name):
                os.fsync(directory)

    def remove_part(self, path: str) -> None:
        """Remove what a killed write() of this path has left."""
        directory, _, name = path.rpartition("/")
        self.remove(f"{directory}/.{name}{PART_SUFFIX}")

    @staticmethod
    def _copy_attributes(directory: int, name: str, to: int) -> None:
        """Security labels and access lists; a file system may have none."""
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
        try:
            for attribute in os.listxattr(fd):
                os.setxattr(to, attribute, os.getxattr(fd, attribute))
        except OSError as exc:
            if exc.errno not in (errno.ENOTSUP, errno.ENODATA):
                raise
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _parent(self, path: str) -> Iterator[tuple[int | None, str]]:
        """The open directory that holds this path, None if it is not there; the last name."""
        parent, _, name = path.rpartition("/")
        if not path.startswith("/") or name in ("", ".", ".."):
            raise InstallError(f"{path!r} is not the absolute path of a file")
        fd, missing = self._descend(parent.split("/"))
        try:
            yield (None if missing else fd), name
        finally:
            os.close(fd)

    def _descend(self, names: list[str], any_file: bool = False) -> tuple[int, list[str]]:
        """Follow names from the root: the open directory reached, and the names not there."""
        path = "/".join(names)
        held = [os.dup(self._fd)]
        todo = [name for name in reversed(names) if name]
        own = len(todo)  # how many of todo are of `names`, and not of a link
        links = 0
        try:
            while todo:
                name = todo.pop()
                if name == "..":
                    if len(held) > 1:
                        os.close(held.pop())
                    own = min(own, len(todo))
                    continue
                flags = os.O_DIRECTORY if todo or not any_file else os.O_PATH
                try:
                    fd = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=held[-1])
                    if flags == os.O_PATH and stat.S_ISLNK(os.fstat(fd).st_mode):
                        os.close(fd)
                        raise OSError(errno.ELOOP, "")
                except FileNotFoundError:
                    if len(todo) >= own:
                        raise InstallError(f"{path} leads through a link to nowhere") from None
                    return held.pop(), [name, *reversed(todo)]
                except OSError as exc:
                    if exc.errno not in (errno.ELOOP, errno.ENOTDIR):
                        raise
                    target = self._link(name, held[-1], path)
                    links += 1
                    if links > files.MAX_LINKS:
                        raise InstallError(f"{path} leads through too many links") from exc
                    while target.startswith("/") and len(held) > 1:
                        os.close(held.pop())
                    own = min(own, len(todo))
                    todo += [part for part in reversed(target.split("/")) if part not in ("", ".")]
                    continue
                held.append(fd)
                own = min(own, len(todo))
            return held.pop(), []
        finally:
            for fd in held:
                os.close(fd)

    @staticmethod
    def _link(name: str, directory: int, path: str) -> str:
        try:
            return os.readlink(name, dir_fd=directory)
        except OSError as exc:
            raise InstallError(f"{path}: {name!r} is not a directory") from exc
