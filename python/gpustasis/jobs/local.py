# SPDX-License-Identifier: Apache-2.0
"""The store for one host, as a client sees it: a socket that server.py serves."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from gpustasis.errors import StoreError
from gpustasis.jobs.server import MAX_LINE_BYTES, changes_of, snapshot_of
from gpustasis.jobs.store import (
    Answer,
    Change,
    LeaseGone,
    Put,
    Require,
    Snapshot,
    Unreachable,
    WatchLost,
)

_SILENCE_S = 5.0  # of a watch, whose server speaks twice a second


class Local:
    """A store (jobs.store.Store). timeout_s: of a request."""

    def __init__(self, place: Path, timeout_s: float = 2.0) -> None:
        self._place = place
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._line: _Line | None = None
        self._watches: list[LocalWatch] = []

    def read(self, *keys: str) -> Snapshot:
        answer = self._ask({"do": "read", "keys": keys})
        with _Parsing():
            return snapshot_of(answer)

    def write(self, requires: Sequence[Require], puts: Sequence[Put]) -> Answer:
        answer = self._ask(
            {
                "do": "write",
                "requires": [[require.key, require.revision] for require in requires],
                "puts": [[put.key, put.value, put.lease] for put in puts],
            }
        )
        with _Parsing():
            return Answer(bool(answer["applied"]), int(answer["revision"]))

    def grant(self, ttl_s: int) -> int:
        answer = self._ask({"do": "grant", "ttl": ttl_s})
        with _Parsing():
            return int(answer["lease"])

    def keep(self, lease: int) -> None:
        self._ask({"do": "keep", "lease": lease})

    def revoke(self, lease: int) -> None:
        self._ask({"do": "revoke", "lease": lease})

    def watch(self, key: str, after: int) -> LocalWatch:
        line = _Line(self._place, self._timeout_s)
        line.say({"do": "watch", "key": key, "after": after})
        watch = LocalWatch(line)
        self._watches.append(watch)
        return watch

    def close(self) -> None:
        with self._lock:
            if self._line is not None:
                self._line.close()
                self._line = None
        for watch in self._watches:
            watch.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            if self._line is not None and not self._line.is_quiet():
                self._line.close()
                self._line = None
            try:
                self._line = self._line or _Line(self._place, self._timeout_s)
                self._line.say(request)
                answer = self._line.hear(self._timeout_s)
                if answer is None:
                    raise Unreachable(f"{self._place}: no answer for {self._timeout_s:g} s")
            except StoreError:
                if self._line is not None:  # an answer that comes later is not the next one's
                    self._line.close()
                    self._line = None
                raise
        if "gone" in answer:
            raise LeaseGone(str(answer["gone"]))
        if "error" in answer:
            raise StoreError(f"the store at {self._place} refused: {answer['error']}")
        return answer


class LocalWatch:
    """A watch (jobs.store.Watch)."""

    def __init__(self, line: _Line) -> None:
        self._line = line
        self._lost: WatchLost | None = None
        self._heard = time.monotonic()

    def wait(self, timeout_s: float) -> Sequence[Change]:
        if self._lost is not None:
            raise self._lost
        deadline = time.monotonic() + timeout_s
        changes: Sequence[Change] = []
        try:
            while not changes and (answer := self._line.hear(deadline - time.monotonic())):
                self._heard = time.monotonic()
                with _Parsing():
                    changes = changes_of(answer)
        except StoreError as exc:
            self._lost = exc if isinstance(exc, WatchLost) else WatchLost(str(exc))
            raise self._lost from exc
        if time.monotonic() - self._heard > _SILENCE_S:
            self._lost = WatchLost("the store's watch is silent")
        return changes

    def close(self) -> None:
        self._line.close()


class _Line:
    """A connection that carries lines. Raises Unreachable."""

    def __init__(self, place: Path, timeout_s: float) -> None:
        self._place = place
        self._timeout_s = timeout_s
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout_s)
        self._heard = bytearray()
        try:
            self._socket.connect(str(place))
        except OSError as exc:
            self._socket.close()
            raise Unreachable(
                f"no store answers at {place}: {exc.strerror or exc}; `gpustasis agent run` serves "
                "one at the jobs_socket of its configuration"
            ) from exc

    def is_quiet(self) -> bool:
        """Whether the server has not closed it while nothing was asked."""
        try:
            self._socket.setblocking(False)
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return not self._heard
        except OSError:
            return False
        return False

    def say(self, request: dict[str, Any]) -> None:
        try:
            self._socket.settimeout(self._timeout_s)
            self._socket.sendall(json.dumps(request).encode() + b"\n")
        except OSError as exc:
            raise Unreachable(f"the store at {self._place} broke off: {exc}") from exc

    def hear(self, timeout_s: float) -> dict[str, Any] | None:
        """The next object; None: there was none in that time."""
        while b"\n" not in self._heard:
            try:
                self._socket.settimeout(max(timeout_s, 0.001))
                data = self._socket.recv(1 << 16)
            except TimeoutError:
                return None
            except OSError as exc:
                raise Unreachable(f"the store at {self._place} broke off: {exc}") from exc
            if not data:
                raise Unreachable(f"the store at {self._place} broke off")
            self._heard += data
            if len(self._heard) > 16 * MAX_LINE_BYTES:
                raise StoreError(f"the store at {self._place} says too much at once")
        line, _, rest = bytes(self._heard).partition(b"\n")
        self._heard = bytearray(rest)
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError) as exc:
            raise StoreError(f"the store at {self._place} does not speak JSON: {exc}") from exc
        if not isinstance(answer, dict):
            raise StoreError(f"the store at {self._place} says no JSON object")
        return answer

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class _Parsing:
    """Have an answer that is not what it should be end as a StoreError."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, KeyError | TypeError | ValueError | AttributeError):
            raise StoreError(f"the store's answer is not one: {error!r}") from error
