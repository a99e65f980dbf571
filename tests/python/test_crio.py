# SPDX-License-Identifier: Apache-2.0
"""What is made of CRI-O's answers. That a real one understands us is shown in tests/kubernetes."""

from __future__ import annotations

import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gpustasis.errors import EngineError
from gpustasis.runtimes.crio import unpause

ID = "0123456789abcdef" * 4


@contextmanager
def crio(answer: str) -> Iterator[tuple[str, list[bytes]]]:
    """One that answers so; its path, and what it was asked."""
    asked: list[bytes] = []
    with (
        tempfile.TemporaryDirectory(dir="/tmp", prefix="crio-") as name,
        socket.socket(socket.AF_UNIX) as server,
    ):
        server.bind(f"{name}/socket")
        server.listen()

        def run() -> None:
            connection, _ = server.accept()
            with connection:
                asked.append(connection.recv(4096))
                connection.sendall(answer.encode())

        thread = threading.Thread(target=run)
        thread.start()
        yield f"{name}/socket", asked
        thread.join()


@pytest.mark.parametrize(
    ("answer", "resumed"),
    [
        ("HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n200 OK", True),
        ("HTTP/1.1 409 Conflict\r\n\r\ncontainer is not in paused state, now is running\n", False),
        ("HTTP/1.1 404 Not Found\r\n\r\ncan't find the container\n", False),
    ],
)
def test_what_it_is_asked(answer: str, resumed: bool) -> None:
    with crio(answer) as (path, asked):
        assert unpause(path, ID) == resumed
    assert asked[0].startswith(f"GET /unpause/{ID} HTTP/1.0\r\n".encode())


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            "HTTP/1.1 500 Internal Server Error\r\n\r\nno \x1b[31msuch\nstate\n",
            "no ?[31msuch state (500)",
        ),
        ("", "answers what is no answer of CRI-O's"),
        ("\x00\x00\x06\x04\x00\x00\x00", "answers what is no answer of CRI-O's"),
        ("HTTP/1.0 200 OK", "answers what is no answer of CRI-O's"),
    ],
)
def test_answers_that_are_none(answer: str, said: str) -> None:
    with crio(answer) as (path, _), pytest.raises(EngineError) as caught:
        unpause(path, ID)
    assert said in str(caught.value)


def test_nobody_listens() -> None:
    with pytest.raises(EngineError, match=r"does not answer: .*No such file"):
        unpause("/run/nobody/crio.sock", ID)
