# SPDX-License-Identifier: Apache-2.0
"""What the receiver says to the sender, beside the work of both."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from gpustasis.errors import StreamError
from gpustasis.streaming.channel import Check, Descriptor
from gpustasis.streaming.records import ANSWER_MAGIC, Decoder, Encoder, Header, Kind, parse_text

_FOREVER = 1e9  # seconds
_STEP_S = 1.0
_LOOK_S = 0.05
_LONGEST_PATH = 4096  # characters
_MOST = 8  # answers that were not looked at yet
_GRACE_S = 3.0  # for what a receiver that gave up has still to say

Answer = tuple[Kind, dict[str, Any]]


class _Closed(Exception):
    """Nobody wants answers any more."""


class Answers:
    """The sender's view of the receiver. place: who that is, for messages. received: where it has
    put what it received, once it is all there; "": it has not said so. opens_sealed: it has said
    that it has a key for what is sealed."""

    def __init__(self, source: Descriptor, timeout_s: float) -> None:
        self.place = source.place
        self.received = ""
        self.opens_sealed = False
        self._source = source
        self._timeout_s = timeout_s
        self._closed = threading.Event()
        self._queue: queue.Queue[Answer | Exception] = queue.Queue()
        self._step: object = None
        self._expected: Kind | None = None
        self._come: Answer | None = None
        self._changed = time.monotonic()
        self._most_s = self._until = _FOREVER
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Read no more."""
        self._closed.set()
        self._thread.join()

    def last_progress(self) -> float:
        """When the receiver last said that its work goes on; monotonic seconds."""
        return self._changed

    def hello(self, check: Check) -> str:
        """Wait for the receiver's first word: its program and version. Raises StreamError if none
        comes, UnsupportedError if it cannot read our streams."""
        kind, fields = self._await(check)
        if kind is not Kind.HELLO:
            raise StreamError(f"{self.place} began with {kind.name} and no hello")
        self.opens_sealed = fields.get("sealed") is True
        return str(fields.get("program", ""))

    def check(self) -> None:
        """Raise StreamError if the receiver has given up or is gone."""
        with suppress(queue.Empty):
            item = self._taken(self._queue.get_nowait())
            if item[0] is not self._expected:
                self._no_step(item[0])
            self._come = item

    def expect(self, kind: Kind, check: Check, most_s: float = _FOREVER) -> dict[str, Any]:
        """Wait for an answer of that kind. Raises StreamError if another comes, or none: no sign of
        progress for as long as a stream may stall, or for `most_s` nothing but such signs."""
        self._changed = time.monotonic()
        self._most_s = most_s
        self._until = self._changed + most_s
        self._expected = kind
        while True:
            found, fields = self._await(check)
            if found is kind:
                return fields
            self._no_step(found)

    def last_words(self) -> StreamError | None:
        """Why the receiver gave up, if it says so within a moment."""
        end = time.monotonic() + _GRACE_S
        with suppress(queue.Empty):
            while True:
                item = self._queue.get(timeout=max(0.0, end - time.monotonic()))
                if isinstance(item, Exception):
                    break
                if item[0] is Kind.FAILED:
                    return self._gave_up(item)
        return None

    def _gave_up(self, item: Answer) -> StreamError:
        return StreamError(f"{self.place} gave up: {item[1].get('message', '')}")

    def _await(self, check: Check) -> Answer:
        while True:
            check()  # which may find it
            if self._come is not None:
                item, self._come = self._come, None
                return item
            with suppress(queue.Empty):
                return self._taken(self._queue.get(timeout=_LOOK_S))
            if time.monotonic() > self._changed + self._timeout_s:
                raise StreamError(
                    f"{self.place} shows no progress for {self._timeout_s:g} s: it stalls"
                )
            if time.monotonic() > self._until:
                raise StreamError(
                    f"{self.place} is at work for {self._most_s:g} s, and has not come to an end"
                )

    def _taken(self, item: Answer | Exception) -> Answer:
        if isinstance(item, Exception):
            self._queue.put(item)  # nothing follows; it stays the answer
            raise item
        if item[0] is Kind.FAILED:
            raise self._gave_up(item)
        return item

    def _note(self, item: Answer) -> None:
        """In the thread that reads. However much a receiver says, little of it is kept."""
        if item[0] is Kind.STEP:
            if item[1] != self._step:
                self._step, self._changed = item[1], time.monotonic()
            return
        if item[0] is Kind.READY:
            self.received = str(item[1].get("directory", ""))[:_LONGEST_PATH]
        if self._queue.qsize() < _MOST:
            self._queue.put(item)
        else:
            raise StreamError(f"{self.place} answers more than it is asked")

    def _no_step(self, kind: Kind) -> None:
        raise StreamError(f"{self.place} answered {kind.name}, which was not asked for")

    def _read(self) -> None:
        def fill(space: memoryview) -> None:
            self._source.fill(space, _FOREVER, self._stop)

        decoder = Decoder(fill, ANSWER_MAGIC, self.place)
        try:
            decoder.header()
            while True:
                self._stop()  # also of one who says so much that it is never waited for
                record = decoder.record()
                self._note((record.kind, parse_text(record, self.place)))
        except _Closed:
            pass
        except Exception as exc:  # noqa: BLE001 - the sender's thread raises it
            self._queue.put(exc)

    def _stop(self) -> None:
        if self._closed.is_set():
            raise _Closed


class Replies:
    """What the receiver tells the sender; nothing, where nobody listens."""

    def __init__(self, target: Descriptor | None, timeout_s: float) -> None:
        self._target = target
        self._timeout_s = timeout_s
        self._encoder = Encoder(ANSWER_MAGIC, Header())
        self._lock = threading.Lock()
        self._begun = False

    @property
    def wanted(self) -> bool:
        """Somebody listens."""
        return self._target is not None

    def tell(self, kind: Kind, check: Check = lambda: None, **fields: object) -> None:
        """Raises StreamError if the sender is gone."""
        if self._target is None:
            return
        with self._lock:
            if not self._begun:
                self._target.write(self._encoder.header, self._timeout_s, check)
                self._begun = True
            self._target.write(self._encoder.text(kind, fields), self._timeout_s, check)

    @contextmanager
    def steps(self, phase: str, count: Callable[[], int]) -> Iterator[None]:
        """Meanwhile tell how far the work has come: a sender that sees no change gives up."""
        done = threading.Event()

        def work() -> None:
            while not done.wait(_STEP_S):
                with suppress(StreamError):  # whoever needs the sender finds out that it is gone
                    self.tell(Kind.STEP, phase=phase, count=count())

        thread = threading.Thread(target=work, daemon=True)
        if self.wanted:
            thread.start()
        try:
            yield
        finally:
            done.set()
            if self.wanted:
                thread.join()
