# SPDX-License-Identifier: Apache-2.0
"""The kubelet's checkpoint API: ask a node for an archive of a container that runs there.

    POST /checkpoint/{namespace}/{pod}/{container}?timeout=SECONDS

directly at a kubelet, or through an API server's proxy to a node. The archive stays on the node
(kubelet_archives.py). Source: Kubernetes documentation, "Kubelet Checkpoint API", and
pkg/kubelet/server of Kubernetes 1.30 for codes and bodies. Needs the extra `kubelet`.
"""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from gpustasis.errors import EngineError, UnsupportedError
from gpustasis.runtimes import freezer
from gpustasis.text import extra

DEFAULT_PORT = 10250
DEFAULT_TIMEOUT_S = 600
_CONNECT_TIMEOUT_S = 20.0
_GRACE_S = 15.0  # by which the answer may come later than the time the runtime was given
_BODY_LIMIT = 1 << 20  # bytes of an answer
_TEXT_LIMIT = 2000  # characters of it that are shown
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")  # RFC 1123, as Kubernetes asks for
_GATE_OFF = (
    "this kubelet does not offer checkpoints: its feature gate ContainerCheckpoint is off (before "
    "Kubernetes 1.30 it is off unless switched on), or its debugging handlers are"
)
# CRI-O asks its runtime, and resumes the container: runc knows when one is paused.
_BY_RUNC = re.compile(r'running "[^"]*runc" \["checkpoint"')
# A kubelet's refusal; newer ones name several subresources, of which one is enough. Source:
# pkg/kubelet/server/server.go of Kubernetes, InstallAuthFilter.
_KUBELET_FORBIDS = re.compile(
    r"\(user=(?P<user>.*), verb=(?P<verb>[a-z]+), resource=nodes, "
    r"subresource(?:=|\(s\)=\[)(?P<names>[a-z/ ]*[a-z])\]?\)"
)
# An API server's own: staging/src/k8s.io/apiserver, responsewriters/errors.go.
_SERVER_FORBIDS = re.compile(r'cannot (?P<verb>[a-z]+) resource "(?P<what>nodes/[a-z/]+)"')


@dataclass(frozen=True, slots=True)
class Target:
    """A container, and the address of its node's kubelet or, with an API server, the node's
    name."""

    namespace: str
    pod: str
    container: str
    node: str

    @property
    def path(self) -> str:
        return f"{self.namespace}/{self.pod}/{self.container}"

    def __str__(self) -> str:
        return f"{self.path} on {self.node}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How to be let in. ca: certificates (PEM) one of which has signed the server's, in a file or a
    directory as OpenSSL has it. certificate
    and key: of the client, PEM; the key may be in the same file. token: a bearer token.
    api_server: its URL; None: kubelets are asked directly.
    """

    ca: Path
    certificate: Path | None = None
    key: Path | None = None
    token: str | None = None
    api_server: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What a kubelet says it made. archives: paths on the node. seconds: of the request."""

    target: Target
    archives: tuple[str, ...]
    seconds: float


def parse_target(text: str, node: str | None) -> Target:
    """NAMESPACE/POD/CONTAINER, or that and @NODE; node: where it is if the text does not say.

    Raises EngineError.
    """
    path, _, place = text.partition("@")
    place = place or node or ""
    parts = path.split("/")
    if len(parts) != 3:
        raise EngineError(f"{text!r} is no NAMESPACE/POD/CONTAINER[@NODE]")
    for part in parts:
        if not _NAME.fullmatch(part):
            raise EngineError(f"{text!r}: {part!r} is no name of Kubernetes")
    if not place:
        raise EngineError(f"{text}: on which node does it run? Add @NODE, or give --node")
    if not re.fullmatch(r"[0-9A-Za-z_.:\[\]-]+", place):
        raise EngineError(f"{text!r}: {place!r} is no address of a node")
    namespace, pod, container = parts
    return Target(namespace, pod, container, place)


def read_token(path: Path) -> str:
    """A bearer token from its file. Raises EngineError."""
    try:
        with path.open("rb") as file:
            raw = file.read(_BODY_LIMIT)
    except (OSError, ValueError) as exc:
        raise EngineError(f"cannot read the token in {path}: {why_unread(exc)}") from exc
    token = raw.decode("ascii", "replace").strip()
    if not is_token(token):
        raise EngineError(f"{path} holds no bearer token: one word of printable ASCII is expected")
    return token


def is_token(text: str) -> bool:
    """Whether it can be a bearer token: one word of printable ASCII."""
    return re.fullmatch(r"[!-~]+", text) is not None


def why_unread(exc: OSError | ValueError) -> str:
    """What is wrong with a path or with what lies there. ValueError: it can be no path: it holds a
    NUL, or what is no text."""
    return (exc.strerror if isinstance(exc, OSError) else None) or str(exc)


