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
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from gpustasis import process
from gpustasis.errors import EngineError, UnsupportedError
from gpustasis.runtimes.kubelet import Access, read_token

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


def default_path(environ: Mapping[str, str]) -> Path:
    """The file that kubectl reads: $KUBECONFIG, else ~/.kube/config.

    Raises EngineError if $KUBECONFIG names several, which kubectl would merge.
    """
    named = [name for name in environ.get("KUBECONFIG", "").split(":") if name]
    if len(named) > 1:
        raise EngineError(
            f"KUBECONFIG names {len(named)} files, which are not merged here: name one with "
            "--kubeconfig"
        )
    return Path(named[0]) if named else Path(environ.get("HOME", "/")) / ".kube" / "config"


@contextmanager
def open_access(path: Path, context: str | None = None) -> Iterator[Access]:
    """How a context of the file lets one in; its current one, if none is named. Certificates and
    keys that stand in the file are kept in memory, never on a disk, while the block runs.

    Raises EngineError that names the field that is wrong, missing, or cannot be used.
    """
    config = _Config(path)
    cluster, user = config.cluster_and_user(context)
    with ExitStack() as stack:
        yield config.access(cluster, user, stack)


class _Config:
    """A file, and what in it is looked at now, for messages."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._content = _object(_load(path), f"{path}")

    def cluster_and_user(self, context: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
        name = context or self._text(self._content, "current-context", "")
        if not name:
            raise EngineError(f"{self._path} has no current-context: name one with --context")
        found = self._named("contexts", "context", name)
        cluster = self._named("clusters", "cluster", self._text(found, "cluster", name))
        user = self._text(found, "user", "")
        return cluster, self._named("users", "user", user) if user else {}

    def access(self, cluster: dict[str, Any], user: dict[str, Any], stack: ExitStack) -> Access:
        for fields, refused in ((cluster, _CLUSTER_REFUSED), (user, _USER_REFUSED)):
            for field in refused:
                if fields.get(field):
                    raise EngineError(f"{self._path}: {field} cannot be used here")
        server = self._text(cluster, "server", "")
        if not server:
            raise EngineError(f"{self._path}: the cluster has no server")
        token = self._text(user, "token", "") or None
        if self._text(user, "tokenFile", ""):
            token = read_token(self._beside(self._text(user, "tokenFile", "")))
        ca = self._file(cluster, "certificate-authority", stack)
        certificate = self._file(user, "client-certificate", stack)
        key = self._file(user, "client-key", stack)
        if "exec" in user and token is None and certificate is None:
            given = self._ask_plugin(_object(user["exec"], f"{self._path}: exec"), cluster)
            token = self._text(given, "token", "") or None
            if pem := self._text(given, "clientCertificateData", ""):
                certificate = _in_memory(pem.encode(), stack)
            if pem := self._text(given, "clientKeyData", ""):
                key = _in_memory(pem.encode(), stack)
            if token is None and certificate is None:
                raise EngineError(f"{self._path}: exec: the program gives no token, no certificate")
        if token is None and certificate is None:
            raise EngineError(f"{self._path}: the user has no token, no certificate and no exec")
        if (certificate is None) != (key is None):
            raise EngineError(f"{self._path}: a client's certificate and key go together")
        return Access(
            ca=ca or _system_ca(), certificate=certificate, key=key, token=token, api_server=server
        )

    def _ask_plugin(self, plugin: dict[str, Any], cluster: dict[str, Any]) -> dict[str, Any]:
        """The status of the ExecCredential that its program prints."""
        place = f"{self._path}: exec"
        version = self._text(plugin, "apiVersion", "")
        if version not in _PLUGIN_VERSIONS:
            raise EngineError(f"{place}: apiVersion {version!r} is none of {_PLUGIN_VERSIONS}")
        if plugin.get("interactiveMode") == "Always":
            raise EngineError(f"{place}: interactiveMode Always: the program would ask a person")
        command = self._text(plugin, "command", "")
        if not command:
            raise EngineError(f"{place}: command is missing")
        program = str(self._beside(command)) if "/" in command else command
        spec: dict[str, Any] = {"interactive": False}
        if plugin.get("provideClusterInfo"):
            spec["cluster"] = self._cluster_info(cluster)
        info = {"apiVersion": version, "kind": "ExecCredential", "spec": spec}
        env = dict(os.environ) | {"KUBERNETES_EXEC_INFO": json.dumps(info)}
        for item in self._list(plugin, "env"):
            pair = _object(item, f"{place}: env")
            env[self._text(pair, "name", "")] = self._text(pair, "value", "")
        words = [str(word) for word in self._list(plugin, "args")]
        hint = self._text(plugin, "installHint", "")
        try:
            ended = process.run([program, *words], env=env, apart=True, timeout_s=_PLUGIN_TIMEOUT_S)
        except (OSError, ValueError) as exc:
            advice = f"; {hint}" if hint else ""
            raise EngineError(f"{place}: cannot run {program}: {exc}{advice}") from exc
        if ended.status != 0:
            raise EngineError(f"{place}: {program} failed ({ended.ending}): {ended.errors.strip()}")
        try:
            found = _object(json.loads(ended.output), "its answer")
        except (ValueError, RecursionError) as exc:
            raise EngineError(f"{place}: {program} prints no ExecCredential: {exc}") from exc
        if (found.get("kind"), found.get("apiVersion")) != ("ExecCredential", version):
            raise EngineError(f"{place}: {program} prints no ExecCredential of {version}")
        return _object(found.get("status") or {}, f"{place}: status")

    def _cluster_info(self, cluster: dict[str, Any]) -> dict[str, Any]:
        info = {"server": self._text(cluster, "server", "")}
        data = self._text(cluster, "certificate-authority-data", "")
        path = self._text(cluster, "certificate-authority", "")
        if not data and path:
            data = base64.b64encode(_read(self._beside(path))).decode()
        return info | ({"certificate-authority-data": data} if data else {})

    def _file(self, fields: dict[str, Any], name: str, stack: ExitStack) -> Path | None:
        """Of a certificate or key, which stands in the file or in one that it names."""
        data = self._text(fields, f"{name}-data", "")
        if data:
            try:
                return _in_memory(base64.b64decode(data, validate=True), stack)
            except ValueError as exc:
                raise EngineError(f"{self._path}: {name}-data is no base64: {exc}") from exc
        path = self._text(fields, name, "")
        return self._beside(path) if path else None

    def _named(self, kind: str, inner: str, name: str) -> dict[str, Any]:
        for item in self._list(self._content, kind):
            entry = _object(item, f"{self._path}: {kind}")
            if entry.get("name") == name:
                return _object(entry.get(inner) or {}, f"{self._path}: {inner} {name}")
        raise EngineError(f"{self._path} has no {inner} {name!r}")

    def _text(self, fields: dict[str, Any], name: str, default: str) -> str:
        value = fields.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise EngineError(f"{self._path}: {name} is no text")  # it may be a secret
        return value

    def _list(self, fields: dict[str, Any], name: str) -> list[Any]:
        value = fields.get(name) or []
        if not isinstance(value, list):
            raise EngineError(f"{self._path}: {name} is no list")
        return value

    def _beside(self, path: str) -> Path:
        return self._path.absolute().parent / path


def _load(path: Path) -> object:
    try:
        import yaml
    except ImportError as exc:
        raise UnsupportedError(
            f"reading a kubeconfig needs {exc.name}; install the extra: "
            "pip install 'gpustasis[kubelet]'"
        ) from exc
    try:
        return yaml.safe_load(_read(path))
    except (yaml.YAMLError, RecursionError, ValueError, KeyError) as exc:
        # Not the line itself: it may be that of a token.
        mark = getattr(exc, "problem_mark", None)
        what = getattr(exc, "problem", None) or type(exc).__name__
        where = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
        raise EngineError(f"{path} is no kubeconfig: {what}{where}") from None


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            raw = file.read(_LIMIT + 1)
    except OSError as exc:
        raise EngineError(f"cannot read {path}: {exc.strerror}") from exc
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
