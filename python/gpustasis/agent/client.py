# SPDX-License-Identifier: Apache-2.0
"""A client of the agent."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from gpustasis.agent.config import DEFAULT_SOCKET, PROTOCOL_VERSION
from gpustasis.errors import AgentError
from gpustasis.task import read_task

_ANSWER_LIMIT = 8 << 20
_TIMEOUT_S = 60.0


class Client:
    """A connection; a context manager. Every method raises AgentError."""

    def __init__(self, place: Path = DEFAULT_SOCKET) -> None:
        self._place = place
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._sock.settimeout(_TIMEOUT_S)
            self._sock.connect(str(place))
        except OSError as exc:
            self._sock.close()
            raise AgentError(f"no agent answers at {place}: {exc.strerror or exc}") from exc
        self._file = self._sock.makefile("rb")

    def checkpoint(
        self, *, stop: bool = False, wait: bool = True, **named: int | str
    ) -> dict[str, Any]:
        """named: one of pid, container ("podman:NAME") and target. The operation, once it has ended
        or, without `wait`, as it is queued."""
        if "pid" in named:
            named["start_time"] = read_task(int(named["pid"])).start_time
        return self._operation({"do": "checkpoint", **named, "stop": stop, "wait": wait}, wait)

    def cancel(self, id: str) -> dict[str, Any]:
        """The operation, and under "done" what was done."""
        return self._ask({"do": "cancel", "id": id})

    def show(self, id: str, *, wait: bool = False) -> dict[str, Any]:
        """The operation; with `wait` once it has ended."""
        return self._operation({"do": "show", "id": id, "wait": wait}, wait)

    def status(self) -> dict[str, Any]:
        return self._ask({"do": "status"})

    def _operation(self, request: dict[str, Any], wait: bool) -> dict[str, Any]:
        found = self._ask(request, wait=wait).get("operation")
        if not isinstance(found, dict):
            raise AgentError(f"the agent at {self._place} answers nothing that is known")
        return found

    def _ask(self, request: dict[str, Any], *, wait: bool = False) -> dict[str, Any]:
        try:
            self._sock.settimeout(None if wait else _TIMEOUT_S)
            self._sock.sendall(
                json.dumps({"version": PROTOCOL_VERSION, **request}).encode() + b"\n"
            )
        except OSError:
            pass  # it may have said why before it hung up
        try:
            line = self._file.readline(_ANSWER_LIMIT)
        except OSError as exc:
            raise AgentError(f"the agent at {self._place} does not answer: {exc}") from exc
        if not line.endswith(b"\n"):
            raise AgentError(
                f"the agent at {self._place} has hung up; a checkpoint that was at work goes on: "
                "gpustasis agent status shows what became of it"
            )
        try:
            answer: dict[str, Any] = json.loads(line)
            error = answer.get("error")
            if error is not None:
                raise AgentError(str(error["message"]))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
            raise AgentError(
                f"the agent at {self._place} answers nothing that is known: {exc!r}"
            ) from exc
        return answer

    def close(self) -> None:
        self._file.close()
        self._sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
