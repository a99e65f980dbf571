# SPDX-License-Identifier: Apache-2.0
"""A TLS server that answers in a kubelet's place, for what no real one can be made to answer: the
words of other versions, bodies that are hostile, nothing at all. The real one is in
tests/kubernetes."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import TracebackType
from typing import Any, Self

from support.certificates import Pair

# The path that is asked for, with its query -> status and body.
Answer = Callable[[str], tuple[int, str]]


class KubeletServer:
    """It listens on 127.0.0.1, at a free port, for the length of a with statement."""

    def __init__(self, answer: Answer, pair: Pair) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pair.certificate, pair.key)
        self._server = _Server(answer, context)
        self.address = f"127.0.0.1:{self._server.server_address[1]}"
        self._thread = Thread(target=self._server.serve_forever, args=(0.05,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, answer: Answer, context: ssl.SSLContext) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer = answer
        self.context = context

    def finish_request(self, request: Any, client_address: Any) -> None:
        try:  # in the connection's own thread: a client that stalls stalls nobody else
            with self.context.wrap_socket(request, server_side=True) as connection:
                super().finish_request(connection, client_address)
        except OSError:  # it went away, or does not trust us
            pass


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_POST(self) -> None:
        status, body = self.server.answer(self.path)
        raw = body.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, format: str, *arguments: object) -> None:
        pass