def check(access: Access) -> None:
    """Raises EngineError if the credentials cannot work, UnsupportedError without the extra."""
    _requests()
    if access.key is not None and access.certificate is None:
        raise EngineError(f"the key {access.key} needs a certificate")
    if access.api_server is not None and not re.fullmatch(
        r"https://[^/\s?#]+(/[^\s?#]*)?", access.api_server
    ):
        raise EngineError(
            f"{access.api_server!r} is no API server's URL: https://HOST[:PORT][/PATH]"
        )
    for path in (access.ca, access.certificate, access.key):
        if path is None or os.path.isdir(path):
            continue
        try:
            with path.open("rb") as file:
                if b"-----BEGIN " not in file.read(_BODY_LIMIT):
                    raise EngineError(f"{path} holds no certificate or key in PEM")
        except (OSError, ValueError) as exc:
            raise EngineError(f"cannot read {path}: {why_unread(exc)}") from exc


def checkpoint(access: Access, target: Target, timeout_s: int = DEFAULT_TIMEOUT_S) -> Made:
    """Have one container checkpointed; it runs on. May be called from several threads.

    timeout_s: passed on; the runtime gives up after it. A runtime that could not freeze the
    container is asked again, a few times within that time. Raises EngineError.
    """
    begin = time.monotonic()
    tries = freezer.Tries(timeout_s)
    while True:
        status, body = _post(access, target, tries.left_s)
        reason = _reason(body)
        was_not_frozen = freezer.was_not_frozen(reason) and not _was_cut_off(reason)
        if status != 500 or not was_not_frozen or not tries.again():
            break
    if status != 200:
        raise EngineError(f"{target}: {_explain_status(status, reason, target, access, timeout_s)}")
    seconds = time.monotonic() - begin
    return Made(target=target, archives=_archives(body, target), seconds=seconds)


def _post(access: Access, target: Target, timeout_s: int) -> tuple[int, bytes]:
    """Status and body. requests closes the connection only when nothing refers to its answer any
    more, and an error does as long as it lives: those of the status are not raised here."""
    requests = _requests()
    with requests.Session() as session:
        session.trust_env = False  # no proxy, no netrc: nobody else gets the token
        session.verify = str(access.ca)
        if access.certificate is not None:
            pair = (access.certificate, access.key or access.certificate)
            session.cert = tuple(map(str, pair))
        if access.token is not None:
            session.headers["Authorization"] = f"Bearer {access.token}"
        try:
            with session.post(
                _url(access, target),
                params={"timeout": str(timeout_s)},
                timeout=(_CONNECT_TIMEOUT_S, timeout_s + _GRACE_S),
                allow_redirects=False,
                stream=True,
            ) as answer:
                body = answer.raw.read(_BODY_LIMIT, decode_content=False)
                return int(answer.status_code), bytes(body)
        except (OSError, requests.RequestException) as exc:
            raise EngineError(f"{target}: {_explain_failure(exc, access, timeout_s)}") from exc
        except _urllib3_error() as exc:
            raise EngineError(f"{target}: the answer broke off: {_line(str(exc))}") from exc


def _requests() -> Any:
    try:
        import requests
    except ImportError as exc:
        raise UnsupportedError(
            f"talking to a kubelet needs {exc.name}; {extra('kubelet')}"
        ) from exc
    return requests


def _urllib3_error() -> Any:
    from urllib3.exceptions import HTTPError

    return HTTPError


def _url(access: Access, target: Target) -> str:
    path = f"checkpoint/{target.path}"
    if access.api_server is not None:
        node = quote(target.node, safe="")
        return f"{access.api_server.rstrip('/')}/api/v1/nodes/{node}/proxy/{path}"
    host = target.node
    if host.count(":") > 1 and not host.startswith("["):  # IPv6
        host = f"[{host}]"
    port = "" if re.search(r":\d+$", host) else f":{DEFAULT_PORT}"
    return f"https://{host}{port}/{path}"


def _archives(body: bytes, target: Target) -> tuple[str, ...]:
    """Paths in {"items": [...]}, as the kubelet sends it."""
    try:
        items = json.loads(body)["items"]
    except (ValueError, KeyError, TypeError, RecursionError) as exc:
        raise EngineError(
            f"{target}: the kubelet answers 200 with {_line(body.decode('utf-8', 'replace'))!r}, "
            "which names no archive"
        ) from exc
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise EngineError(f"{target}: the kubelet names its archives as {_line(str(items))!r}")
    return tuple(_line(item) for item in items)


def _reason(body: bytes) -> str:
    """The text of an error: plain from a kubelet, in a Status object from an API server."""
    text = body.decode("utf-8", "replace")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return _line(text)
    if isinstance(value, dict) and isinstance(value.get("message"), str):
        return _line(value["message"])
    return _line(text)


