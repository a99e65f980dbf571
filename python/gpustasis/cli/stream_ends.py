# SPDX-License-Identifier: Apache-2.0
"""Descriptors that a stream goes to or comes from."""

from __future__ import annotations

import os
import secrets
from contextlib import ExitStack, suppress
from pathlib import Path

from gpustasis.errors import CheckpointError, StreamError
from gpustasis.files import give_name, open_new
from gpustasis.streaming.answers import Answers
from gpustasis.streaming.channel import Descriptor
from gpustasis.streaming.send import Target

STDIN, STDOUT, STDERR = 0, 1, 2


def standard_output(opened: ExitStack, timeout_s: float, one_way: bool) -> Target:
    """What `checkpoint -o -` writes to, and who answers there, if it is a socket."""
    open_missing()
    out = taken_over(opened, STDOUT, "standard output")
    answers = None
    if out.is_socket and not one_way:
        back = Descriptor(out.fd, "the receiver", writing=False)
        opened.callback(back.close)
        answers = Answers(back, timeout_s)
        opened.callback(answers.close)
    return Target(out=out, answers=answers, timeout_s=timeout_s)


def taken_over(opened: ExitStack, fd: int, place: str) -> Descriptor:
    """What `fd` was, to write to; whatever is said there goes to stderr from now on."""
    taken = os.dup(fd)
    try:
        os.dup2(STDERR, fd)
        found = Descriptor(taken, place, writing=True)
    finally:
        os.close(taken)  # whoever reads a pipe waits for the last of its writers
    opened.callback(found.close)
    return found


def open_missing() -> None:
    """Of the three that every program has, those that were closed: no file of ours may be taken for
    one of them."""
    for fd in (STDIN, STDOUT, STDERR):
        try:
            os.fstat(fd)
        except OSError:
            if fd == STDOUT:
                raise StreamError("standard output is closed") from None
            os.dup2(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC), fd)


def new_file(opened: ExitStack, path: Path, timeout_s: float) -> Target:
    """A file that has its name once it holds a checkpoint. Raises CheckpointError."""
    if os.path.lexists(path):
        raise CheckpointError(f"{path} is there already; name a new file")
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        file = opened.enter_context(open_new(part))
    except OSError as exc:
        raise CheckpointError(f"cannot make {path}: {exc.strerror}") from exc
    opened.callback(_unlink, part)
    out = Descriptor(file.fileno(), str(path), writing=True)
    opened.callback(out.close)
    named = False

    def name_file() -> None:
        nonlocal named
        give_name(part, path)
        named = True

    def discard() -> None:
        with suppress(OSError):
            # Whoever took that file away may have put another in its place.
            if named and os.path.samestat(os.fstat(file.fileno()), path.lstat()):
                path.unlink()

    return Target(out=out, name_file=name_file, discard=discard, timeout_s=timeout_s)


def open_stream(opened: ExitStack, name: str) -> Descriptor:
    """A file to be read. Raises StreamError."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as exc:
        raise StreamError(f"cannot open {name}: {exc.strerror}") from exc
    opened.callback(os.close, fd)
    stream = Descriptor(fd, name, writing=False)
    opened.callback(stream.close)
    return stream


def _unlink(path: Path) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)
