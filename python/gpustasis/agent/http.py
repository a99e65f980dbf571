# SPDX-License-Identifier: Apache-2.0
"""Metrics and health over HTTP: on a Unix socket, and on a port of 127.0.0.1 if that is wanted.

Everybody on the node may ask. There is nothing in the answers that only some may know.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

from gpustasis.agent import metrics
from gpustasis.agent.config import Config
from gpustasis.agent.server import listen
from gpustasis.errors import AgentError

log = logging.getLogger(__name__)

_HEAD_LIMIT = 8192  # bytes
_MAX_CONNECTIONS = 32
_PATIENCE_S = 5.0
_LOCAL = "127.0.0.1"
_STATUS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    501: "Not Implemented",
    503: "Service Unavailable",
}
_PARTS = 3  # of a request's first line
_REFUSED = 400
_JSON = "application/json"

Counts = Callable[[], tuple[int, int]]
Local = Callable[[], int]


class Http:
    """Serves from start() until close()."""

    def __init__(
        self, config: Config, figures: metrics.Metrics, counts: Counts, local: Local
    ) -> None:
        self._config = config
        self._figures = figures
        self._counts = counts
        self._local = local
        self._servers: list[asyncio.Server] = []
        self._open = 0
        self.wrong = ""  # why the agent is not healthy
        self.port = 0  # that it listens on

    async def start(self) -> None:
        """Raises AgentError."""
        if self._config.http_socket is not None:
            sock = listen(self._config.http_socket, 0o666)
            made = await asyncio.start_unix_server(self._connected, sock=sock, limit=_HEAD_LIMIT)
            self._servers.append(made)
        if self._config.http_port:
            try:
                made = await asyncio.start_server(
                    self._connected, _LOCAL, self._config.http_port, limit=_HEAD_LIMIT
                )
            except OSError as exc:
                raise AgentError(
                    f"cannot listen on {_LOCAL}:{self._config.http_port}: {exc.strerror}"
                ) from exc
            self._servers.append(made)

    def close(self) -> None:
        for server in self._servers:
            server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            if self._open <= _MAX_CONNECTIONS:
                async with asyncio.timeout(_PATIENCE_S):
                    status, kind, body = await self._answer(reader)
                    head = (
                        f"HTTP/1.1 {status} {_STATUS[status]}\r\nContent-Type: {kind}\r\n"
                        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
                    )
                    writer.write(head.encode() + body)
                    await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # it is gone, or too slow, or the agent stops
        finally:
            self._open -= 1
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader) -> tuple[int, str, bytes]:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return _plain(_REFUSED, f"a request's head has at most {_HEAD_LIMIT} bytes")
        words = head.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != _PARTS:
            return _plain(_REFUSED, "this is no request of HTTP")
        method, target, _ = words
        if method != b"GET":
            return _plain(405, "only GET")
        place = target.split(b"?", 1)[0]
        if place == b"/metrics":
            if not self._figures.is_there:
                return _plain(501, metrics.MISSING)
            return 200, metrics.CONTENT_TYPE, self._figures.text(*self._counts(), self._local())
        if place == b"/healthz":
            waiting, at_work = self._counts()
            found: dict[str, Any] = {
                "healthy": not self.wrong,
                "wrong": self.wrong,
                "waiting": waiting,
                "at_work": at_work,
                "local": self._local(),
            }
            return 503 if self.wrong else 200, _JSON, json.dumps(found).encode() + b"\n"
        return _plain(404, "there are /metrics and /healthz")


def _plain(status: int, text: str) -> tuple[int, str, bytes]:
    return status, "text/plain; charset=utf-8", text.encode() + b"\n"
