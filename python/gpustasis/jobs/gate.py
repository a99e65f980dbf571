# SPDX-License-Identifier: Apache-2.0
"""Where a criu waits until somebody decides: one of its action scripts, `post-dump` or
`pre-resume`. The tasks stand until then.

The script belongs to no keeper: one that ends leaves it waiting, and the next one of the rank finds
it. It is a shell, and reads the decision from a FIFO; only criu's death, or its own by SIGKILL,
ends it before one comes.
"""

from __future__ import annotations

import errno
import os
import select
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

from gpustasis.criu.find import Criu
from gpustasis.errors import JobError

# By criu and its script: a supervisor that ends the keeper often tells all that it has started.
IGNORED = "HUP INT QUIT ALRM TERM USR1 USR2 PIPE"
_YES, _NO = b"yes\n", b"no\n"
# Of read and write, so that it neither waits for the other end nor sees it close.
_SCRIPT = """\
#!/bin/sh
trap '' {ignored}
[ "$CRTOOLS_SCRIPT_ACTION" = {action} ] || exit 0
exec 3<>{decision} 4<>{reached} || exit 1
echo "$CRTOOLS_INIT_PID" >&4
read -r word <&3
[ "$word" = yes ]
"""


@dataclass(frozen=True, slots=True)
class Unsignalled(Criu):
    """A criu that ignores what its script ignores. Tasks are restored with their own handling."""

    def command(self, environ: Mapping[str, str]) -> list[str]:
        """As Criu.command."""
        words = ["/bin/sh", "-c", f"trap '' {IGNORED}; exec \"$@\"", "sh"]
        return [*words, *Criu.command(self, environ)]


def unsignalled(criu: Criu) -> Unsignalled:
    """The same program."""
    return Unsignalled(**{one.name: getattr(criu, one.name) for one in fields(criu)})


class Gate:
    """place: a directory for two FIFOs, of this host. script: what criu is given; another place,
    since programs often cannot be run from /run."""

    def __init__(self, place: Path, script: Path) -> None:
        self.script = script
        self._decision = place / "decision"
        self._reached = place / "reached"

    def prepare(self, action: str) -> None:
        """For a criu that is to be started. Raises JobError if nothing can be run from there."""
        for fifo in (self._decision, self._reached):
            fifo.unlink(missing_ok=True)
            os.mkfifo(fifo, 0o600)
        self.script.unlink(missing_ok=True)
        text = _SCRIPT.format(
            ignored=IGNORED,
            action=action,
            decision=shlex.quote(str(self._decision)),
            reached=shlex.quote(str(self._reached)),
        )
        descriptor = os.open(self.script, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o700)
        with open(descriptor, "w") as file:
            file.write(text)
        if not os.access(self.script, os.X_OK):
            raise JobError(f"{self.script.parent}: no program may be run from there (noexec)")

    def is_held(self) -> bool:
        """Whether a criu waits there."""
        try:
            os.close(self._open())
        except OSError as exc:
            if exc.errno not in {errno.ENXIO, errno.ENOENT}:
                raise
            return False
        return True

    def say(self, *, yes: bool) -> bool:
        """Whether there was somebody to hear it."""
        try:
            descriptor = self._open()
        except OSError as exc:
            if exc.errno not in {errno.ENXIO, errno.ENOENT}:
                raise
            return False
        try:
            os.write(descriptor, _YES if yes else _NO)
        except BrokenPipeError:
            return False
        finally:
            os.close(descriptor)
        return True

    def close(self) -> None:
        """Nobody will wait there any more."""
        for place in (self._decision, self._reached, self.script):
            with suppress(OSError):
                place.unlink(missing_ok=True)

    def _open(self) -> int:
        return os.open(self._decision, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    def listen(self) -> Arrival:
        """Before criu is started."""
        return Arrival(os.open(self._reached, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))


class Arrival:
    """Hears when a criu has come to the gate."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def wait(self, timeout_s: float) -> bool:
        """Whether it has, by then."""
        return bool(select.select([self._descriptor], [], [], timeout_s)[0])

    def fileno(self) -> int:
        return self._descriptor

    def close(self) -> None:
        os.close(self._descriptor)
