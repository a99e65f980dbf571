# SPDX-License-Identifier: Apache-2.0
"""Kubeconfig files: which API server a context means, and how to be let in there.

Read as kubectl reads them: data in the file is taken before files that it names, these lie beside
it, unknown fields mean nothing. What kubectl would do and this cannot is refused, by name. Source:
Kubernetes documentation, "Organizing Cluster Access Using kubeconfig Files" and "Authenticating",
client-go credential plugins (client.authentication.k8s.io/v1). Needs the extra `kubelet`.
"""

from __future__ import annotations

import base64
import json
import os
import ssl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpustasis import process
from gpustasis.errors import EngineError, UnsupportedError
from gpustasis.runtimes.kubelet import Access, is_token, read_token, why_unread
from gpustasis.text import extra

_LIMIT = 4 << 20  # bytes of the file
_PLUGIN_TIMEOUT_S = 300.0  # it may ask a person
_PLUGIN_VERSIONS = (
    "client.authentication.k8s.io/v1",
    "client.authentication.k8s.io/v1beta1",
)
# What kubectl does with these is not done here, and left out it would be something else.
_CLUSTER_REFUSED = ("insecure-skip-tls-verify", "tls-server-name", "proxy-url")
_USER_REFUSED = (
    *("username", "password", "auth-provider"),
    *("as", "as-uid", "as-groups", "as-user-extra"),
)


