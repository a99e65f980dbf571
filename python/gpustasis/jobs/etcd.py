# SPDX-License-Identifier: Apache-2.0
"""etcd 3 as a store, over the JSON gateway that every etcd >= 3.4 serves beside gRPC.

Our own small client: every call has a deadline, there are several endpoints, client certificates
and a password, and no write is sent twice.
"""

from __future__ import annotations

import http.client
import json
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from gpustasis.errors import StoreError
from gpustasis.jobs.etcd_words import (
    MAX_LINE_BYTES,
    Access,
    Refused,
    Server,
    changes_of,
    coded,
    context_of,
    entry_of,
    object_of,
    parsing,
    range_of,
    refused_of,
    server_of,
)
from gpustasis.jobs.store import (
    Answer,
    Change,
    Entry,
    LeaseGone,
    Put,
    Require,
    Snapshot,
    Unreachable,
    WatchLost,
)

_MAX_OPERATIONS = 128  # of a transaction, as etcd is built: --max-txn-ops
_MAX_ENTRIES = 1024  # of one range in one answer: clients do not wait long
_MAX_ANSWER_BYTES = 256 << 20
_UNAVAILABLE = {4, 8, 14}  # gRPC's codes: deadline exceeded, resource exhausted, unavailable
_NOT_FOUND = 5
_OUT_OF_RANGE = 11
# A peer that vanished without a word is found out after about this many seconds.
_KEEPALIVE = {"TCP_KEEPIDLE": 3, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}

_Result = TypeVar("_Result")


class _NoSuchRevision(StoreError):
    """It has been compacted, or is not there yet."""


