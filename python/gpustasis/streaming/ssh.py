# SPDX-License-Identifier: Apache-2.0
"""A program at another host: its standard input and output are the two directions of a stream."""

from __future__ import annotations

import shlex
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from gpustasis.errors import StreamError
from gpustasis.streaming.channel import Descriptor

# A link that is dead is found within a minute. Nobody is there to be asked: ssh has no terminal.
_WORDS = (
    *("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=30"),
    *("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=3"),
)
_END_S = 15.0  # for what was written last to arrive, and the program there to end
_SAID = 4096  # bytes of its stderr that are kept


class Ssh:
    """Runs `words` at `host`. In a session of its own: Ctrl-C does not reach it."""

    def __init__(self, host: str, words: Sequence[str]) -> None:
        self.host = host
        self._said = b""
        argv = [*_WORDS, "--", host, shlex.join(words)]
        try:
            self._child = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as exc:
            raise StreamError(f"cannot run ssh: {exc.strerror}") from exc
        stdin, stdout = self._child.stdin, self._child.stdout
        assert stdin is not None
        assert stdout is not None
        self.out = Descriptor(stdin.fileno(), host, writing=True)
        self.back = Descriptor(stdout.fileno(), host, writing=False)
        stdin.close()
        stdout.close()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()

    def said(self) -> str:
        """The end of what ssh, or the program there, said on stderr, once it has ended."""
        self.end()
        return self._said.decode("utf-8", "replace").strip()

    def end(self) -> None:
        """Say that nothing more comes, and wait for its end; not for ever."""
        self.out.close()
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(_END_S)
        if self._child.returncode is None:
            self._child.kill()
            self._child.wait()
        self._listener.join(1.0)

    def _listen(self) -> None:
        assert self._child.stderr is not None
        while said := self._child.stderr.read1(_SAID):  # type: ignore[attr-defined]
            self._said = (self._said + said)[-_SAID:]
