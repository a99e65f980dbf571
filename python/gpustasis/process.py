# SPDX-License-Identifier: Apache-2.0
"""The one door to other programs: run one, wait for it, keep what it said."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, BinaryIO, Self, cast

log = logging.getLogger(__name__)

OUTPUT_LIMIT = 1 << 20  # bytes of output kept, counted from its end
TICK_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A program that has ended.

    status: its exit status; negative: the signal that killed it.
    output: stdout and stderr together; of a program that was run with `apart`, stdout, and errors
    is
        stderr. Of each at most the last OUTPUT_LIMIT bytes.
    seconds: from start to end.
    """

    argv: tuple[str, ...]
    status: int
    output: str
    seconds: float
    errors: str = ""

    @property
    def ending(self) -> str:
        """How it ended, for a sentence: "exit 1", "killed by signal 9"."""
        return f"exit {self.status}" if self.status >= 0 else f"killed by signal {-self.status}"


def _new_file(in_memory: bool) -> BinaryIO:
    if in_memory:
        return open(os.memfd_create("gpustasis"), "w+b")
    return cast("BinaryIO", tempfile.TemporaryFile())


class _Pipe:
    """What a bounded program writes its errors to: it waits when nobody reads them, so it cannot
    fill memory between two looks. Its end is not waited for: what it leaves running may hold it."""

    def __enter__(self) -> Self:
        self._reading, self.writing = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._reading, False)
        with contextlib.suppress(OSError):  # more than this user may have: it waits more often
            fcntl.fcntl(self.writing, fcntl.F_SETPIPE_SZ, OUTPUT_LIMIT)
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._reading)
        os.close(self.writing)

    def read_into(self, errors: BinaryIO) -> None:
        """Move what is there. Raises OSError if it is too much."""
        while True:
            if errors.tell() > OUTPUT_LIMIT:
                raise OSError(errno.EFBIG, f"it wrote more than {OUTPUT_LIMIT} bytes of errors")
            try:
                errors.write(os.read(self._reading, OUTPUT_LIMIT))
            except BlockingIOError:
                return


def run(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    shielded: bool = False,
    terminal: bool = False,
    apart: bool = False,
    bounded: bool = False,
    stdin: int | None = None,
    stdout: int | None = None,
    pass_fds: Sequence[int] = (),
    timeout_s: float | None = None,
    ignore_signals: bool = False,
    on_start: Callable[[int], None] | None = None,
    on_tick: Callable[[], None] | None = None,
) -> Finished:
    """Run argv and wait for its end.

    env: its whole environment; None: this process's own.
    shielded: Ctrl-C does not reach it, and waiting for it cannot be interrupted: for work that
        must not stop half-way.
    terminal: it keeps this process's stdin, stdout and stderr, and `output` is empty. Otherwise
        stdin is empty.
    apart: stdout and stderr are kept apart, so that a warning is not taken for its answer, and in
        memory only: an answer may be a secret.
    bounded: it has a session of its own, and so no terminal to ask on; where it would be killed,
        all of its process group is. So it is if it writes more than OUTPUT_LIMIT bytes to stderr,
        and it waits until these were read: only with `apart`.
    stdin: a descriptor to read from instead of nothing. stdout: one to write to; `output` is empty
        then.
    pass_fds: descriptors that it has as well, under the same numbers.
    timeout_s: it is killed after that long.
    ignore_signals: SIGPIPE and SIGXFSZ are ignored, as by Python: a write that they are of fails,
        and the program lives to say so.
    on_start: told its pid.
    on_tick: called about every TICK_S seconds while it runs.

    Raises OSError if it cannot be started or wrote too much, TimeoutError if it took too long.
    """
    begin = time.monotonic()
    # A file, not a pipe: what outlives the program (a restored task) may hold it open for ever.
    with (
        _new_file(apart) as output,
        _new_file(apart) as errors,
        _Pipe() if bounded else contextlib.nullcontext() as pipe,
    ):
        given = subprocess.DEVNULL if stdin is None else stdin
        written: int | BinaryIO = output if stdout is None else stdout
        child = subprocess.Popen(
            list(argv),
            env=None if env is None else dict(env),
            stdin=None if terminal else given,
            stdout=None if terminal else written,
            stderr=pipe.writing if pipe else errors if apart else None if terminal else written,
            process_group=0 if shielded and not bounded else None,
            start_new_session=bounded,
            pass_fds=tuple(pass_fds),
            restore_signals=not ignore_signals,
        )
        if on_start is not None:
            on_start(child.pid)

        def tick() -> None:
            if pipe is not None:
                pipe.read_into(errors)
            if on_tick is not None:
                on_tick()

        try:
            status = _wait(
                child, argv[0], shielded, None if timeout_s is None else begin + timeout_s, tick
            )
        except BaseException as exc:
            if not shielded or isinstance(exc, TimeoutError):
                _kill(child, bounded)
            child.wait()
            raise
        if pipe is not None:
            pipe.read_into(errors)
        return Finished(
            argv=tuple(argv),
            status=status,
            output=_end_of(output),
            errors=_end_of(errors),
            seconds=time.monotonic() - begin,
        )


def _kill(child: subprocess.Popen[bytes], group: bool) -> None:
    """group: with all that is in its process group; it was not waited for yet, so it is its own."""
    if group and child.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    child.kill()


def _end_of(file: IO[bytes]) -> str:
    size = file.seek(0, 2)
    file.seek(max(0, size - OUTPUT_LIMIT))
    return file.read(OUTPUT_LIMIT).decode("utf-8", "replace")


def _wait(
    child: subprocess.Popen[bytes],
    name: str,
    shielded: bool,
    deadline: float | None,
    on_tick: Callable[[], None],
) -> int:
    with _End(child) as end:
        while True:
            try:
                if end.has_come(TICK_S):
                    return child.wait()
                on_tick()
            except KeyboardInterrupt:
                if not shielded:
                    raise
                log.warning("this cannot be stopped half-way; waiting for %s to end", name)
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"{name} did not end in time and was killed")


class _End:
    """The end of a child. Popen.wait with a timeout sees it up to 50 ms late."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self._child = child
        self._pidfd = -1
        with contextlib.suppress(OSError):  # without a descriptor it is seen late
            self._pidfd = os.pidfd_open(child.pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)

    def has_come(self, timeout_s: float) -> bool:
        """Whether it has, by then."""
        if self._pidfd >= 0:
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            return bool(poll.poll(1000 * timeout_s))
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(timeout_s)
            return True
        return False
