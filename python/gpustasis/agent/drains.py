# SPDX-License-Identifier: Apache-2.0
"""What the agent's checkpoints have in memory is brought to the disk, while their jobs run.

One thread, at the lowest priority, drains one checkpoint at a time, the oldest first. What cannot
be drained now stays in memory, and is tried again. Killed, the agent leaves each of them local or
durable; the next one drains what is left.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from gpustasis._core import ARENA_MARKER
from gpustasis.agent.config import Config
from gpustasis.agent.in_memory import is_broken_off, is_lost
from gpustasis.agent.work import REQUESTED, TARGETS
from gpustasis.draining.drain import drain
from gpustasis.draining.priority import lower
from gpustasis.errors import CheckpointError, ImageError
from gpustasis.image.arena import Tier, find_marker
from gpustasis.image.directory import is_there
from gpustasis.image.store import read_entry

log = logging.getLogger(__name__)

_AGAIN_S = 5.0  # after a drain that has failed; doubles each time
_MOST_S = 300.0


class _StoppedError(Exception):
    """The agent ends in the middle of a drain, which leaves the checkpoint in memory."""


class Drains:
    """Until close() is called. on_end: told of each that is on the disk by now, whoever has drained
    it, and with None of each that is no more."""

    def __init__(self, config: Config, on_end: Callable[[Path, Tier | None], None]) -> None:
        self._config = config
        self._on_end = on_end
        self._changed = threading.Condition()
        self._todo: dict[Path, str] = {}  # and why it could not be drained the last time
        self._not_over: set[Path] = set()
        self._closing = self._stopped = False
        self._again_s = _AGAIN_S
        self._thread = threading.Thread(target=self._work, daemon=True, name="drains")

    def start(self, not_over: Callable[[Path], bool], local: Iterable[Path] = ()) -> None:
        """Begin, with what agents before this one have left. not_over: whether the dump there has
        not ended yet: add() is called when it has. local: what is known to have been in memory."""
        store = self._config.store
        left = [*store.glob(f"{TARGETS}/*/*/{ARENA_MARKER}")]
        left += store.glob(f"{REQUESTED}/*/*/*/{ARENA_MARKER}")
        for marker in sorted(left, key=lambda one: one.parent.name):  # by time
            if not_over(marker.parent):
                self._not_over.add(marker.parent)
            else:
                self._todo[marker.parent] = ""
        for place in local:
            self._todo.setdefault(place, "")  # others may have drained it
        self._thread.start()

    def add(self, place: Path) -> None:
        """The checkpoint there was made, if it was."""
        is_marked = True
        with suppress(CheckpointError):  # what cannot be told now is looked at again
            is_marked = is_there(place / ARENA_MARKER)
        with self._changed:
            self._not_over.discard(place)
            if is_marked:
                self._todo.setdefault(place, "")
                self._changed.notify_all()

    def count(self) -> int:
        """How many are in memory alone."""
        with self._changed:
            return len(self._todo) + len(self._not_over)

    def close(self, timeout_s: float) -> bool:
        """Drain what is left, each once more; stop in the middle of one after `timeout_s` seconds.
        Whether all is on the disk."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
            self._stopped = True
            self._thread.join()
        with self._changed:
            return not self._todo and not self._not_over

    def _work(self) -> None:
        lower()
        while True:
            with self._changed:
                places = [*self._todo]
                last = self._closing
            try:
                for place in places:
                    why_not = self._drain(place)
                    with self._changed:
                        if why_not:
                            self._todo[place] = why_not
                        else:
                            del self._todo[place]
            except _StoppedError:
                return
            with self._changed:
                failed = any(self._todo.values())
                self._again_s = min(_MOST_S, 2 * self._again_s) if failed else _AGAIN_S
                if last:
                    return
                self._changed.wait_for(
                    lambda: self._closing or "" in self._todo.values(),
                    self._again_s if failed else None,
                )

    def _drain(self, place: Path) -> str:
        """Why it was not drained; "": it was, or there is nothing in memory."""
        begin = time.monotonic()
        try:
            if not is_there(place / ARENA_MARKER):
                entry = read_entry(place)
                if entry.unread:
                    raise ImageError(entry.unread)
                # Else it was pruned, or given up.
                self._on_end(place, None if entry.incomplete else Tier.DURABLE)
                return ""
            entry = read_entry(place)
            if why_not := entry.unread or entry.incomplete:
                if not _is_lost(place) and not is_broken_off(entry):
                    raise ImageError(why_not)
                log.warning("%s is not drained: %s", place, why_not)
                self._on_end(place, None)
                return ""
            drain(place, rate=self._config.drain_rate, on_progress=self._tell)
            log.info("%s is %s after %.1f s", place, Tier.DURABLE.value, time.monotonic() - begin)
            self._on_end(place, Tier.DURABLE)
        except (CheckpointError, OSError) as exc:
            with suppress(CheckpointError):
                if not is_there(place):
                    self._on_end(place, None)
                    return ""
            why_not = str(exc) or repr(exc)  # nothing said would mean that it is drained
            log.warning("%s is not drained yet: %s", place, why_not)
            return why_not
        except _StoppedError:
            raise
        except Exception as exc:
            log.exception("draining %s", place)
            return f"this is a bug in gpustasis: {exc!r}"
        return ""

    def _tell(self, _done: int, _total: int) -> None:
        if self._stopped:
            raise _StoppedError


def _is_lost(place: Path) -> bool:
    """Whether what the marker there names is. An empty one is of a node that has lost its power: a
    dump puts it there with all that it says. Raises CheckpointError."""
    marker = find_marker(place)
    return is_there(place / ARENA_MARKER) if marker is None else is_lost(place)
