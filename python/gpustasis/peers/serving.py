# SPDX-License-Identifier: Apache-2.0
"""Take copies of neighbours' checkpoints into memory, and hand them out again."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpustasis.errors import CheckpointError, PeerError
from gpustasis.peers import wire
from gpustasis.peers.config import Config
from gpustasis.peers.copies import OF_ONE_NODE, Copies, is_key, is_sent
from gpustasis.peers.orders import order_of
from gpustasis.peers.room import Promise
from gpustasis.peers.slots import Slots
from gpustasis.peers.wire import Connection, Source

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 64  # of nodes that may ask
# Of whoever comes, until it is known who that is: all ranks of a node may come at once, and a
# service has 1024 descriptors.
MAX_HANDSHAKES, MAX_OF_HOST = 512, 64
_MAX_KEYS = 200  # of one question; a chain is no longer
_BACKLOG = 512
_AGAIN_S = 0.1
_CHECK_S, _CHECK_RATE = 600, 8 << 20  # that who has fetched a copy may take to check it; bytes/s


class Server:
    """Serves from start() until close(), each connection in a thread."""

    def __init__(self, config: Config) -> None:
        if config.listen is None:
            raise PeerError("the configuration has no `listen`: there is nowhere to take copies")
        self._config = config
        self._context = wire.server_context(config)
        self._own = wire.own_certificate(config)
        self.copies = Copies(config)
        self._coming = Slots(MAX_HANDSHAKES, MAX_OF_HOST)
        self._open = threading.Semaphore(MAX_CONNECTIONS)
        self._closing = threading.Event()
        self._sock: socket.socket | None = None

    def start(self) -> None:
        """Listen. Raises PeerError."""
        assert self._config.listen is not None
        self.copies.prepare()
        address = self._config.listen
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        try:
            self._sock = socket.create_server(
                (address.host, address.port), family=family, backlog=_BACKLOG
            )
        except OSError as exc:
            raise PeerError(f"cannot listen at {address}: {exc.strerror}") from exc
        threading.Thread(target=self._accept, args=(self._sock,), daemon=True).start()

    def close(self) -> None:
        """No more connections; those that are open end with the process."""
        self._closing.set()
        if self._sock is not None:
            with suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            self._sock.close()
        self.copies.close()

    def _accept(self, sock: socket.socket) -> None:
        while not self._closing.is_set():
            try:
                plain, (host, *_) = sock.accept()
            except OSError as exc:
                if not self._closing.is_set():  # no descriptors, or a client that is gone already
                    log.warning("cannot take a connection: %s", exc)
                    self._closing.wait(_AGAIN_S)
                continue
            if not self._coming.take(host):
                plain.close()
                log.warning("too many connections of which nobody knows whose: one was refused")
                continue
            try:
                threading.Thread(target=self._serve, args=(plain, host), daemon=True).start()
            except RuntimeError as exc:  # no more threads
                log.warning("cannot serve a connection: %s", exc)
                plain.close()
                self._coming.give(host)

    def _serve(self, plain: socket.socket, host: str) -> None:
        with ExitStack() as coming, ExitStack() as served:
            coming.callback(self._coming.give, host)
            try:
                with wire.accept(plain, self._context, self._config) as connection:
                    try:
                        node = self._known(connection)
                        # Not before: whoever can reach the port would keep the nodes out.
                        if not self._open.acquire(blocking=False):
                            # Not in words: who hears a refusal does not ask again.
                            log.warning("%s: more than %d connections", node, MAX_CONNECTIONS)
                            return
                        served.callback(self._open.release)
                        coming.close()
                        self._answer(connection, node)
                    except (CheckpointError, OSError) as exc:
                        log.warning("%s: %s", connection.place, exc)
                        connection.refuse(str(exc))
            except CheckpointError as exc:
                log.warning("%s", exc)
            except Exception:
                log.exception("a connection")

    def _known(self, connection: Connection) -> str:
        """The name of the node at the other end. Raises PeerError if it may not ask."""
        node = connection.other
        connection.place = f"the node {node}"
        is_own = connection.is_of(self._own)
        if self._config.allow and node not in self._config.allow and not is_own:
            raise PeerError(f"{node} is not one of those that the key `allow` names")
        return node

    def _answer(self, connection: Connection, node: str) -> None:
        asked = connection.hear()
        if asked.get("version") != wire.PROTOCOL_VERSION:
            raise PeerError(f"version {asked.get('version')!r} is not spoken here")
        answers: dict[str, Callable[[Connection, str, dict[str, Any]], None]] = {
            "have": self._have,
            "keep": self._keep,
            "list": self._list,
            "fetch": self._fetch,
            "discard": self._discard,
            "drop-older": self._drop_older,
        }
        answer = answers.get(str(asked.get("ask")))
        if answer is None:
            raise PeerError(f"nothing is known of {asked.get('ask')!r}")
        answer(connection, node, asked)

    def _have(self, connection: Connection, node: str, asked: dict[str, Any]) -> None:
        keys = asked.get("keys")
        if not isinstance(keys, list) or len(keys) > _MAX_KEYS or not all(map(is_key, keys)):
            raise PeerError("'keys' are no names of copies")
        found = [key for key in keys if self.copies.find(key) is not None]
        connection.say({"have": found, "directory": str(self.copies.directory)})

    def _keep(self, connection: Connection, node: str, asked: dict[str, Any]) -> None:
        order = order_of(asked, node)

        def take(part: Path, promise: Promise) -> int:
            connection.say({"ready": True})
            return wire.take_files(connection, part, order.bytes, promise, never=OF_ONE_NODE)

        kept = self.copies.keep(order, take, connection.working(), last=asked.get("last") is True)
        log.info("%s: %s of %s is kept", node, kept.key, kept.store)
        connection.say({"kept": kept.key})

    def _list(self, connection: Connection, node: str, asked: dict[str, Any]) -> None:
        for one in self.copies.all():
            connection.say({"copy": asdict(one)})
        connection.say({"end": True})

    def _fetch(self, connection: Connection, node: str, asked: dict[str, Any]) -> None:
        key = asked.get("key")
        if not isinstance(key, str):
            raise PeerError("'key' is no name of a copy")
        with self.copies.pinned(key) as found:
            connection.say({"copy": asdict(found)})
            directory = self.copies.directory / key
            sources = [
                Source(path, path.name)
                for path in sorted(directory.iterdir())
                if is_sent(path.name) and not path.is_symlink()
            ]
            wire.send_files(connection, sources, on_bytes=lambda done: None)
            end = time.monotonic() + _CHECK_S + found.bytes / _CHECK_RATE

            def still() -> None:  # it is pinned meanwhile
                if time.monotonic() > end:
                    raise PeerError(f"{connection.place} is not done with {key}")

            connection.hear_end(still)  # that it is whole there

    def _discard(self, connection: Connection, node: str, asked: dict[str, Any]) -> None:
        anybody_s = connection.is_of(self._own)  # who has this node's key is its root
        self.copies.discard(str(asked.get("key")), "" if anybody_s else node)
        connection.say({"discarded": True})

    def _drop_older(self, connection: Connection, node: str, asked: dict[str, Any]) -> None:
        self.copies.drop_older(str(asked.get("key")), node)
        connection.say({"dropped": True})
