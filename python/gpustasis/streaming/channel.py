# SPDX-License-Identifier: Apache-2.0
"""The two directions of a stream: descriptors that are waited for, but never for ever."""

from __future__ import annotations

import os
import select
import socket
import stat
import time
from collections.abc import Callable
from contextlib import suppress

from gpustasis.errors import StreamError

_SLICE_S = 0.2  # how often `check` is asked while there is nothing to do
_PIPE_SIZE = 1 << 20
_SET_PIPE_SIZE = 1031  # F_SETPIPE_SZ, linux/fcntl.h

Check = Callable[[], None]


class Descriptor:
    """One end of a pipe, a socket, or a file; its own, whatever becomes of the one it is made of.

    place: for messages. Raises StreamError if it is a terminal.
    """

    def __init__(self, fd: int, place: str, *, writing: bool) -> None:
        self.place = place
        self._socket: socket.socket | None = None
        mode = os.fstat(fd).st_mode
        self.regular = stat.S_ISREG(mode)
        self.is_socket = stat.S_ISSOCK(mode)
        if os.isatty(fd):
            raise StreamError(f"{place} is a terminal, and a stream is not for people")
        if self.is_socket:
            # Not set to be non-blocking: others may have the same socket.
            self._socket = socket.socket(fileno=os.dup(fd))
            self.fd = self._socket.fileno()
        elif stat.S_ISFIFO(mode):
            flags = os.O_WRONLY if writing else os.O_RDONLY
            try:
                self.fd = os.open(f"/proc/self/fd/{fd}", flags | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError as exc:
                raise StreamError(f"cannot open {place}: {exc.strerror}") from exc
            self._make_larger()
        else:
            self.fd = os.dup(fd)

    def close(self) -> None:
        """Say that nothing more comes."""
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)
            self._socket.close()
            self._socket = None
        elif self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    def end_writing(self) -> None:
        """The same of one direction of a socket."""
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)
        else:
            self.close()

    def write(
        self,
        data: memoryview | bytes,
        timeout_s: float,
        check: Check,
        last_progress: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Write all of it. Raises StreamError if it cannot be, or nothing goes for `timeout_s`;
        and what `check` raises, which is called whenever there is something to wait for.
        last_progress: when who reads has last said that it is at work; monotonic seconds."""
        left = memoryview(data)
        deadline = time.monotonic() + timeout_s
        while left:
            try:
                done = self._write_some(left)
            except BlockingIOError:
                end = max(deadline, last_progress() + timeout_s)
                self._wait(select.POLLOUT, end, timeout_s, check)
                continue
            except OSError as exc:
                raise StreamError(f"{self.place} broke off: {exc.strerror}") from exc
            left = left[done:]
            deadline = time.monotonic() + timeout_s

    def fill(self, space: memoryview, timeout_s: float, check: Check) -> None:
        """Read as much as fits. Raises as write; StreamError if it ends before."""
        if self._read(space, timeout_s, check) < len(space):
            raise StreamError(f"{self.place} ended before its end record was read")

    def require_end(self, timeout_s: float, check: Check) -> None:
        """Raise StreamError if anything more comes. A link that breaks now says the same."""
        space = memoryview(bytearray(1))
        try:
            found = self._read(space, timeout_s, check)
        except StreamError:
            return
        if found:
            raise StreamError(f"{self.place}: something follows the end of the stream")

    def is_at_end(self) -> bool:
        """Of a file: all of it was read."""
        return self.regular and os.lseek(self.fd, 0, os.SEEK_CUR) == os.fstat(self.fd).st_size

    def _read(self, space: memoryview, timeout_s: float, check: Check) -> int:
        filled = 0
        deadline = time.monotonic() + timeout_s
        while filled < len(space):
            try:
                count = self._read_some(space[filled:])
            except BlockingIOError:
                self._wait(select.POLLIN, deadline, timeout_s, check)
                continue
            except OSError as exc:
                raise StreamError(f"{self.place} broke off: {exc.strerror}") from exc
            if count == 0:
                break
            filled += count
            deadline = time.monotonic() + timeout_s
        return filled

    def _write_some(self, data: memoryview) -> int:
        if self._socket is not None:
            return self._socket.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        return os.write(self.fd, data)

    def _read_some(self, space: memoryview) -> int:
        if self._socket is not None:
            return self._socket.recv_into(space, 0, socket.MSG_DONTWAIT)
        return os.readv(self.fd, [space])

    def _wait(self, event: int, deadline: float, timeout_s: float, check: Check) -> None:
        poll = select.poll()
        poll.register(self.fd, event)
        check()
        if not poll.poll(_SLICE_S * 1000) and time.monotonic() > deadline:
            what = "takes" if event == select.POLLOUT else "brings"
            raise StreamError(f"{self.place} {what} nothing for {timeout_s:g} s: it stalls")

    def _make_larger(self) -> None:
        import fcntl

        with suppress(OSError):  # others have taken what this user may have of it
            fcntl.fcntl(self.fd, _SET_PIPE_SIZE, _PIPE_SIZE)
