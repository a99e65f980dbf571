# SPDX-License-Identifier: Apache-2.0
"""Files of a program that runs as root: written whole or not at all, and kept where nobody but root
can put something else in their place.

The OCI hook imports this, and every container with annotations waits for it: it imports next to
nothing.
"""

from __future__ import annotations

import errno
import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import BinaryIO

MAX_LINKS = 40  # on the way to a file, as the kernel's own limit
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def replace_file(
    directory: int,
    name: str,
    data: bytes,
    mode: int,
    *,
    part: str = "",
    durable: bool = True,
    prepare: Callable[[int], None] | None = None,
) -> None:
    """Put `data` at `name` in one step; a file that is there is replaced.

    directory: an open one. mode: whatever the umask is. part: its name until it is whole; what a
    killed writer has left there is removed. durable: on the disk when this returns, name included.
    prepare: is called with the descriptor of the new file once `data` is in it.

    Raises OSError; the part is gone then, and what was at `name` is still there, but for an error
    that says that the new file is in place.
    """
    part = part or f".{name}.part"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    remove(directory, part)
    descriptor = os.open(part, flags, 0o600, dir_fd=directory)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            if prepare is not None:
                prepare(descriptor)
            os.fchmod(descriptor, mode)
            if durable:
                os.fsync(descriptor)
        os.rename(part, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        remove(directory, part)
        raise
    if durable:
        try:
            os.fsync(directory)
        except OSError as exc:
            text = f"the new file is in place, but may not outlast a power failure: {exc.strerror}"
            raise OSError(exc.errno, text, name) from exc


def give_name(part: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Make the synced file `part` be `path`, in the same directory, to stay so whatever happens
    next. Unlike a rename, it takes no other's place.

    Raises OSError, FileExistsError if something has that name by now: `part` is still there then.
    """
    try:
        os.link(part, path)
    except FileExistsError:
        raise
    except OSError:  # no hard links: of this file system, or of this file
        open_new(path).close()  # so that it is our own that is replaced
        try:
            os.rename(part, path)
        except BaseException:
            os.unlink(path)
            raise
    else:
        os.unlink(part)
    sync_directory(os.path.dirname(path) or ".")


def open_new(path: str | os.PathLike[str]) -> BinaryIO:
    """A new file for this user alone, to be written; never through a link. Raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return open(os.open(path, flags, 0o600), "wb")


def open_regular(path: str | os.PathLike[str], flags: int = 0) -> BinaryIO:
    """An ordinary file, to be read: a FIFO in its place is an error, and does not hold us up.

    flags: more of them for open(2). Raises OSError.
    """
    asked = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | flags
    descriptor = os.open(path, asked)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "is no ordinary file", os.fspath(path))
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_trusted(path: str | os.PathLike[str], most: int) -> str:
    """A configuration, of at most so many bytes, that nobody but root or this user can change.
    Raises OSError; ValueError that says why it is refused, without its name."""
    with open_regular(path) as file:
        found = os.fstat(file.fileno())
        if found.st_uid not in (0, os.geteuid()) or found.st_mode & _OTHERS_WRITE:
            raise ValueError(
                f"is refused: it belongs to user {found.st_uid} with mode "
                f"{stat.S_IMODE(found.st_mode):04o}, and others than root could change it"
            )
        raw = file.read(most + 1)
    if len(raw) > most:
        raise ValueError(f"it has more than {most} bytes")
    return raw.decode("utf-8")


def sync(file: BinaryIO) -> None:
    """Have what was written to a file on the disk. Raises OSError."""
    file.flush()
    os.fsync(file.fileno())


def remove(directory: int, name: str) -> bool:
    """Whether the file was there. Raises OSError."""
    try:
        os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        return False
    return True


def sync_directory(path: str | os.PathLike[str]) -> None:
    """Have the names in a directory on the disk. Raises OSError."""
    descriptor = os.open(path, _DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directories(path: str, mode: int) -> None:
    """Make what is missing of this path, each directory with this mode whatever the umask is.
    Others may make it at the same time.

    Raises OSError.
    """
    above = os.path.dirname(path.rstrip("/"))
    if above and not os.path.isdir(above):
        make_directories(above, mode)
    if not os.path.isdir(path):
        try:
            os.mkdir(path, mode)
        except FileExistsError:
            if not os.path.isdir(path):
                raise
        else:  # whoever else can write there may have put a link in its place
            descriptor = os.open(path, _DIRECTORY | os.O_NOFOLLOW)
            try:
                os.fchmod(descriptor, mode)
            finally:
                os.close(descriptor)


def open_own_directory(path: str, levels: int, make_mode: int | None = None) -> int:
    """A descriptor of a directory whose last `levels` parts only root, or this user, can write to,
    and none of which is a link.

    make_mode: of those that are missing, whatever the umask is; None: none is made.

    Raises PermissionError that names the part that others can write to, another OSError for what
    the kernel refuses, FileNotFoundError among them.
    """
    parts = path.rstrip("/").split("/")
    whole = "/".join(parts[:-levels]) or "/"
    descriptor = os.open(whole, _DIRECTORY)
    for part in parts[-levels:]:
        above, whole = descriptor, f"{whole.rstrip('/')}/{part}"
        try:
            made = make_mode is not None and _make_directory(above, part, make_mode)
            descriptor = os.open(part, _DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
        except OSError as exc:
            exc.filename = whole
            raise
        finally:
            os.close(above)
        if made and make_mode is not None:
            os.fchmod(descriptor, make_mode)
        found = os.fstat(descriptor)
        if found.st_uid not in (0, os.geteuid()) or found.st_mode & _OTHERS_WRITE:
            os.close(descriptor)
            raise PermissionError(0, f"{_owned(found)}: others could write there", whole)
    return descriptor


def changeable_by_others(
    path: str, root: str = "/", owners: tuple[int, ...] = (0,)
) -> Iterator[str]:
    """Each directory, link and file on the way to `path` that others than `owners` could change or
    put something else in the place of; the way to where links lead, too. With what is wrong.

    root: "/", or the directory that is the "/" of `path`: links that are absolute start there
    again. A directory where anybody may write, but only remove what is his (as /tmp), is fine.

    Raises OSError if it is not there.
    """
    host = root.rstrip("/")
    at = ""  # the directory that was reached, without links; "": the root
    todo = ["/", *_parts(path)][::-1]
    links = 0
    while todo:
        name = todo.pop()
        if name == "..":
            at = at.rpartition("/")[0]
            continue
        place = "" if name == "/" else f"{at}/{name}"
        found = os.lstat(f"{host}{place}" if place else root)
        is_link, is_directory = stat.S_ISLNK(found.st_mode), stat.S_ISDIR(found.st_mode)
        writable = found.st_mode & _OTHERS_WRITE and not is_link
        if found.st_uid not in owners or (
            writable and not (is_directory and found.st_mode & stat.S_ISVTX)
        ):
            yield f"{place or '/'} {_owned(found)}"
        if is_link:
            links += 1
            if links > MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            target = os.readlink(f"{host}{place}")
            todo += _parts(target)[::-1]
            at = "" if target.startswith("/") else at
        else:
            at = place


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


def _make_directory(above: int, name: str, mode: int) -> bool:
    """Whether it was made."""
    try:
        os.mkdir(name, mode, dir_fd=above)
    except FileExistsError:
        return False
    return True


def _owned(found: os.stat_result) -> str:
    return f"belongs to user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):04o}"
