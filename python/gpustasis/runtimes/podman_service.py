# SPDX-License-Identifier: Apache-2.0
"""Podman's service: the REST endpoints below /libpod, through podman-py's client, and the report of
what it did under Podman's own names.

podman-py has no methods for checkpoints; its APIClient is a requests.Session that knows the socket.
Times are those of --print-stats (podman-container-checkpoint(1)), in microseconds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self
from urllib.parse import quote

from gpustasis.criu.statistics import Stage, Statistics
from gpustasis.errors import EngineError, UnsupportedError
from gpustasis.text import extra

DEFAULT_URL = "unix:///run/podman/podman.sock"
# Podman libpod/define/errors.go (ErrCtrExists); containers/storage errors.go (ErrDuplicateName,
# -ID).
_EXISTS = ("already exists", "already in use")
_CHUNK = 1 << 20  # bytes of a body at a time

Params = Mapping[str, bool | str]


class RefusedError(EngineError):
    """The service answered that it did not do it. status: of HTTP. exists: because there is a
    container of that name or id already."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status
        self.exists = any(text in message for text in _EXISTS)


class Service:
    """A connection to Podman's service; a context manager.

    url: as podman-py takes it; None: $CONTAINER_HOST, else DEFAULT_URL. local: its files are this
    machine's. Every method raises EngineError if nobody answers, RefusedError if the answer is no.
    """

    def __init__(self, url: str | None = None) -> None:
        try:
            from podman.api.client import APIClient
            from podman.errors import PodmanError
        except ImportError as exc:
            raise UnsupportedError(f"podman-py is not installed: {extra('podman')}") from exc
        self.url = url or os.environ.get("CONTAINER_HOST") or DEFAULT_URL
        self.local = self.url.partition(":")[0] in ("unix", "http+unix")
        self._failure = (PodmanError, OSError)  # requests' exceptions are OSErrors
        try:
            self._client = APIClient(base_url=self.url)
        except (ValueError, *self._failure) as exc:
            raise EngineError(f"{self.url} is no address of a Podman service: {exc}") from exc

    def info(self) -> dict[str, Any]:
        """What `podman info` shows."""
        return self._json(self._send("GET", "/info", {}))

    def inspect(self, name: str) -> dict[str, Any]:
        """What `podman container inspect` shows."""
        return self._json(self._send("GET", f"/containers/{quote(name, safe='')}/json", {}))

    def containers(self) -> set[str]:
        """The ids of all containers, running or not."""
        try:
            return {
                str(one["Id"])
                for one in self._send("GET", "/containers/json", {"all": True}).json()
            }
        except (ValueError, KeyError, TypeError) as exc:
            raise EngineError(f"what answers at {self.url} is no Podman service: {exc}") from exc

    def act(
        self, name: str, verb: str, params: Params, body: BinaryIO | None = None
    ) -> dict[str, Any]:
        """POST /containers/NAME/VERB: the answer."""
        path = f"/containers/{quote(name, safe='')}/{verb}"
        return self._json(self._send("POST", path, params, body))

    @contextmanager
    def stream(self, name: str, verb: str, params: Params) -> Iterator[Iterator[bytes]]:
        """The same, for an answer that is no JSON: its pieces."""
        path = f"/containers/{quote(name, safe='')}/{verb}"
        response = self._send("POST", path, params, stream=True)
        try:
            yield self._pieces(response)
        finally:
            response.close()

    def remove(self, name: str) -> None:
        """Remove a container, whatever it does; one that is not there is no error."""
        path = f"/containers/{quote(name, safe='')}"
        self._send("DELETE", path, {"force": True, "ignore": True, "timeout": "0"})

    def close(self) -> None:
        self._client.close()

    def _send(
        self,
        method: str,
        path: str,
        params: Params,
        body: BinaryIO | None = None,
        *,
        stream: bool = False,
    ) -> Any:
        words = {k: v if isinstance(v, str) else str(v).lower() for k, v in params.items()}
        call = getattr(self._client, method.lower())
        try:
            if body is None:
                response = call(path, params=words, stream=stream)
            else:
                response = call(path, params=words, data=body)
        except self._failure as exc:
            raise EngineError(
                f"no Podman service answers at {self.url}: start it with `systemctl start "
                f"podman.socket`, or with `podman system service --time 0 {self.url}` ({exc})"
            ) from exc
        if response.status_code >= 400:
            raise RefusedError(_message(response), response.status_code)
        return response

    def _pieces(self, response: Any) -> Iterator[bytes]:
        try:
            yield from response.iter_content(_CHUNK)
        except self._failure as exc:
            raise EngineError(f"the Podman service at {self.url} broke off: {exc}") from exc

    def _json(self, response: Any) -> dict[str, Any]:
        try:
            found = response.json()
        except ValueError as exc:
            raise EngineError(f"what answers at {self.url} is no Podman service: {exc}") from exc
        if not isinstance(found, dict):
            raise EngineError(f"what answers at {self.url} is no Podman service")
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _message(response: Any) -> str:
    """What the service says is wrong: {"cause", "message", "response"}."""
    try:
        found = response.json()
        return str(found["message"]).strip()
    except (ValueError, KeyError, TypeError):
        return str(response.text).strip() or f"HTTP status {response.status_code}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One checkpoint or restore that succeeded.

    duration_us: the whole request, as seen from here. runtime_us: of that runc's or crun's; 0: not
    known. plugin: None if no process used a GPU, or its figures are out of reach. archive: where
    it was exported to.
    """

    stage: Stage
    container_id: str
    duration_us: int
    runtime_us: int
    criu: Mapping[str, int]
    plugin: Statistics | None
    archive: Path | None = None

    def as_podman(self) -> dict[str, Any]:
        """As `podman container checkpoint --print-stats` would have it, and
        gpustasis_statistics."""
        verb = "checkpoint" if self.stage == "dump" else "restore"
        container: dict[str, Any] = {
            "Id": self.container_id,
            f"runtime_{verb}_duration": self.runtime_us,
            "criu_statistics": dict(self.criu),
        }
        if self.plugin is not None:
            container["gpustasis_statistics"] = plugin_figures(self.plugin)
        return {
            f"podman_{verb}_duration": self.duration_us,
            "container_statistics": [container],
        }


def plugin_figures(statistics: Statistics) -> dict[str, Any]:
    """Sizes in bytes, and the time of each phase (docs/operating.md, "Statistics") in
    microseconds, summed over the processes."""
    times: dict[str, float] = {}
    for task in statistics.tasks:
        for name, milliseconds in task.phases_ms.items():
            times[name] = times.get(name, 0) + milliseconds
    return {
        "backend": statistics.backend,
        "processes": len(statistics.tasks),
        "staged_bytes": statistics.staged_bytes,
        "same_bytes": statistics.same_bytes,
        "file_bytes": statistics.file_bytes,
        **{f"{name}_time": round(1000 * total) for name, total in times.items()},
    }
