# SPDX-License-Identifier: Apache-2.0
"""What a rank's keeper does with its dumps when they are committed, in the background: those in
memory are drained, and the neighbour is told what it can remove. The job runs meanwhile.

It is one thread, at the lowest priority. One dump is drained at a time, the oldest first. What is
left undone when the keeper ends, the rank's next keeper on this host does.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

from gpustasis._core import ARENA_MARKER
from gpustasis.draining.drain import drain
from gpustasis.draining.priority import lower
from gpustasis.errors import CheckpointError, ImageError, JobError
from gpustasis.image.directory import is_there
from gpustasis.jobs import neighbour
from gpustasis.jobs.dumps import criu_stamp_of, stamp_of
from gpustasis.jobs.owed import Errand, Owed, What
from gpustasis.jobs.place import Place
from gpustasis.peers.wire import RefusedError

log = logging.getLogger(__name__)

_AGAIN_S = 5.0  # after a drain that has failed; doubles each time
_MOST_S = 300.0
_POLL_S = 0.05


class Drained(Protocol):
    """Told that the dump in `images` is durable; its stamps before and after that."""

    def __call__(self, images: Path, before: str, now: str, /) -> None: ...


class _StoppedError(Exception):
    """The keeper ends in the middle of a drain, which leaves the dump in memory."""


class Aftercare:
    """Of one rank. is_open: whether the epoch under way dumps to that directory. The thread begins
    with the first call that gives it something to do."""

    def __init__(self, place: Place, *, is_open: Callable[[Path], bool], drained: Drained) -> None:
        self._place = place
        self._bases: set[Path] = set()  # that the next dump is to be built on
        self._is_open = is_open
        self._drained = drained
        self._change = threading.Condition()
        self._owed = Owed(place)
        self._errand_at = 0.0  # when the first of those is due, as time.monotonic()
        self._errand_again_s = _AGAIN_S
        self._unreached = 0  # errands that did not reach the neighbour
        self._asked = self._done = 0  # looks at what there is to drain
        self._at: Path | None = None  # is being drained
        self._to_copy: list[Path] = []  # were drained, and are bases
        self._waits = 0  # calls of wait() under way
        self._failed: dict[Path, str] = {}
        self._lost: set[Path] = set()
        self._again_s = _AGAIN_S
        self._copying = threading.Lock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """Drain what this rank has in memory on this host, and is in no open epoch; and tell the
        neighbour what it was not told."""
        if self._thread is None and self._owed.first() is None and not any(self._markers()):
            return
        with self._change:
            self._asked += 1
            self._errand_at = 0.0
            self._begin()

    def sent(self, images: Path, peer: str, key: str) -> None:
        """From now on the neighbour may have this copy of the dump there: until it is committed, or
        forgotten, the next keeper knows of it."""
        self._owed.sent(images, peer, key)

    def copy_of(self, images: Path) -> tuple[str, str] | None:
        """Neighbour and name of the copy of that dump, of whose epoch neither is known yet."""
        return self._owed.copy_of(images) or neighbour.find_copy(images)

    def sent_copy(self, images: Path) -> tuple[str, str] | None:
        """The same, as far as it was noted before it was sent: of another boot, too."""
        return self._owed.copy_of(images)

    def committed(self, images: Path, peer: str, key: str, *, is_base: bool) -> None:
        """The dump there, with this copy, is committed: older copies can go. Before this is noted
        elsewhere: should the keeper be killed, the next one says it again. is_base: the next one is
        to be built on it. Then it is copied once more when it is drained: the copy of the next one
        needs it as it is on the disk."""
        with self._change:
            if is_base:
                self._bases = {images}
        self._owe(What.DROP_OLDER, peer, key)

    def forget(self, peer: str, key: str) -> None:
        """The copy is of no epoch: have it removed."""
        self._owe(What.FORGET, peer, key)

    def _owe(self, what: What, peer: str, key: str) -> None:
        self._owed.add(what, peer, key)
        with self._change:
            self._errand_at = 0.0
            self._begin()

    @contextmanager
    def no_copy(self, goes_on: Callable[[], bool]) -> Iterator[None]:
        """In the block nothing is copied in the background: two copies of one dump at the same time
        are refused. goes_on: asked while one is under way; False: it is not waited for. Raises
        JobError then."""
        while not self._copying.acquire(timeout=_POLL_S):
            if not goes_on():
                raise JobError("the epoch is over, and an earlier dump is still being copied")
        try:
            yield
        finally:
            self._copying.release()

    def is_at(self, images: Path) -> bool:
        """Whether the dump there is being drained."""
        with self._change:
            return self._at == images

    def wait(self) -> dict[Path, str]:
        """Until all that was asked for so far was tried once more: what could not be drained, and
        why. Those that are lost are not in it. Nothing drained is copied meanwhile: the neighbour
        has a copy, and may be slow."""
        with self._change:
            if self._thread is None:
                return {}
            self._asked += 1
            self._waits += 1
            wanted, unreached = self._asked, self._unreached
            self._errand_at = 0.0
            self._change.notify_all()
            self._change.wait_for(
                lambda: (
                    self._done >= wanted
                    and (self._owed.first() is None or self._unreached > unreached)
                )
            )
            self._waits -= 1
            return dict(self._failed)

    def in_memory(self) -> list[Path]:
        """Dumps of this rank that are in memory only, and not lost, whatever their epochs are."""
        found = [marker.parent for marker in sorted(self._markers())]
        return [images for images in found if not neighbour.is_lost(images)]

    def close(self) -> None:
        """Stop, in the middle of a drain as well."""
        with self._change:
            self._over.set()
            self._change.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _begin(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True, name="aftercare")
            self._thread.start()
        self._change.notify_all()

    def _work(self) -> None:
        lower()
        while not self._over.is_set():
            errand, looks = self._next()
            try:
                if errand is not None:
                    self._run_errand(errand)
                if looks:
                    self._drain_all()
            except _StoppedError:
                return
            except Exception:  # the next look is made all the same
                log.exception("rank %d: what it has in memory", self._place.rank)
            with self._change:
                self._done = max(self._done, looks)
                self._change.notify_all()

    def _next(self) -> tuple[Errand | None, int]:
        """An errand that is due; or the number of a look, once that is due."""
        due = time.monotonic() + self._again_s
        with self._change:
            while not self._over.is_set():
                now = time.monotonic()
                errand = self._owed.first()
                if errand is not None and now >= self._errand_at:
                    return errand, 0
                if self._asked > self._done or (self._failed and now >= due):
                    return None, self._asked
                times = [due] if self._failed else []
                times += [self._errand_at] if errand is not None else []
                self._change.wait(min(times) - now if times else None)
        return None, 0

    def _run_errand(self, errand: Errand) -> None:
        what, peer, key = errand
        try:
            if what is What.FORGET:
                neighbour.forget(peer, key)
            else:
                neighbour.drop_older(peer, key)
        except RefusedError as exc:  # it has no such copy any more
            log.info("%s of the copy %s: %s", what, key, exc)
        except (CheckpointError, OSError) as exc:
            log.warning("%s of the copy %s at %s: %s", what, key, peer, exc)
            with self._change:
                self._owed.later(errand)
                self._unreached += 1
                self._errand_at = time.monotonic() + self._errand_again_s
                self._errand_again_s = min(_MOST_S, 2 * self._errand_again_s)
            return
        with self._change:
            self._owed.done(errand)
            self._errand_again_s = _AGAIN_S

    def _drain_all(self) -> None:
        failed: dict[Path, str] = {}
        for marker in sorted(self._markers()):
            images = marker.parent
            if images in self._lost or self._is_open(images):
                continue
            try:
                why_not = self._try_drain(images)
            except _StoppedError:
                raise
            except Exception as exc:  # the next one is drained all the same
                log.exception("%s: is not drained yet", images)
                why_not = f"this is a bug in gpustasis: {exc!r}"
            if why_not:
                failed[images] = why_not
        self._again_s = min(_MOST_S, 2 * self._again_s) if failed else _AGAIN_S
        with self._change:
            self._failed = failed
        while self._to_copy:
            self._copy(self._to_copy.pop(0))

    def _try_drain(self, images: Path) -> str:
        """Why the dump there is in memory only yet; "": it is not, or is lost."""
        try:
            self._drain(images)
        except FileNotFoundError:
            return ""  # it was pruned
        except (CheckpointError, OSError) as exc:
            if not is_there(images / ARENA_MARKER):
                return ""
            if isinstance(exc, ImageError) and neighbour.is_lost(images):
                self._lost.add(images)
                log.warning("%s: is not drained: %s", images, exc)
                return ""
            log.warning("%s: is not drained yet: %s", images, exc)
            return str(exc)
        return ""

    def _markers(self) -> Iterator[Path]:
        return self._place.directory.glob(f"epoch-{8 * '[0-9]'}/{ARENA_MARKER}")

    def _drain(self, images: Path) -> None:
        before, ours = stamp_of(images), criu_stamp_of(images)
        with self._change:
            self._at = images
        try:
            done = drain(images, on_progress=self._tell)
            if criu_stamp_of(images) == ours:
                self._drained(images, before, stamp_of(images))
        finally:
            with self._change:
                self._at = None
        log.info("%s is durable, after %.1f s", images, done.seconds)
        if images in self._bases:
            self._to_copy.append(images)

    def _copy(self, images: Path) -> None:
        with self._copying:
            if images in self._bases and self._goes_on():
                _run(f"{images}, drained", partial(neighbour.copy_durable, images, self._goes_on))

    def _goes_on(self) -> bool:
        """Whether a copy of what was drained does."""
        return not self._over.is_set() and not self._waits

    def _tell(self, done: int, total: int) -> None:
        if self._over.is_set():
            raise _StoppedError


def _run(what: str, act: Callable[[], None]) -> None:
    """At the neighbour, which may be gone: the next dump is copied all the same."""
    try:
        act()
    except (CheckpointError, OSError) as exc:
        log.warning("%s: %s", what, exc)


def settle_at(aftercare: Aftercare, images: Path, limit_s: float) -> bool:
    """Wait until the dump there is not being drained any more; False: it still is."""
    end = time.monotonic() + limit_s
    while aftercare.is_at(images):
        if time.monotonic() >= end:
            return False
        time.sleep(_POLL_S)
    return True


@contextmanager
def tended(aftercare: Aftercare, warn: Callable[[str], object]) -> Iterator[None]:
    """In the block dumps are drained that an earlier keeper has left, and those that are committed.
    What is in memory at its end is drained before it ends, if nothing is raised: it would be lost
    with the next start of the host. warn: told of what cannot be, or, for an error, is not."""
    aftercare.wake()
    try:
        yield
        for images, why in aftercare.wait().items():
            warn(f"{images} is in memory only, here and at the neighbour: {why}")
    except CheckpointError:
        aftercare.close()
        for images in aftercare.in_memory():
            warn(
                f"{images} is in memory only, here and at the neighbour: this keeper ends with an "
                "error, and the rank's next one on this host drains it"
            )
        raise
    finally:
        aftercare.close()
