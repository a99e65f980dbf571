# SPDX-License-Identifier: Apache-2.0
"""What the kubelet answers on /checkpoint, over TLS, with a real container runtime underneath.

Source of order, codes and bodies: pkg/kubelet/server (server.go, auth.go) and kubelet.go of
Kubernetes 1.30. As a program: one node's kubelet on 127.0.0.1, until it is killed:

    python kubelet_server.py PORT SOCKET CERTIFICATE KEY CLIENT-CA DIRECTORY TOKEN=USER...
"""

from __future__ import annotations

import ssl
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

from gpustasis.runtimes.cri import CallError, Cri

CRI_TIMEOUT_S = 120  # the kubelet's runtimeRequestTimeout
ALLOWED = "admin"  # the one user whom RBAC here lets create nodes/checkpoint


class RuntimeFault(Exception):
    """What the runtime's error looks like to the kubelet."""


@dataclass
class Kubelet:
    """pods: (namespace, pod) -> names of its containers. checkpoint: (namespace, pod, container,
    timeout in seconds) -> the archive's path; raises RuntimeFault. tokens: token -> user. gate: the
    feature gate ContainerCheckpoint. older: it refuses in the words of Kubernetes before 1.32.
    """

    pods: Callable[[], Mapping[tuple[str, str], set[str]]]
    checkpoint: Callable[[str, str, str, int], str]
    tokens: Mapping[str, str] = field(default_factory=dict)
    gate: bool = True
    older: bool = False

    def answer(self, user: str | None, path: str) -> tuple[int, str, str]:
        """(status, content type, body) to a POST."""
        plain = "text/plain; charset=utf-8"
        url = urlsplit(path)
        words = url.path.strip("/").split("/")
        if user is None:
            return 401, plain, "Unauthorized"
        if user != ALLOWED:
            what = "subresource=checkpoint" if self.older else "subresource(s)=[checkpoint]"
            return 403, plain, f"Forbidden (user={user}, verb=create, resource=nodes, {what})\n"
        if not self.gate or len(words) != 4 or words[0] != "checkpoint":
            return 404, plain, "404: Page Not Found"
        namespace, pod, container = words[1:]
        known = self.pods()
        if (namespace, pod) not in known:
            return 404, plain, "pod does not exist"
        if container not in known[namespace, pod]:
            return 404, plain, f"container {container} does not exist"
        timeouts = parse_qs(url.query).get("timeout", [])
        try:
            timeout = int(timeouts[-1]) if timeouts else 0
        except ValueError:
            return 404, plain, "cannot parse value of timeout parameter"
        try:
            archive = self.checkpoint(namespace, pod, container, timeout)
        except RuntimeFault as exc:
            return 500, plain, f"checkpointing of {namespace}/{pod}/{container} failed ({exc})"
        return 200, "application/json", f'{{"items":["{archive}"]}}'


class KubeletServer:
    """It listens on 127.0.0.1 for the length of a with statement. port 0: a free one."""

    def __init__(
        self, kubelet: Kubelet, certificate: Path, key: Path, client_ca: Path, port: int = 0
    ) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        context.load_verify_locations(client_ca)
        context.verify_mode = ssl.CERT_OPTIONAL
        self._server = _Server(kubelet, context, port)
        self.port: int = self._server.server_address[1]
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

    def __init__(self, kubelet: Kubelet, context: ssl.SSLContext, port: int) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.kubelet = kubelet
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
        kubelet = self.server.kubelet
        status, kind, body = kubelet.answer(self._user(), self.path)
        raw = body.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def _user(self) -> str | None:
        certificate = self.connection.getpeercert()  # type: ignore[attr-defined]
        for names in (certificate or {}).get("subject", ()):
            for key, value in names:
                if key == "commonName":
                    return str(value)
        word, _, token = self.headers.get("Authorization", "").partition(" ")
        return self.server.kubelet.tokens.get(token) if word == "Bearer" else None

    def log_message(self, format: str, *arguments: object) -> None:
        pass


def kubelet_of(cri: Cri, directory: Path, tokens: Mapping[str, str]) -> Kubelet:
    """The kubelet of the node whose runtime is `cri`; archives go to `directory`."""

    def running() -> dict[tuple[str, str, str], str]:
        pods = {pod.id: pod.metadata for pod in cri.call("ListPodSandbox").items}
        found = {}
        for container in cri.call("ListContainers").containers:
            pod = pods[container.pod_sandbox_id]
            found[pod.namespace, pod.name, container.metadata.name] = container.id
        return found

    def pods() -> dict[tuple[str, str], set[str]]:
        found: dict[tuple[str, str], set[str]] = {}
        for namespace, pod, container in running():
            found.setdefault((namespace, pod), set()).add(container)
        return found

    def checkpoint(namespace: str, pod: str, container: str, timeout: int) -> str:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        location = directory / f"checkpoint-{pod}_{namespace}-{container}-{now}.tar"
        try:
            cri.call(
                "CheckpointContainer",
                timeout_s=timeout or CRI_TIMEOUT_S,
                container_id=running()[namespace, pod, container],
                location=str(location),
                timeout=timeout,
            )
        except CallError as exc:
            code = "".join(word.capitalize() for word in exc.code.split("_"))
            raise RuntimeFault(f"rpc error: code = {code} desc = {exc}") from exc
        return str(location)

    return Kubelet(pods=pods, checkpoint=checkpoint, tokens=tokens)


def main() -> None:
    port, socket, certificate, key, client_ca, directory = sys.argv[1:7]
    tokens = dict(word.split("=", 1) for word in sys.argv[7:])
    kubelet = kubelet_of(Cri(socket), Path(directory), tokens)
    server = KubeletServer(kubelet, Path(certificate), Path(key), Path(client_ca), int(port))
    with server:
        server._thread.join()


if __name__ == "__main__":
    main()
