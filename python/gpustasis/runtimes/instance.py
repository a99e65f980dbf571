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
        pid = _peer(connection)
        _require_seen(pid, path)
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


def require_sight(pid: int) -> None:
    """Raise EngineError unless what that process, a runtime, and those that it starts have open is
    seen from here: a dump that is under way is known by that. task.open_files believes nobody in
    another pid namespace, and no other user."""
    place = f"/proc/{pid}"
    try:
        os.listdir(f"{place}/fd")
        is_here = os.path.samestat(os.stat(f"{place}/ns/pid"), os.stat("/proc/self/ns/pid"))
        user = os.stat(place).st_uid
    except PermissionError as exc:
        raise EngineError(
            f"cannot see what process {pid} has open, so no dump under way would be seen either: "
            "run this as root, with CAP_SYS_PTRACE (of a pod: privileged)"
        ) from exc
    except (FileNotFoundError, ProcessLookupError):
        return  # it has ended
    if not is_here:
        raise EngineError(
            f"the runtime, process {pid}, is in another pid namespace: no dump of its would be "
            "seen. Run this in that one (of kind, k3d: in the container that is the node)"
        )
    if user != os.geteuid():
        raise EngineError(
            f"the runtime, process {pid}, is of user {user}: no dump of its would be seen. Run "
            "this as that user"
        )


def require_sight_of_server(path: str, left: str = "") -> None:
    """The same of whoever serves the socket at `path`; also if it cannot be told who does. Of one
    that serves it no more, whatever it has left at work was of the same namespace. left: what to
    say first of what stays as it is."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_CONNECT_TIMEOUT_S)
            connection.connect(path)
            pid = _peer(connection)
        _require_seen(pid, path)
        require_sight(pid)
    except (ConnectionRefusedError, FileNotFoundError):
        return
    except OSError as exc:
        why = f"cannot connect to {path}: {exc.strerror or exc}"
        raise EngineError(f"{left}: {why}" if left else why) from exc
    except EngineError as exc:
        raise EngineError(f"{left}: {exc}" if left else f"{exc}") from exc


def _peer(connection: socket.socket) -> int:
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return int(_PEER.unpack(peer)[0])


def _require_seen(pid: int, path: str) -> None:
    if pid == 0:
        raise EngineError(
            f"the process that serves {path} is not seen from here: run this in the host's pid "
            "namespace (of a pod: hostPID)"
        )


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
