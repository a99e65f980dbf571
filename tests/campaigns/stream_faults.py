# SPDX-License-Identifier: Apache-2.0
"""What happens to a stream on its way: a relay between both ends cuts, changes or holds it."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace

WAIT_S = 60.0
_PIECE = 64 << 10
_RECORD_SIZE = 32  # bytes of a record without content


@dataclass(slots=True)
class Fault:
    """What happens to a stream. kind: "none", "cut", "flip", "stall" after that many bytes of the
    stream (back: of the answers), "unreleased": cut before the record that releases the job, or
    "kill" of a process after that many seconds; at_ready: from when the receiver says that it is
    ready. slow_s: for each piece of the stream. held: the sender is told that only when
    the victim is dead."""

    kind: str = "none"
    after: int = 0
    back: bool = False
    victim: str = ""
    seconds: float = 0.0
    at_ready: bool = False
    slow_s: float = 0.0
    held: bool = False

    def __str__(self) -> str:
        if self.kind == "kill":
            begin = "ready" if self.at_ready else "the start"
            return f"{self.victim} killed {self.seconds * 1000:.0f} ms after {begin}"
        return f"{self.kind} after {self.after} bytes" + (" of the answers" if self.back else "")


@dataclass(slots=True)
class Relay:
    """Passes bytes on between a sender's socket and a receiver's, and does what the fault says."""

    near: socket.socket
    far: socket.socket
    fault: Fault
    forward: int = 0
    backward: int = 0
    ready: threading.Event = field(default_factory=threading.Event)
    killed: threading.Event = field(default_factory=threading.Event)
    _stopped: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        for back in (False, True):
            thread = threading.Thread(target=self._pass, args=(back,), daemon=True)
            thread.start()
            self._threads.append(thread)

    def end(self) -> None:
        """Also of one that stands still."""
        self._stopped.set()
        for end in (self.near, self.far):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self.near.close()
        self.far.close()

    def _pass(self, back: bool) -> None:
        source, target = (self.far, self.near) if back else (self.near, self.far)
        fault = replace(self.fault) if self.fault.back == back else Fault()
        done = 0
        with suppress(OSError):
            while data := bytearray(source.recv(_PIECE)):
                if self.fault.slow_s and not back:
                    time.sleep(self.fault.slow_s)
                if back and b'"digest"' in data:  # it has said so, whatever becomes of that
                    self.ready.set()
                    if self.fault.held:
                        self.killed.wait(WAIT_S)
                hit = fault.kind in ("cut", "flip", "stall") and done + len(data) > fault.after
                if hit and fault.kind == "flip":
                    data[max(0, fault.after - done)] ^= 0x10
                    fault = Fault()
                elif hit:
                    target.sendall(data[: max(0, fault.after - done)])
                    if fault.kind == "cut":
                        break
                    self._stopped.wait()
                    return
                if fault.kind == "unreleased" and _is_release(data):
                    fault.kind = "cut"
                    break
                target.sendall(data)
                done += len(data)
                if back:
                    self.backward = done
                else:
                    self.forward = done
        _shut(target, socket.SHUT_WR)
        if fault.kind == "cut":
            _shut(self.near, socket.SHUT_RDWR)
            _shut(self.far, socket.SHUT_WR)
        if back:
            self._hear_the_rest()

    def _hear_the_rest(self) -> None:
        """What the receiver says before it hears of the cut, and does not come through."""
        with suppress(OSError):
            while data := self.far.recv(_PIECE):
                if b'"digest"' in data:
                    self.ready.set()


def _shut(end: socket.socket, how: int) -> None:
    with suppress(OSError):  # the other side has done it
        end.shutdown(how)


def _is_release(data: bytes) -> bool:
    """Whether a piece ends with the record that the job has ended: docs/format.md, "Streams"."""
    return len(data) >= _RECORD_SIZE and data[8 - _RECORD_SIZE :][:5] == b"\0\0\0\0\5"
