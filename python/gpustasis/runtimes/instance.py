# SPDX-License-Identifier: Apache-2.0
"""Which process it is that serves a Unix socket, and when that process has ended.

Source: unix(7), SO_PEERCRED: who has called listen(2); pidfd_open(2).
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from dataclasses import dataclass

from gpustasis.errors import CheckpointError, EngineError
from gpustasis.task import read_task

_PEER = struct.Struct("3i")  # pid, uid, gid
_CONNECT_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class Instance:
    """A process that serves a socket. start_time: clock ticks from boot to its start; with the pid,
    it tells this process from all others of this boot. handle: a pidfd, until close()."""

    pid: int
    start_time: int
    handle: int

    def has_ended(self) -> bool:
        return wait(0, self.handle)

    def close(self) -> None:
        os.close(self.handle)


def find_instance(path: str) -> Instance | str:
    """Who serves the socket at `path` now; a string says why nobody does.

    Raises EngineError if it cannot be told who does.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_CONNECT_TIMEOUT_S)
        try:
            connection.connect(path)
        except OSError as exc:
            if exc.errno in (errno.EACCES, errno.EPERM):
                raise EngineError(f"cannot connect to {path}: {exc.strerror}") from exc
            return f"cannot connect to {path}: {exc.strerror or exc}"
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        pid = _PEER.unpack(peer)[0]
        if pid == 0:
            raise EngineError(
                f"the process that serves {path} is not seen from here: run this in the host's pid "
                "namespace (of a pod: hostPID)"
            )
        if pid == 1:
            raise EngineError(
                f"process 1 has opened {path} for the runtime (socket activation): whether the "
                "runtime was started anew cannot be told"
            )
        ended = f"process {pid}, which has served {path}, has just ended"
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            return ended
        except OSError as exc:
            raise EngineError(f"cannot watch process {pid}: {exc.strerror}") from exc
        found = None
        try:
            start_time = read_task(pid).start_time
            # A process that ends closes its connections before its pid can be another's.
            if _is_open(connection):
                found = Instance(pid, start_time, handle)
        except CheckpointError:
            pass  # it has ended
        finally:
            if found is None:
                os.close(handle)
        return found or ended


def wait(seconds: float, *handles: int) -> bool:
    """Until one of the descriptors is readable, at most so long; whether one is."""
    waiting = select.poll()
    for handle in handles:
        waiting.register(handle, select.POLLIN)
    return bool(waiting.poll(seconds * 1000))


def _is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False
