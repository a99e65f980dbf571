# SPDX-License-Identifier: Apache-2.0
"""The moment at which a dump is complete and its tasks still stand: CRIU's action script
`post-dump`. What that script says decides whether CRIU kills them.

This file is the script's second half as well, which runs beside criu, alone: it imports nothing of
the package. It asks the sender, and whatever goes wrong is a no: then CRIU lets the tasks run on.
"""

import errno
import os
import shlex
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_WAIT, _KILL, _KEEP = b".", b"K", b"R"
_BACKLOG = 4
_BEAT_S = 0.5
_LOOK_S = 0.1
# Who asks when there is nothing to decide costs no more than a shell. A script that was killed has
# failed, to CRIU as well.
_SCRIPT = """#!/bin/sh
[ "$CRTOOLS_SCRIPT_ACTION" = post-dump ] || exit 0
exec {words}
"""


class PostDump:
    """The sender's end. A thread of its own tells the script again and again that somebody will
    still decide, whatever else the sender is busy with.

    script: what criu is given as its action script.
    """

    def __init__(self, directory: Path, timeout_s: float) -> None:
        """directory: a private one, for the script and a socket. Raises OSError if it cannot hold
        them, or no program may be run from there: before anything is dumped."""
        self.script, place = directory / "post-dump", directory / "decision"
        words = [sys.executable, "-I", "-S", __file__, str(place), str(timeout_s)]
        self.script.write_text(_SCRIPT.format(words=shlex.join(words)))
        self.script.chmod(0o700)
        if not os.access(self.script, os.X_OK):
            raise OSError(errno.EACCES, "no program may be run from there (noexec)")
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _short(place) as address:
                self._listening.bind(address)
            self._listening.listen(_BACKLOG)
            self._listening.setblocking(False)
        except BaseException:
            self._listening.close()
            raise
        self._asked: socket.socket | None = None
        self._beaten = 0.0
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._attend, daemon=True)
        self._thread.start()

    def is_reached(self) -> bool:
        """Whether the dump is complete and the script asks."""
        with self._lock:
            if self._asked is None and not self._over.is_set():
                with suppress(BlockingIOError):
                    self._asked = self._listening.accept()[0]
                    self._asked.setblocking(False)
            return self._asked is not None

    def decide(self, *, kill: bool) -> None:
        """Whether CRIU may kill the tasks. A script that asks later, or again, hears no."""
        with self._lock:
            self._say(_KILL if kill else _KEEP)
        self.close()

    def close(self) -> None:
        """A script that waits takes this for a no."""
        self._over.set()
        self._thread.join()
        with self._lock:
            if self._asked is not None:
                self._asked.close()
                self._asked = None
            self._listening.close()

    def _attend(self) -> None:
        while not self._over.wait(_LOOK_S):
            if self.is_reached() and time.monotonic() > self._beaten + _BEAT_S:
                with self._lock:
                    if not self._over.is_set():
                        self._say(_WAIT)
                self._beaten = time.monotonic()

    def _say(self, word: bytes) -> None:
        if self._asked is not None:
            with suppress(OSError):  # it is gone: what became of the tasks is looked at anyway
                self._asked.send(word)


@contextmanager
def _short(place: Path) -> Iterator[str]:
    """An address of the socket at `place`, which may have a longer name than an address can."""
    directory = os.open(place.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{place.name}"
    finally:
        os.close(directory)


def _ask(place: str, timeout_s: float) -> int:
    """The script's exit status: 0: the tasks may be killed."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(timeout_s)
        try:
            with _short(Path(place)) as address:
                asking.connect(address)
            while (word := asking.recv(1)) == _WAIT:
                pass
        except OSError:
            return 1
    return 0 if word == _KILL else 1


if __name__ == "__main__":
    os._exit(_ask(sys.argv[1], float(sys.argv[2])))
