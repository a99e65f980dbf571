# SPDX-License-Identifier: Apache-2.0
"""A dump under way, whether it may end the job, and what became of the job."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpustasis.criu.run import Run
from gpustasis.errors import CheckpointError, StreamError
from gpustasis.image.directory import allow_many_files
from gpustasis.streaming.post_dump import PostDump
from gpustasis.streaming.tree import Tree
from gpustasis.text import plural

log = logging.getLogger(__name__)

TICK_S = 0.02
_ENDING_S = 5.0  # for tasks that are being killed, before they are killed once more

# Dumps into a directory, with further arguments for criu.
Dump = Callable[[Path, Sequence[str]], Run]


@dataclass(frozen=True, slots=True)
class Fate:
    """Of a job after a failure. wrong: why it cannot be said that it runs on; empty: it does.
    runs: which of its processes do, for a sentence."""

    wrong: str = ""
    runs: str = ""


class Dumping:
    """A dump in a thread of its own. committed: criu may have been told to end the job. done, or
    failed: how it ended."""

    def __init__(
        self, dump: Dump, pid: int, images: Path, private: Path, timeout_s: float, keep: bool
    ) -> None:
        """private: a directory for the question. timeout_s: how long criu may take to end the job.
        keep: it runs on, and nothing is asked."""
        allow_many_files()  # one for each process
        self.images = images
        self.committed = False
        self.done: Run | None = None
        self.failed: BaseException | None = None
        self._dump = dump
        self._keep = keep
        self._timeout_s = timeout_s
        self._stood = False
        self._tree = Tree(pid)
        try:
            self._post_dump = PostDump(private, timeout_s)
        except OSError as exc:
            self._tree.close()
            raise CheckpointError(
                f"cannot use {private}: {exc.strerror}; name another directory by TMPDIR"
            ) from exc
        # Nobody waits for a criu that hangs for ever.
        self._thread = threading.Thread(target=self._work, daemon=True)

    def close(self) -> None:
        """Let go of what is held."""
        self._post_dump.close()
        self._tree.close()

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def is_over(self) -> bool:
        """It has begun and ended."""
        return self._thread.ident is not None and not self._thread.is_alive()

    def is_complete(self) -> bool:
        """All is dumped, and the tasks stand. From then on nothing but criu changes them, so it is
        told now which they are: before, any could end, or begin."""
        if self._keep or not self._post_dump.is_reached():
            return False
        if not self._stood:
            self._tree = self._anew()
            self._tree.note_dropped()
            self._stood = True
        return True

    def require_dumped(self) -> None:
        """Once it is over: raise what it raised."""
        self._thread.join()
        if self.failed is not None:
            raise self.failed
        if not self._keep and not self.committed:
            raise StreamError("criu has ended without asking whether it may end the job")

    def end_job(self, check: Callable[[], None], idle: Callable[[], None]) -> None:
        """Have criu kill the tasks, and see each of them end. Raises StreamError, or what the dump
        raised. check: may still raise before; idle: called while it is waited."""
        tree = self._tree
        tree.require_all(self.images)
        check()
        self.committed = True
        self._post_dump.decide(kill=True)
        limit = time.monotonic() + self._timeout_s
        while self._thread.is_alive():
            if time.monotonic() > limit:
                raise StreamError(
                    f"criu has not ended {self._timeout_s:g} s after it was told to end the job: "
                    "look what holds it up, and kill it"
                )
            idle()
            time.sleep(TICK_S)
        if not tree.all_ended(_ENDING_S, idle):
            if not tree.is_ending():
                raise self.failed or StreamError("criu has ended, and the job has not")
            tree.kill()  # what is left of a job that criu, dying, has ended in part
            if not tree.all_ended(self._timeout_s, idle):
                raise StreamError(f"not every process of the job has ended, of {tree.pids}")
        if self.failed is not None:
            log.warning("the job was ended, but: %s", self.failed)

    def fate(self) -> Fate:
        """What became of the job, after a failure; it is let run on, unless criu was told to end it
        and has begun to."""
        if not self.committed:
            self._post_dump.decide(kill=False)
            if self._thread.ident is not None:
                self._thread.join()
        elif self._thread.is_alive():
            return Fate("criu is still at work")
        elif self._tree.is_ending():  # never in part
            self._tree.kill()
            self._tree.all_ended(_ENDING_S, lambda: None)
        gone: tuple[int, ...] = ()
        if not self._stood:
            gone = self._tree.died()
            try:
                self._tree = self._anew()
            except CheckpointError as exc:
                return Fate(str(exc))
            if self.done is None and (wrong := self._tree.note_stored(self.images)):
                return Fate(wrong)
        if wrong := self._tree.why_not_running(self.images, maybe_killed=self.committed):
            return Fate(wrong)
        gone = tuple(sorted({*gone, *self._tree.died()}))
        live = len(self._tree.pids) - len(self._tree.ended())
        runs = f"all {live} of its processes are alive"
        if gone:
            ended = f"{plural(len(gone), 'process', 'es')} that ended meanwhile"
            runs += f", beside {ended}: {', '.join(map(str, gone))}"
        return Fate(runs=runs)

    def _anew(self) -> Tree:
        """The tree as it is now. Its root is the same process: the pidfd of it is held until the
        new one is."""
        before = self._tree
        if before.root in before.died():
            raise CheckpointError(f"process {before.root} has ended")
        found = Tree(before.root)
        if before.root in before.died():
            found.close()
            raise CheckpointError(f"process {before.root} has ended")
        before.close()
        return found

    def _work(self) -> None:
        words = () if self._keep else ("--action-script", str(self._post_dump.script))
        try:
            self.done = self._dump(self.images, words)
        except BaseException as exc:  # noqa: BLE001 - raised by the thread that sends
            self.failed = exc