def default_paths(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """The files that kubectl reads: those that $KUBECONFIG names, else ~/.kube/config."""
    named = tuple(Path(name) for name in environ.get("KUBECONFIG", "").split(":") if name)
    return named or (Path(environ.get("HOME", "/")) / ".kube" / "config",)


@contextmanager
def open_access(paths: Sequence[Path], context: str | None = None) -> Iterator[Access]:
    """How a context of these files, taken together, lets one in; the current one, if none is named.
    Certificates and keys that stand in a file are kept in memory, never on a disk, while the block
    runs.

    Raises EngineError that names the field that is wrong, missing, or cannot be used.
    """
    cluster, user = _Config(paths).cluster_and_user(context)
    with ExitStack() as stack:
        yield _access(cluster, user, stack)


@dataclass(frozen=True, slots=True)
class _Section:
    """Fields, and the file that they stand in: paths in them start beside it."""

    path: Path
    fields: dict[str, Any]

    def text(self, name: str) -> str:
        value = self.fields.get(name)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise EngineError(f"{self.path}: {name} is no text")  # it may be a secret
        return value

    def list(self, name: str) -> Sequence[Any]:
        value = self.fields.get(name) or []
        if not isinstance(value, list):
            raise EngineError(f"{self.path}: {name} is no list")
        return value

    def section(self, name: str) -> _Section:
        return _Section(self.path, _object(self.fields.get(name) or {}, f"{self.path}: {name}"))

    def beside(self, path: str) -> Path:
        return self.path.absolute().parent / path

    def file(self, name: str, stack: ExitStack) -> Path | None:
        """Of a certificate or key, which stands in the file or in one that it names."""
        data = self.text(f"{name}-data")
        if data:
            try:
                return _in_memory(base64.b64decode(data, validate=True), stack)
            except ValueError as exc:
                raise EngineError(f"{self.path}: {name}-data is no base64: {exc}") from exc
        path = self.text(name)
        return self.beside(path) if path else None


class _Config:
    """Files taken together as kubectl does it: the first that has a context, cluster or user of a
    name has the whole of it, the first that has a current-context says which. Of several, those
    that are not there or hold nothing mean nothing."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._files: list[_Section] = []
        missing: EngineError | None = None
        for path in paths:
            try:
                content = _load(path)
            except EngineError as exc:
                if not isinstance(exc.__cause__, FileNotFoundError):
                    raise
                missing = missing or exc
                continue
            fields = {} if content is None else _object(content, f"{path}")
            self._files.append(_Section(path, fields))
        if missing is not None and not self._files:
            raise missing
        self._name = ", ".join(str(file.path) for file in self._files)
        self._has = "has" if len(self._files) == 1 else "have"

    def cluster_and_user(self, context: str | None) -> tuple[_Section, _Section]:
        current = (file.text("current-context") for file in self._files)
        name = context or next(filter(None, current), "")
        if not name:
            raise EngineError(
                f"{self._name} {self._has} no current-context: name one with --context"
            )
        found = self._named("contexts", "context", name)
        if not found.text("cluster"):
            raise EngineError(f"{found.path}: context {name!r} has no cluster")
        cluster = self._named("clusters", "cluster", found.text("cluster"))
        user = found.text("user")
        return cluster, self._named("users", "user", user) if user else _Section(found.path, {})

    def _named(self, kind: str, inner: str, name: str) -> _Section:
        for file in self._files:
            for item in file.list(kind):
                entry = _Section(file.path, _object(item, f"{file.path}: {kind}"))
                if entry.fields.get("name") == name:
                    return entry.section(inner)
        raise EngineError(f"{self._name} {self._has} no {inner} {name!r}")


def _access(cluster: _Section, user: _Section, stack: ExitStack) -> Access:
    for section, refused in ((cluster, _CLUSTER_REFUSED), (user, _USER_REFUSED)):
        for field in refused:
            if section.fields.get(field):
                raise EngineError(f"{section.path}: {field} cannot be used here")
    server = cluster.text("server")
    if not server:
        raise EngineError(f"{cluster.path}: the cluster has no server")
    token = user.text("token") or None
    if user.text("tokenFile"):
        token = read_token(user.beside(user.text("tokenFile")))
    ca = cluster.file("certificate-authority", stack)
    certificate = user.file("client-certificate", stack)
    key = user.file("client-key", stack)
    if "exec" in user.fields and token is None and certificate is None:
        given = _ask_plugin(user.section("exec"), cluster)
        token = given.text("token") or None
        if pem := given.text("clientCertificateData"):
            certificate = _in_memory(pem.encode("utf-8", "replace"), stack)
        if pem := given.text("clientKeyData"):
            key = _in_memory(pem.encode("utf-8", "replace"), stack)
        if token is None and certificate is None:
            raise EngineError(f"{user.path}: exec: the program gives no token, no certificate")
    if token is None and certificate is None:
        raise EngineError(f"{user.path}: the user has no token, no certificate and no exec")
    if token is not None and not is_token(token):
        raise EngineError(f"{user.path}: the token is not one word of printable ASCII")
    if (certificate is None) != (key is None):
        raise EngineError(f"{user.path}: a client's certificate and key go together")
    return Access(
        ca=ca or _system_ca(), certificate=certificate, key=key, token=token, api_server=server
    )


def _ask_plugin(plugin: _Section, cluster: _Section) -> _Section:
    """The status of the ExecCredential that its program prints."""
    place = f"{plugin.path}: exec"
    version = plugin.text("apiVersion")
    if version not in _PLUGIN_VERSIONS:
        raise EngineError(f"{place}: apiVersion {version!r} is none of {_PLUGIN_VERSIONS}")
    if plugin.fields.get("interactiveMode") == "Always":
        raise EngineError(f"{place}: interactiveMode Always: the program would ask a person")
    command = plugin.text("command")
    if not command:
        raise EngineError(f"{place}: command is missing")
    program = str(plugin.beside(command)) if "/" in command else command
    spec: dict[str, Any] = {"interactive": False}
    if plugin.fields.get("provideClusterInfo"):
        spec["cluster"] = _cluster_info(cluster)
    info = {"apiVersion": version, "kind": "ExecCredential", "spec": spec}
    env = dict(os.environ) | {"KUBERNETES_EXEC_INFO": json.dumps(info)}
    for item in plugin.list("env"):
        pair = _Section(plugin.path, _object(item, f"{place}: env"))
        env[pair.text("name")] = pair.text("value")
    words = [str(word) for word in plugin.list("args")]
    hint = plugin.text("installHint")
    try:
        ended = process.run([program, *words], env=env, apart=True, timeout_s=_PLUGIN_TIMEOUT_S)
    except (OSError, ValueError) as exc:
        advice = f"; {hint}" if hint else ""
        raise EngineError(f"{place}: cannot run {program}: {exc}{advice}") from exc
    if ended.status != 0:
        raise EngineError(f"{place}: {program} failed ({ended.ending}): {ended.errors.strip()}")
    try:
        found = _Section(plugin.path, _object(json.loads(ended.output), "its answer"))
    except (ValueError, RecursionError) as exc:
        raise EngineError(f"{place}: {program} prints no ExecCredential: {exc}") from exc
    if (found.fields.get("kind"), found.fields.get("apiVersion")) != ("ExecCredential", version):
        raise EngineError(f"{place}: {program} prints no ExecCredential of {version}")
    return found.section("status")


def _cluster_info(cluster: _Section) -> dict[str, Any]:
    data = cluster.text("certificate-authority-data")
    path = cluster.text("certificate-authority")
    if not data and path:
        data = base64.b64encode(_read(cluster.beside(path))).decode()
    info = {"server": cluster.text("server")}
    return info | ({"certificate-authority-data": data} if data else {})


def _load(path: Path) -> object:
    try:
        import yaml
    except ImportError as exc:
        raise UnsupportedError(
            f"reading a kubeconfig needs {exc.name}; {extra('kubelet')}"
        ) from exc
    try:
        return yaml.safe_load(_read(path))
    # YAML's tags have values made that need not be of their kind.
    except (
        *(yaml.YAMLError, RecursionError, ValueError, KeyError),
        *(AttributeError, IndexError, OverflowError, TypeError),
    ) as exc:
        # Not the line itself: it may be that of a token.
        mark = getattr(exc, "problem_mark", None)
        what = getattr(exc, "problem", None) or type(exc).__name__
        where = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
        raise EngineError(f"{path} is no kubeconfig: {what}{where}") from None


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            raw = file.read(_LIMIT + 1)
    except (OSError, ValueError) as exc:
        raise EngineError(f"cannot read {path}: {why_unread(exc)}") from exc
    if len(raw) > _LIMIT:
        raise EngineError(f"{path} has more than {_LIMIT} bytes")
    return raw


def _object(value: object, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise EngineError(f"{place}: fields are expected, and there are none")
    return value


def _in_memory(content: bytes, stack: ExitStack) -> Path:
    """A path to a file in memory; it is there until the stack ends."""
    fd = os.memfd_create("gpustasis-kubeconfig")
    stack.callback(os.close, fd)
    with open(fd, "wb", closefd=False) as file:
        file.write(content)
    return Path(f"/proc/self/fd/{fd}")


def _system_ca() -> Path:
    """Of the authorities that this machine trusts."""
    paths = ssl.get_default_verify_paths()
    found = paths.cafile or paths.capath
    if found is None:
        raise EngineError("the cluster has no certificate-authority, and this machine trusts none")
    return Path(found)
