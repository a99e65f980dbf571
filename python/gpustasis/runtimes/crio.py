# SPDX-License-Identifier: Apache-2.0
"""What CRI-O offers beside CRI, by HTTP on the same socket.

Source: CRI-O 1.36, server/inspect.go.
"""

from __future__ import annotations

import re
import socket

from gpustasis.errors import EngineError
from gpustasis.runtimes.cri import printable

CRIO_NAME = "cri-o"  # as it names itself
_TIMEOUT_S = 30.0
_ANSWER_LIMIT = 4096
_STATUS = re.compile(r"HTTP/1\.[01] (\d{3})[ \r].*?\r\n\r\n(.*)", re.DOTALL)
_DONE, _NO_SUCH_CONTAINER, _NOT_PAUSED = "200", "404", "409"


def unpause(path: str, container_id: str) -> bool:
    """Have the CRI-O at `path` resume a container; False if to it the container is not paused.

    A CRI-O that found a container paused when it started keeps that: thawed in another way, the
    container could not be checkpointed before CRI-O is started again. Raises EngineError.
    """
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_TIMEOUT_S)
            connection.connect(path)
            connection.sendall(f"GET /unpause/{container_id} HTTP/1.0\r\n\r\n".encode())
            answer = b""
            while len(answer) < _ANSWER_LIMIT and (piece := connection.recv(_ANSWER_LIMIT)):
                answer += piece
    except OSError as exc:
        raise EngineError(f"{path} does not answer: {exc.strerror or exc}") from exc
    match = _STATUS.fullmatch(answer.decode("utf-8", "replace"))
    if match is None:
        raise EngineError(f"{path} answers what is no answer of CRI-O's")
    if match[1] in (_DONE, _NO_SUCH_CONTAINER, _NOT_PAUSED):
        return match[1] == _DONE
    raise EngineError(
        f"{path} did not resume container {container_id}: {printable(match[2])} ({match[1]})"
    )
