# SPDX-License-Identifier: Apache-2.0
"""A store for one host: a tree behind a socket in a directory, for those of the same user and root.

A connection carries JSON objects, one a line: a request, its answer, and so on. After a watch is
asked for, lines with changes follow, and an empty line of changes now and then.
"""

from __future__ import annotations

import json
import os
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from gpustasis.errors import StoreError
from gpustasis.jobs.store import Change, Entry, LeaseGone, Put, Require, Snapshot, WatchLost
from gpustasis.jobs.tree import Tree

MAX_LINE_BYTES = 16 << 20
_BEAT_S = 0.5  # how often leases are looked at, and watches say that they live
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: unix(7), SO_PEERCRED


class Server:
    """Serves from when it is made until it is closed. Raises StoreError if it cannot.

    place: of the socket; whatever socket is there is replaced, so only one server may use it.
    """

    def __init__(self, place: Path, journal: Path) -> None:
        self.tree = Tree(journal, time.monotonic)
        try:
            place.unlink(missing_ok=True)
            self._server = _Listening(place, self.tree)
        except OSError as exc:
            self.tree.close()
            raise StoreError(f"cannot listen at {place}: {exc.strerror or exc}") from exc
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Every connection ends."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._server.end_connections()
        self.tree.close()


class _Listening(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, place: Path, tree: Tree) -> None:
        self.tree = tree
        self._open: set[socket.socket] = set()
        mask = os.umask(0o177)
        try:
            super().__init__(str(place), _Connection)
        finally:
            os.umask(mask)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection, in a thread of its own."""
        self._open = {other for other in self._open if other.fileno() >= 0} | {request}
        super().process_request(request, client_address)

    def end_connections(self) -> None:
        """Of those that are open: what is being written is written, and nothing more is read."""
        for request in self._open:
            with suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether the peer is one of ours."""
        sock = cast("socket.socket", request)
        found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return _CREDENTIALS.unpack(found)[1] in {0, os.geteuid()}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that broke concerns its peer only."""


class _Connection(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        tree = cast("_Listening", self.server).tree
        while line := self.rfile.readline(MAX_LINE_BYTES + 1):
            if len(line) > MAX_LINE_BYTES:
                self._say({"error": f"a request has more than {MAX_LINE_BYTES} bytes"})
                return
            try:
                request = json.loads(line)
                if request["do"] == "watch":
                    self._watch(tree, str(request["key"]), int(request["after"]))
                    return
                answer = _REQUESTS[request["do"]](tree, request)
            except LeaseGone as exc:
                answer = {"gone": str(exc)}
            except StoreError as exc:
                answer = {"error": str(exc)}
            except (ValueError, KeyError, TypeError, RecursionError) as exc:
                answer = {"error": f"no request that is known: {exc!r}"}
            self._say(answer)

    def _say(self, answer: dict[str, Any]) -> None:
        self.wfile.write(json.dumps(answer, separators=(",", ":")).encode() + b"\n")

    def _watch(self, tree: Tree, key: str, after: int) -> None:
        said_at = 0.0
        while True:
            try:
                changes, after = tree.changes(key, after)
            except WatchLost as exc:
                self._say({"lost": str(exc)})
                return
            if changes or time.monotonic() >= said_at + _BEAT_S:
                self._say({"changes": [asdict(change) for change in changes]})
                said_at = time.monotonic()
            with tree.changed:
                if not tree.changed_since(after):
                    tree.changed.wait(_BEAT_S)


def _read(tree: Tree, request: dict[str, Any]) -> dict[str, Any]:
    snapshot = tree.read([str(key) for key in request["keys"]])
    entries = {key: asdict(entry) for key, entry in snapshot.entries.items()}
    return {"revision": snapshot.revision, "entries": entries}


def _write(tree: Tree, request: dict[str, Any]) -> dict[str, Any]:
    requires = [Require(str(key), int(revision)) for key, revision in request["requires"]]
    puts = [Put(str(key), str(value), int(lease)) for key, value, lease in request["puts"]]
    return asdict(tree.write(requires, puts))


def _keep(tree: Tree, request: dict[str, Any]) -> dict[str, Any]:
    tree.keep(int(request["lease"]))
    return {}


def _revoke(tree: Tree, request: dict[str, Any]) -> dict[str, Any]:
    tree.revoke(int(request["lease"]))
    return {}


_REQUESTS: dict[str, Callable[[Tree, dict[str, Any]], dict[str, Any]]] = {
    "read": _read,
    "write": _write,
    "grant": lambda tree, request: {"lease": tree.grant(int(request["ttl"]))},
    "keep": _keep,
    "revoke": _revoke,
}


def snapshot_of(answer: dict[str, Any]) -> Snapshot:
    """What _read has answered. Raises KeyError, TypeError, ValueError."""
    entries = {
        str(key): Entry(str(entry["value"]), int(entry["revision"]))
        for key, entry in answer["entries"].items()
    }
    return Snapshot(int(answer["revision"]), entries)


def changes_of(answer: dict[str, Any]) -> list[Change]:
    """What a watch has said. Raises WatchLost, and as snapshot_of."""
    if "changes" not in answer:
        raise WatchLost(f"the store ended the watch: {answer.get('lost')!r}")
    changes = []
    for item in answer["changes"]:
        entry = item["entry"]
        found = None if entry is None else Entry(str(entry["value"]), int(entry["revision"]))
        changes.append(Change(str(item["key"]), found, int(item["revision"])))
    return changes
