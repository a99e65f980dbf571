# SPDX-License-Identifier: Apache-2.0
"""How etcd's JSON gateway is spoken to: its names, and what is in its answers."""

from __future__ import annotations

import base64
import http.client
import json
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from gpustasis.errors import StoreError
from gpustasis.jobs.store import Change, Entry, WatchLost

MAX_LINE_BYTES = 64 << 20
_UNAUTHENTICATED = 16  # gRPC's codes
_UNAVAILABLE = 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Where the servers are, and who we are there.

    endpoints: URLs, http:// or https://; all of one cluster. ca, certificate, key: PEM files; ca
    "": the system's. timeout_s: of a request, to one server.
    """

    endpoints: tuple[str, ...]
    ca: str = ""
    certificate: str = ""
    key: str = ""
    user: str = ""
    password: str = field(default="", repr=False)
    timeout_s: float = 2.0


class Refused(Exception):
    """An error that the server has answered. code: gRPC's."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code

    @property
    def is_of_old_token(self) -> bool:
        """Whether another token may help: users and roles were changed since, or it is too old."""
        return self.code == _UNAUTHENTICATED or "revision of auth store is old" in str(self)


@dataclass(frozen=True, slots=True)
class Server:
    """One endpoint."""

    url: str
    host: str
    port: int
    secure: bool


def server_of(url: str) -> Server:
    """Raises StoreError."""
    try:
        parts = urlsplit(url)
        port = parts.port or 2379
    except ValueError as exc:
        raise StoreError(f"etcd endpoint {url!r}: {exc}") from exc
    if parts.username is not None or parts.password is not None:
        raise StoreError(f"etcd endpoint at {parts.hostname}: user and password do not belong here")
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.path.strip("/"):
        raise StoreError(f"etcd endpoint {url!r}: must be http://HOST:PORT or https://HOST:PORT")
    return Server(url, parts.hostname, port, parts.scheme == "https")


def context_of(access: Access) -> ssl.SSLContext:
    """TLS as asked for. Raises StoreError if a file cannot be used."""
    try:
        context = ssl.create_default_context(cafile=access.ca or None)
        if access.certificate:
            context.load_cert_chain(access.certificate, access.key or None)
    except (OSError, ssl.SSLError) as exc:
        files = ", ".join(filter(None, (access.ca, access.certificate, access.key)))
        raise StoreError(f"etcd: cannot use the certificates {files}: {exc}") from exc
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def coded(text: str) -> str:
    """As the gateway takes bytes."""
    return base64.b64encode(text.encode()).decode()


def range_of(key: str) -> dict[str, str]:
    """An entry, or, of a key that ends in "/", all that begin so."""
    if not key.endswith("/"):
        return {"key": coded(key)}
    return {"key": coded(key), "range_end": coded(key[:-1] + "0")}  # "0" comes after "/"


def object_of(data: bytes) -> dict[str, Any]:
    """Raises StoreError."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise StoreError(f"etcd's answer is not JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise StoreError("etcd's answer is not a JSON object")
    return value


def refused_of(data: bytes, status: int) -> Refused:
    """What an answer that is an error says; one of a stream says it in another way."""
    try:
        said = json.loads(data)
        if isinstance(said["error"], dict):
            said = said["error"] | {"code": said["error"]["grpc_code"]}
        return Refused(int(said["code"]), str(said.get("message") or said["error"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        # It comes from something in between, that may not have reached etcd.
        code = _UNAVAILABLE if status >= http.client.INTERNAL_SERVER_ERROR else -1
        return Refused(code, data[:200].decode("ascii", "replace"))


def entry_of(item: dict[str, Any]) -> tuple[str, Entry]:
    """Key and entry of a key-value pair. Raises as int, str and subscripts do."""
    value = base64.b64decode(item.get("value", ""), validate=True).decode()
    return _key(item), Entry(value, int(item["mod_revision"]))


def changes_of(message: dict[str, Any]) -> list[Change]:
    """Of one message of a watch. Raises WatchLost, StoreError."""
    with parsing("a watch"):
        result = message.get("result")
        if result is None:
            raise WatchLost(f"etcd ended the watch: {message.get('error')!r}")
        if result.get("canceled"):
            compacted = result.get("compact_revision", "")
            reason = result.get("cancel_reason") or f"compacted at revision {compacted}"
            raise WatchLost(f"etcd ended the watch: {reason}")
        changes = []
        for event in result.get("events", []):
            item = event["kv"]
            gone = event.get("type") == "DELETE"
            entry = None if gone else entry_of(item)[1]
            changes.append(Change(_key(item), entry, int(item["mod_revision"])))
        return changes


def _key(item: dict[str, Any]) -> str:
    return base64.b64decode(item["key"], validate=True).decode()


@contextmanager
def parsing(what: str) -> Iterator[None]:
    """Have an answer that is not what it should be end as a StoreError."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise StoreError(f"etcd's answer is not {what}: {exc!r}") from exc
