# SPDX-License-Identifier: Apache-2.0
"""Safe points: places in a program's loop at which a checkpoint of its whole job may be made.

    gpustasis.job.safe_point(before=take_communicators_down, after=make_them_again)

The rank's keeper and the program share a file of a few words, their seat. The program counts its
calls there. The keeper asks there, reads the count, and says in which call to stop, the same for
all ranks. Meanwhile the program goes no further than into the call after the one that was read.
Nothing is taken down before all ranks have stopped: if one does not, all go on as they were.
docs/jobs.md has how it is used; jobs/safe_point.py is the keeper's side.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections.abc import Callable

from gpustasis.errors import JobError

__all__ = ["safe_point"]

# The seat: native 8-byte words, and what they hold. The first three are the keeper's.
SEAT_VARIABLE = "GPUSTASIS_SAFE_POINT"  # the path, in the environment of a rank's command
SEAT_BYTES = 4096
ASKED = 0  # a number that was not there before, for each time that is asked; 0: nobody asks
STOP = 1  # the call in which to stop; 0: it is not known yet
DOWN = 2  # for which asking `before` is to be called: all ranks have stopped
PID = 3  # of the process that calls, in its own namespace; 0: none has called yet
CALLS = 4  # how often it has, with the one that it is in
WAITS = 5  # for which asking it has stopped
STANDS = 6  # for which asking `before` is done
FAILED = 7  # for which asking `before` has raised an exception
WORDS = 8
WORD_BYTES = 8

_SHORTEST_S, _LONGEST_S = 0.001, 0.02  # between two looks at the seat


def safe_point(
    *, before: Callable[[], object] | None = None, after: Callable[[], object] | None = None
) -> bool:
    """A checkpoint of the job may be made here. Whether one was, or was tried.

    Call it once in each step of the loop, in one process of each rank, the same number of times in
    all ranks. While nobody asks for a checkpoint, or the program was not started by
    `gpustasis job run --safe-points`, it returns at once. Else all ranks stop in the same call:
    `before` is called, which closes what cannot be checkpointed; the rank waits until it was
    checkpointed, or restored, or the checkpoint was given up; `after` is called, which makes anew
    what `before` has closed. What they raise is raised here.

    Raises JobError if the seat cannot be used, or another process of the rank has it.
    """
    return _end.call(before, after)


class _End:
    """The program's end of the seat. calls, path: go with the process through a checkpoint."""

    def __init__(self, path: str) -> None:
        self.calls = 0
        self._path = path
        self._map: mmap.mmap | None = None
        self._words: memoryview | None = None
        self._was_there = False

    def call(self, before: Callable[[], object] | None, after: Callable[[], object] | None) -> bool:
        if not self._path:
            return False
        self.calls += 1
        words = self._words
        if words is None:
            words = self._attach()
            if words is None:
                return False
        words[CALLS] = self.calls
        asked = words[ASKED]
        if not asked or not self._is_to_go_down(words, asked):
            return False
        self._take_down(words, asked, before)
        self._wait(asked)
        self._attach()
        if after is not None:
            after()
        return True

    def forget(self) -> None:
        """In a forked child: the seat is its parent's."""
        self._detach()
        self.calls = 0
        self._was_there = False

    def _is_to_go_down(self, words: memoryview, asked: int) -> bool:
        """Waits until that is known. False: not in this call, or nobody asks any more."""
        pause_s = _SHORTEST_S
        while words[ASKED] == asked:
            if words[DOWN] == asked:
                return True
            if stop := words[STOP]:
                if self.calls < stop:
                    return False
                words[WAITS] = asked
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_S)
        return bool(words[DOWN] == asked)  # the others do it, although it was given up meanwhile

    def _take_down(
        self, words: memoryview, asked: int, before: Callable[[], object] | None
    ) -> None:
        try:
            if before is not None:
                before()
        except BaseException:
            words[FAILED] = asked
            raise
        words[STANDS] = asked
        self._detach()  # the seat is no part of what is dumped

    def _wait(self, asked: int) -> None:
        """Until nobody asks this any more; in a process that was restored as well."""
        pause_s = _SHORTEST_S
        while self._is_asked(asked):
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_S)

    def _is_asked(self, asked: int) -> bool:
        """It is mapped and open only for as long as this takes."""
        try:
            with open(self._path, "rb", buffering=0) as seat:
                found = seat.read(WORDS * WORD_BYTES)
        except FileNotFoundError:  # restored elsewhere, where nobody has asked
            return False
        except OSError:  # a file system that is away: nobody has said that it may go on
            return True
        return len(found) == WORDS * WORD_BYTES and memoryview(found).cast("Q")[ASKED] == asked

    def _attach(self) -> memoryview | None:
        """None: it was there, and is not any more, as after a restore elsewhere."""
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                self._map = mmap.mmap(descriptor, SEAT_BYTES)  # which keeps a descriptor of its own
                words = memoryview(self._map).cast("Q")
                self._words = words
                self._take(words)
            finally:
                fcntl.flock(descriptor, fcntl.LOCK_UN)
                os.close(descriptor)
        except (OSError, ValueError) as exc:  # ValueError: it is too short
            if self._was_there:
                return None
            raise JobError(
                f"safe_point: cannot use {self._path}, which {SEAT_VARIABLE} names: {exc}"
            ) from exc
        self._was_there = True
        return words

    def _take(self, words: memoryview) -> None:
        own, other = os.getpid(), words[PID]
        if other not in (0, own) and _lives(other):
            self._detach()
            raise JobError(
                f"safe_point: process {other} of this rank calls it already, and process {own} "
                "does, too: call it in one process of each rank"
            )
        words[CALLS] = self.calls
        words[PID] = own

    def _detach(self) -> None:
        if self._words is not None:
            self._words.release()
            self._words = None
        if self._map is not None:
            self._map.close()
            self._map = None


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


_end = _End(os.environ.get(SEAT_VARIABLE, ""))
os.register_at_fork(after_in_child=_end.forget)
