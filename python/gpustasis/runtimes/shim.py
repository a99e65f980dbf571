# SPDX-License-Identifier: Apache-2.0
"""containerd's shims, spoken to without containerd. A shim runs a container for containerd,
outlives it, and keeps on its own whether the container is paused.

Source: containerd 2.1, core/runtime/v2/bundle.go and shim.go, pkg/shim/util_unix.go (where a shim
listens),
api/runtime/task/v3/shim.proto; ttrpc 1.2, PROTOCOL.md and request.proto. Needs the extra `cri`.
"""

from __future__ import annotations

import json
import os
import re
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpustasis.errors import EngineError
from gpustasis.runtimes.cri import TASK_PAUSED, Table, message_classes, printable

_BUNDLES = "io.containerd.runtime.v2.task/k8s.io"
_SOCKETS = "s"
_MESSAGES: Table = {
    "Request": {
        "service": (1, "string"),
        "method": (2, "string"),
        "payload": (3, "bytes"),
        "timeout_nano": (4, "int64"),
    },
    "Status": {"code": (1, "int32"), "message": (2, "string")},
    "Response": {"status": (1, "Status"), "payload": (2, "bytes")},
    "TaskRequest": {"id": (1, "string")},
    "StateResponse": {"status": (4, "enum")},
    "Empty": {},
}
_HEADER = struct.Struct(">IIBB")  # length, stream, kind, flags
_REQUEST, _RESPONSE = 1, 2
_ANSWER_LIMIT = 4 << 20  # bytes; ttrpc's own
_FILE_LIMIT = 64 << 10
_CONFIG_LIMIT = 16 << 20
# Annotations that containerd's CRI gives a container, pkg/cri: annotations.go.
_NAMES = tuple(f"io.kubernetes.cri.{one}" for one in ("sandbox-namespace", "sandbox-name"))
_NAME = "io.kubernetes.cri.container-name"
_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Shim:
    """Where the shim of one container listens. version: of its task service."""

    container_id: str
    socket: Path
    version: int

    def is_paused(self) -> bool:
        """As the shim has it: a container that was thawed without it is still paused to it.

        Raises EngineError.
        """
        return bool(self._call("State", "StateResponse").status == TASK_PAUSED)

    def resume(self) -> None:
        """Raises EngineError."""
        self._call("Resume", "Empty")

    def _call(self, method: str, answer: str) -> Any:
        from google.protobuf.message import DecodeError

        messages = message_classes(_MESSAGES)
        request = messages.Request(
            service=f"containerd.task.v{self.version}.Task",
            method=method,
            payload=messages.TaskRequest(id=self.container_id).SerializeToString(),
            timeout_nano=int(_TIMEOUT_S * 1e9),
        ).SerializeToString()
        what = f"the shim of container {self.container_id}, {self.socket},"
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(_TIMEOUT_S)
                connection.connect(str(self.socket))
                connection.sendall(_HEADER.pack(len(request), 1, _REQUEST, 0) + request)
                length, _, kind, _ = _HEADER.unpack(_receive(connection, _HEADER.size))
                if kind != _RESPONSE or length > _ANSWER_LIMIT:
                    raise EngineError(f"{what} answers {method} with what is no answer")
                response = messages.Response.FromString(_receive(connection, length))
                if response.status.code:
                    raise EngineError(
                        f"{what} refuses {method}: {printable(response.status.message)}"
                    )
                return getattr(messages, answer).FromString(response.payload)
        except (OSError, EOFError, DecodeError) as exc:
            raise EngineError(f"{what} does not answer {method}: {exc}") from exc


def find_shim(state: Path, container_id: str) -> Shim | None:
    """The shim of a container in Kubernetes's namespace; None: none is seen from here.

    state: containerd's state directory, in which its own socket is too.
    """
    bundle = state / _BUNDLES / container_id
    version = 2
    try:
        text = _read(bundle / "bootstrap.json")
        found = json.loads(text)
        if found["protocol"] != "ttrpc":
            return None
        address, version = str(found["address"]), int(found["version"])
    except FileNotFoundError:
        try:
            address = _read(bundle / "address")
        except OSError:
            return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return None
    match = re.fullmatch(rf"unix://(/.*/{_SOCKETS}/([0-9a-f]+))\s*", address)
    if match is None:
        return None
    # Where containerd's programs have it, or where a pod sees containerd's directory.
    for place in (Path(match[1]), state / _SOCKETS / match[2]):
        if os.path.exists(place) and place.is_socket():  # the first takes names that are too long
            return Shim(container_id, place, version)
    return None


def container_names(state: Path, container_id: str) -> tuple[str, str, str] | None:
    """Namespace, pod and name of a container in Kubernetes's namespace, without containerd; None:
    there is none of this id, or it is a pod's sandbox. state: as for find_shim."""
    try:
        text = _read(state / _BUNDLES / container_id / "config.json", _CONFIG_LIMIT)
        annotations = json.loads(text)["annotations"]
        namespace, pod, name = (printable(annotations[key]) for key in (*_NAMES, _NAME))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return namespace, pod, name


def _read(path: Path, limit: int = _FILE_LIMIT) -> str:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, encoding="utf-8", errors="replace") as file:
        return file.read(limit)


def _receive(connection: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        piece = connection.recv(count - len(found))
        if not piece:
            raise EOFError("it has closed the connection")
        found += piece
    return found
