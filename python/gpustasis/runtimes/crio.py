# SPDX-License-Identifier: Apache-2.0
"""What CRI-O offers beside CRI, by HTTP on the same socket and in its storage.

Source: CRI-O 1.36, server/inspect.go, internal/factory/container/container.go (annotations).
"""

from __future__ import annotations

import json
import re
import socket
import time
from pathlib import Path

from gpustasis.errors import EngineError
from gpustasis.files import open_regular
from gpustasis.runtimes.cri import printable

CRIO_NAME = "cri-o"  # as it names itself
_TIMEOUT_S = 30.0
_ANSWER_LIMIT = 64 << 10
_CONFIG_LIMIT = 16 << 20
_STATUS = re.compile(r"HTTP/1\.[01] (\d{3})[ \r].*?\r\n\r\n(.*)", re.DOTALL)
_DONE, _NO_SUCH_CONTAINER, _NOT_PAUSED = "200", "404", "409"
_TYPE, _LABELS = (f"io.kubernetes.cri-o.{one}" for one in ("ContainerType", "Labels"))
# A kubelet's labels of a container.
_NAMES = tuple(f"io.kubernetes.{one}" for one in ("pod.namespace", "pod.name", "container.name"))


def unpause(path: str, container_id: str) -> bool:
    """Have the CRI-O at `path` resume a container; False if to it the container is not paused.

    A CRI-O that found a container paused when it started keeps that: thawed in another way, the
    container could not be checkpointed before CRI-O is started again. Raises EngineError.
    """
    status, text = _get(path, f"/unpause/{container_id}", _TIMEOUT_S)
    if status in (_DONE, _NO_SUCH_CONTAINER, _NOT_PAUSED):
        return status == _DONE
    raise EngineError(
        f"{path} did not resume container {container_id}: {printable(text)} ({status})"
    )


def storage_directory(path: str, timeout_s: float = _TIMEOUT_S) -> Path:
    """Where the CRI-O at `path` keeps what it knows of its containers. Raises EngineError."""
    status, text = _get(path, "/info", timeout_s)
    try:
        info = json.loads(text)
        root, driver = Path(info["storage_root"]), str(info["storage_driver"])
        return Path("/") / str(root).lstrip("/") / f"{driver}-containers"
    except (ValueError, KeyError, TypeError, RecursionError) as exc:
        raise EngineError(f"{path} does not say where its storage is ({status})") from exc


def container_names(storage: Path, container_id: str) -> tuple[str, str, str] | None:
    """Namespace, pod and name of a container, without CRI-O; None: there is none of this id, or it
    is a pod's sandbox. storage: of storage_directory."""
    # As the host has it, should this be a pod that is in the host's pid namespace.
    for root in (Path("/"), Path("/proc/1/root")):
        place = root / storage.relative_to("/") / container_id / "userdata/config.json"
        try:
            with open_regular(place) as file:
                annotations = json.loads(file.read(_CONFIG_LIMIT))["annotations"]
            if annotations[_TYPE] != "container":
                return None
            labels = json.loads(annotations[_LABELS])
            namespace, pod, name = (printable(labels[key]) for key in _NAMES)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
        return namespace, pod, name
    return None


def _get(path: str, target: str, timeout_s: float) -> tuple[str, str]:
    """Status and text of an answer; timeout_s: for all of it. Raises EngineError."""
    end = time.monotonic() + timeout_s
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout_s)
            connection.connect(path)
            connection.sendall(f"GET {target} HTTP/1.0\r\n\r\n".encode())
            answer = b""
            while len(answer) < _ANSWER_LIMIT and (piece := connection.recv(_ANSWER_LIMIT)):
                answer += piece
                if time.monotonic() > end:
                    raise TimeoutError(f"its answer has no end after {timeout_s:g} s")
    except OSError as exc:
        raise EngineError(f"{path} does not answer: {exc.strerror or exc}") from exc
    match = _STATUS.fullmatch(answer.decode("utf-8", "replace"))
    if match is None:
        raise EngineError(f"{path} answers what is no answer of CRI-O's")
    return match[1], match[2]