def _explain_status(
    status: int, reason: str, target: Target, access: Access, timeout_s: int
) -> str:
    said = f'"{reason}" ({status})' if reason else f"status {status} and no reason"
    if status == 401:
        who = "the token" if access.token else "the client's certificate"
        advice = (
            "an API server accepts it?"
            if access.api_server
            else "has it expired; does the kubelet's client CA sign it, or may the kubelet ask the "
            "API server about tokens (authentication.webhook)?"
        )
        if access.token is None and access.certificate is None:
            return f"{said}: neither a client certificate nor a token was given"
        return f"{said}: {who} is not accepted: {advice}"
    if status == 403:
        return f"{said}: {_who_must_be_allowed(reason, access)}"
    if status == 404:
        return f"{said}: {_explain_missing(reason, timeout_s)}"
    if status == 500:
        if "Unimplemented" in reason or "not implemented" in reason.lower():
            return f"{said}: the node's runtime cannot checkpoint; containerd can from 2.0 on"
        stopped = (
            "once the dump there has ended, on the node: gpustasis containerd resume "
            f"{target.path}, or gpustasis crio resume {target.path}"
        )
        if _is_over_time(reason):
            return (
                f"{said}: not done in {timeout_s} s; --timeout gives it longer. The runtime may "
                f"have left the container paused; {stopped}"
            )
        if _was_cut_off(reason):
            return (
                f"{said}: the runtime has ended or was restarted meanwhile, and may have left the "
                f"container paused; {stopped}"
            )
        if freezer.was_not_frozen(reason):
            return f"{said}; {freezer.TOO_BUSY}"
        if "checkpointing of" not in reason:  # nor has anything been tried
            return said
        if freezer.may_be_left_paused(reason) and not _BY_RUNC.search(reason):
            return (
                f"{said}; the runtime may have left the container paused; on the node: gpustasis "
                f"crio resume {target.path}, or gpustasis containerd resume {target.path}. If criu "
                "was started, its log is in the runtime's state there"
            )
        return (
            f"{said}; the container runs on, and criu's log is in the runtime's state on the node"
        )
    if 300 <= status < 400:
        return f"{said}: redirects are not followed; is this a kubelet?"
    return said


def _is_over_time(reason: str) -> bool:
    return "DeadlineExceeded" in reason or "deadline exceeded" in reason


def _was_cut_off(reason: str) -> bool:
    """Before the runtime had done with the container."""
    has_ended = "checkpointing of" in reason and ("Unavailable" in reason or "EOF" in reason)
    return has_ended or _is_over_time(reason)


def _explain_missing(reason: str, timeout_s: int) -> str:
    if "pod does not exist" in reason:
        return (
            "no such pod on this node; is the node right, and the namespace? A kubelet that has "
            "just started may not know it yet"
        )
    if "container" in reason and "does not exist" in reason:
        return "the pod has no such container"
    if "timeout parameter" in reason:
        return f"the kubelet does not understand timeout={timeout_s}"
    if reason.startswith("nodes "):
        return "the API server knows no such node"
    return _GATE_OFF


def _who_must_be_allowed(reason: str, access: Access) -> str:
    """Whom RBAC must allow what, by the words of who refuses: the kubelet, of whoever asks it, or
    the API server."""
    if (found := _KUBELET_FORBIDS.search(reason)) is not None:
        what = " or ".join(f"nodes/{name}" for name in found["names"].split())
        user = "this user"
        if access.api_server is not None:
            user = f"{found['user']}, as whom the API server asks kubelets,"
        return f"the kubelet refuses: RBAC must allow {user} the verb {found['verb']} on {what}"
    verb, what = "create", "nodes/checkpoint (older kubelets: nodes/proxy)"
    if (found := _SERVER_FORBIDS.search(reason)) is not None:
        verb, what = found["verb"], found["what"]
    elif access.api_server is not None:
        what = "nodes/proxy"
    return f"RBAC must allow this user the verb {verb} on {what}"


def _explain_failure(exc: Exception, access: Access, timeout_s: int) -> str:
    requests = _requests()
    text = _line(str(exc))
    if isinstance(exc, requests.exceptions.SSLError):
        if "certificate verify failed" in text or "doesn't match" in text:
            return (
                f"the server's certificate is not to be trusted: {text}; is {access.ca} the CA "
                "that signed it, and is the address one that the certificate names? Kubelets "
                "without serverTLSBootstrap sign their own"
            )
        return f"no TLS connection: {text}"
    if isinstance(exc, requests.exceptions.ReadTimeout):
        return (
            f"no answer in {timeout_s + _GRACE_S:.0f} s; the checkpoint may still be made: see the "
            "archives on the node before trying again"
        )
    if isinstance(exc, requests.exceptions.ConnectTimeout):
        return f"cannot connect in {_CONNECT_TIMEOUT_S:.0f} s: {text}"
    return f"cannot connect, or the connection broke: {text}"


def _line(text: str) -> str:
    """What somebody else wrote, as one line that does nothing to a terminal."""
    line = "".join(char if char.isprintable() else "?" for char in " ".join(text.split()))
    return line if len(line) <= _TEXT_LIMIT else f"{line[:_TEXT_LIMIT]} ..."