class Etcd:
    """A store (jobs.store.Store). Raises StoreError if the access cannot be used at all."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._servers = [server_of(url) for url in access.endpoints]
        if not self._servers:
            raise StoreError("etcd: no endpoint is named")
        self._context = context_of(access) if any(s.secure for s in self._servers) else None
        self._lock = threading.Lock()
        self._first = 0  # the server that answered last
        self._connection: http.client.HTTPConnection | None = None
        self._token = ""
        self._watches: set[EtcdWatch] = set()

    def read(self, *keys: str) -> Snapshot:
        try:
            return self._read(keys)
        except _NoSuchRevision:  # somebody has compacted in between
            return self._read(keys)

    def _read(self, keys: Sequence[str]) -> Snapshot:
        entries: dict[str, Entry] = {}
        at: dict[str, str] = {}  # the revision of the first answer, for all others
        ranges = [range_of(key) for key in keys]
        while ranges or not at:
            part, ranges = ranges[:_MAX_OPERATIONS], ranges[_MAX_OPERATIONS:]
            asked = [{"request_range": {**one, **at, "limit": str(_MAX_ENTRIES)}} for one in part]
            answer = self._ask("/v3/kv/txn", {"success": asked}, again=True)
            with parsing("a range"):
                at = at or {"revision": str(int(answer["header"]["revision"]))}
                for one, found in zip(part, answer.get("responses", []), strict=True):
                    items = found["response_range"].get("kvs", [])
                    entries.update(entry_of(item) for item in items)
                    if found["response_range"].get("more"):
                        if not items:
                            raise ValueError("more, and nothing of it")
                        ranges.append({**one, "key": coded(entry_of(items[-1])[0] + "\0")})
        return Snapshot(int(at["revision"]), entries)

    def write(self, requires: Sequence[Require], puts: Sequence[Put]) -> Answer:
        body = {
            "compare": [
                {
                    "key": coded(require.key),
                    "target": "MOD",
                    "result": "EQUAL",
                    "mod_revision": str(require.revision),
                }
                for require in requires
            ],
            "success": [
                {
                    "request_put": {
                        "key": coded(put.key),
                        "value": coded(put.value),
                        "lease": str(put.lease),
                    }
                }
                for put in puts
            ],
        }
        answer = self._ask("/v3/kv/txn", body, again=False)
        with parsing("a transaction"):
            return Answer(bool(answer.get("succeeded")), int(answer["header"]["revision"]))

    def grant(self, ttl_s: int) -> int:
        answer = self._ask("/v3/lease/grant", {"TTL": str(ttl_s)}, again=True)
        with parsing("a lease"):
            return int(answer["ID"])

    def keep(self, lease: int) -> None:
        answer = self._ask("/v3/lease/keepalive", {"ID": str(lease)}, again=True)
        with parsing("a lease"):
            if int(answer["result"].get("TTL", 0)) <= 0:
                raise LeaseGone(f"lease {lease} has expired")

    def revoke(self, lease: int) -> None:
        with suppress(LeaseGone):
            self._ask("/v3/lease/revoke", {"ID": str(lease)}, again=True)

    def watch(self, key: str, after: int) -> EtcdWatch:
        body = {"create_request": {**range_of(key), "start_revision": str(after + 1)}}

        def begin(connection: http.client.HTTPConnection) -> EtcdWatch:
            response = self._post(connection, "/v3/watch", body)
            if connection.sock is None:
                raise http.client.HTTPException("the server ends the connection of a watch")
            for name, value in _KEEPALIVE.items():
                connection.sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.sock.settimeout(None)
            return EtcdWatch(connection, response)

        watch = self._withserver_of(begin, fresh=True, again=True)
        with self._lock:
            self._watches = {other for other in self._watches if not other.closed} | {watch}
        return watch

    def close(self) -> None:
        with self._lock:
            watches, self._watches = self._watches, set()
            if self._connection is not None:
                self._connection.close()
                self._connection = None
        for watch in watches:
            watch.close()

    def _ask(self, path: str, body: Mapping[str, Any], *, again: bool) -> dict[str, Any]:
        """again: it may be sent to another server when nobody knows what became of it."""

        def ask(connection: http.client.HTTPConnection) -> dict[str, Any]:
            response = self._post(connection, path, body)
            data = response.read(_MAX_ANSWER_BYTES + 1)
            if len(data) > _MAX_ANSWER_BYTES:
                raise StoreError(f"etcd: an answer has more than {_MAX_ANSWER_BYTES} bytes")
            answer = object_of(data)
            if "error" in answer:  # of a stream, whose status says nothing
                raise refused_of(data, response.status)
            return answer

        with self._lock:
            return self._withserver_of(ask, fresh=False, again=again)

    def _withserver_of(
        self,
        use: Callable[[http.client.HTTPConnection], _Result],
        *,
        fresh: bool,
        again: bool,
    ) -> _Result:
        """What `use` returns with a connection to the first server that answers. fresh: with a
        connection of its own, which it keeps."""
        problems = []
        for number in range(len(self._servers)):
            server = self._servers[(self._first + number) % len(self._servers)]
            try:
                connection = self._connected(server, fresh)
            except OSError as exc:
                problems.append(f"{server.url}: {exc}")
                continue
            try:
                result = self._authenticated(connection, use)
            except Refused as exc:
                self._drop(connection)
                if exc.code == _NOT_FOUND and "lease" in str(exc):
                    raise LeaseGone(f"etcd: {exc}") from exc
                if exc.code not in _UNAVAILABLE:
                    kind = _NoSuchRevision if exc.code == _OUT_OF_RANGE else StoreError
                    raise kind(f"etcd at {server.url} refused: {exc}") from exc
                problems.append(f"{server.url}: {exc}")
            except (OSError, http.client.HTTPException) as exc:
                self._drop(connection)
                problems.append(f"{server.url}: {exc or type(exc).__name__}")
            except BaseException:
                self._drop(connection)
                raise
            else:
                self._first = (self._first + number) % len(self._servers)
                return result
            if not again:
                break
        self._first += 1
        raise Unreachable("etcd cannot be reached: " + "; ".join(problems))

    def _connected(self, server: Server, fresh: bool) -> http.client.HTTPConnection:
        kept = self._connection
        if not fresh and kept is not None:
            if (kept.host, kept.port) == (server.host, server.port) and _is_quiet(kept):
                return kept
            kept.close()
            self._connection = None
        timeout_s = self._access.timeout_s
        connection: http.client.HTTPConnection
        if server.secure:
            connection = http.client.HTTPSConnection(
                server.host, server.port, timeout=timeout_s, context=self._context
            )
        else:
            connection = http.client.HTTPConnection(server.host, server.port, timeout=timeout_s)
        connection.connect()
        assert connection.sock is not None
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not fresh:
            self._connection = connection
        return connection

    def _drop(self, connection: http.client.HTTPConnection) -> None:
        connection.close()
        if connection is self._connection:
            self._connection = None

    def _authenticated(
        self,
        connection: http.client.HTTPConnection,
        use: Callable[[http.client.HTTPConnection], _Result],
    ) -> _Result:
        """With a token, and a new one if that is too old."""
        if self._access.user and not self._token:
            self._token = self._new_token(connection)
        try:
            return use(connection)
        except Refused as exc:
            if not self._access.user or not exc.is_of_old_token:
                raise
        self._token = self._new_token(connection)
        return use(connection)

    def _new_token(self, connection: http.client.HTTPConnection) -> str:
        self._token = ""
        body = {"name": self._access.user, "password": self._access.password}
        answer = object_of(self._post(connection, "/v3/auth/authenticate", body).read())
        with parsing("a token"):
            return str(answer["token"])

    def _post(
        self, connection: http.client.HTTPConnection, path: str, body: Mapping[str, Any]
    ) -> http.client.HTTPResponse:
        """Raises Refused, OSError, HTTPException."""
        headers = {"Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = self._token
        connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        if response.status == http.client.OK:
            return response
        refused = refused_of(response.read(MAX_LINE_BYTES), response.status)
        raise Refused(refused.code, f"{refused} ({path}, HTTP status {response.status})")


class EtcdWatch:
    """A watch (jobs.store.Watch): a thread reads the stream."""

    def __init__(
        self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse
    ) -> None:
        self.closed = False
        self._connection = connection
        self._response = response
        # The response has taken the connection's socket; closing needs it.
        self._socket = connection.sock
        self._changes: queue.Queue[list[Change] | WatchLost] = queue.Queue()
        self._lost: WatchLost | None = None
        self._thread = threading.Thread(target=self._read, daemon=True, name="etcd watch")
        self._thread.start()

    def wait(self, timeout_s: float) -> Sequence[Change]:
        if self._lost is not None:
            raise self._lost
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                changes = self._changes.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return []
            if isinstance(changes, WatchLost):
                self._lost = changes
                raise changes
            if changes:
                return changes

    def close(self) -> None:
        self.closed = True
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._response.close()
        self._connection.close()

    def _read(self) -> None:
        try:
            while line := self._response.readline(MAX_LINE_BYTES):
                self._changes.put(changes_of(object_of(line)))
            problem = "etcd ended the watch"
        except (OSError, ValueError, http.client.HTTPException, StoreError) as exc:
            problem = f"etcd's watch broke: {exc}"
        self._changes.put(WatchLost(problem))


def _is_quiet(connection: http.client.HTTPConnection) -> bool:
    """Whether an idle connection still stands: a server that closed it has said so."""
    if connection.sock is None:
        return False
    poll = select.poll()
    poll.register(connection.sock, select.POLLIN)
    return not poll.poll(0)
