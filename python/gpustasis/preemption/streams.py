# SPDX-License-Identifier: Apache-2.0
"""What a job writes to: pipes of its supervisor's, which hands on what comes.

A job that is checkpointed loses its terminal, its file or the pipe to whoever reads it. With a pipe
of the supervisor's in between, all that it wrote before the dump is handed on by the one
supervisor, and all that it writes after the restore by the next, whatever their own stdout is.
"""

from __future__ import annotations

import os
import select
import threading

_BLOCK = 1 << 16


class Outlet:
    """One pipe, and the thread that hands on what comes to `target`, a descriptor.

    writing: the job's end, until give_away(). number: the pipe's inode.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._reading, self.writing = os.pipe2(os.O_CLOEXEC)
        self._last = os.eventfd(0, os.EFD_CLOEXEC)
        self.number = os.fstat(self.writing).st_ino
        self._thread = threading.Thread(target=self._hand_on, daemon=True)
        self._thread.start()

    def give_away(self) -> None:
        """The job has its end: when it closes it, nothing more can come."""
        os.close(self.writing)
        self.writing = -1

    def finish(self, patience_s: float) -> bool:
        """Hand on what is in the pipe, and no more: what outlives the job may hold its end. Whether
        all of it went: who gets it may not read. Then this process is to end."""
        if self.writing >= 0:
            self.give_away()
        os.eventfd_write(self._last, 1)
        self._thread.join(patience_s)
        if self._thread.is_alive():
            return False
        os.close(self._last)
        return True

    def _hand_on(self) -> None:
        try:
            while self._is_due():
                block = os.read(self._reading, _BLOCK)
                if not block:
                    return
                self._write(block)
        except OSError:
            return  # nobody reads: the job learns of that when it writes
        finally:
            os.close(self._reading)

    def _is_due(self) -> bool:
        """Wait until something came; False: nothing has, and nothing more is asked for."""
        ready, _, _ = select.select([self._reading, self._last], [], [])
        return self._reading in ready

    def _write(self, block: bytes) -> None:
        while block:
            try:
                block = block[os.write(self._target, block) :]
            except BlockingIOError:  # whoever has it too has set it so
                select.select([], [self._target], [])
