# SPDX-License-Identifier: Apache-2.0
"""Where a container's shim listens, and what is made of its answers. That real shims understand
us is shown in tests/kubernetes."""

from __future__ import annotations

import json
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpustasis.errors import EngineError
from gpustasis.runtimes.cri import message_classes
from gpustasis.runtimes.shim import _MESSAGES, Shim, container_names, find_shim

ID = "0123456789abcdef" * 4
HASH = "ab" * 8
MESSAGES = message_classes(_MESSAGES)
HEADER = struct.Struct(">IIBB")


@pytest.fixture
def state() -> Iterator[Path]:
    """containerd's directory; pytest's own directories may be too long for a socket's path."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="shim-") as name:
        (Path(name) / "io.containerd.runtime.v2.task/k8s.io" / ID).mkdir(parents=True)
        (Path(name) / "s").mkdir()
        yield Path(name)


def bundle(state: Path) -> Path:
    return state / "io.containerd.runtime.v2.task/k8s.io" / ID


def write(state: Path, **fields: object) -> None:
    known = {"version": 3, "address": f"unix:///run/containerd/s/{HASH}", "protocol": "ttrpc"}
    (bundle(state) / "bootstrap.json").write_text(json.dumps(known | fields))


def test_where_it_listens(state: Path) -> None:
    here = state / "s" / HASH
    assert find_shim(state, ID) is None
    (bundle(state) / "address").write_text(f"unix:///run/containerd/s/{HASH}\n")
    assert find_shim(state, ID) is None  # it is nowhere to be seen
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(here))
        assert find_shim(state, ID) == Shim(ID, here, 2)
        write(state)
        assert find_shim(state, ID) == Shim(ID, here, 3)
        assert find_shim(state, "f" * 64) is None
        (state / "elsewhere/s").mkdir(parents=True)
        there = here.rename(state / "elsewhere/s" / HASH)
        assert find_shim(state, ID) is None
        write(state, address=f"unix://{there}")
        assert find_shim(state, ID) == Shim(ID, there, 3)


@pytest.mark.parametrize(
    "fields", [{"protocol": "grpc"}, {"address": "vsock://2:1"}, {"address": 7}, {"version": "x"}]
)
def test_a_shim_of_another_kind_is_none(state: Path, fields: dict[str, object]) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(state / "s" / HASH))
        write(state)
        assert find_shim(state, ID) is not None
        write(state, **fields)
        assert find_shim(state, ID) is None


@pytest.mark.parametrize("text", ["", "[]", "{", "{}"])
def test_what_is_no_description_is_none(state: Path, text: str) -> None:
    (bundle(state) / "bootstrap.json").write_text(text)
    assert find_shim(state, ID) is None  # and no traceback


@contextmanager
def shim(state: Path, answer: Callable[[object], bytes]) -> Iterator[Shim]:
    """One that answers each request so; answer is given the request."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(state / "s" / HASH))
    server.listen()

    def run() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                length, *_ = HEADER.unpack(connection.recv(HEADER.size, socket.MSG_WAITALL))
                text = connection.recv(length, socket.MSG_WAITALL)
                connection.sendall(answer(MESSAGES.Request.FromString(text)))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield Shim(ID, state / "s" / HASH, 3)
    finally:
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
        server.close()


def response(payload: bytes = b"", code: int = 0, message: str = "", kind: int = 2) -> bytes:
    fields = {"status": {"code": code, "message": message}, "payload": payload}
    text: bytes = MESSAGES.Response(**fields).SerializeToString()
    return HEADER.pack(len(text), 1, kind, 0) + text


@pytest.mark.parametrize(("status", "paused"), [(2, False), (4, True)])
def test_what_it_is_asked(state: Path, status: int, paused: bool) -> None:
    asked: list[Any] = []

    def answer(request: object) -> bytes:
        asked.append(request)
        return response(MESSAGES.StateResponse(status=status).SerializeToString())

    with shim(state, answer) as one:
        assert one.is_paused() == paused
        one.resume()
    assert [(r.service, r.method) for r in asked] == [
        ("containerd.task.v3.Task", "State"),
        ("containerd.task.v3.Task", "Resume"),
    ]
    assert {MESSAGES.TaskRequest.FromString(r.payload).id for r in asked} == {ID}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (response(code=2, message="no \x1b[31m such task"), "refuses Resume: no ?[31m such task"),
        (response(kind=3), "answers Resume with what is no answer"),
        (HEADER.pack(1 << 30, 1, 2, 0), "answers Resume with what is no answer"),
        (response()[:-1], "does not answer Resume: it has closed the connection"),
        (b"", "does not answer Resume: it has closed the connection"),
    ],
)
def test_answers_that_are_none(state: Path, answer: bytes, said: str) -> None:
    with shim(state, lambda request: answer) as one, pytest.raises(EngineError) as caught:
        one.resume()
    assert said in str(caught.value)


def test_nobody_listens(state: Path) -> None:
    with pytest.raises(EngineError, match=r"does not answer State: .*No such file"):
        Shim(ID, state / "s" / HASH, 3).is_paused()


def test_names_of_a_container(state: Path) -> None:
    names = {
        "io.kubernetes.cri.sandbox-namespace": "tests",
        "io.kubernetes.cri.sandbox-name": "pod",
        "io.kubernetes.cri.container-name": "job\x1b",
    }
    config = bundle(state) / "config.json"
    assert container_names(state, ID) is None
    config.write_text(json.dumps({"annotations": names, "process": {"env": ["A" * (1 << 20)]}}))
    found = container_names(state, ID)
    assert found is not None and found[:2] == ("tests", "pod")
    assert found[2].startswith("job") and "\x1b" not in found[2]
    for wrong in (
        json.dumps({"annotations": {key: names[key] for key in list(names)[:2]}}),  # a sandbox
        json.dumps({"annotations": names | {"io.kubernetes.cri.sandbox-name": 7}}),
        *("", "[]", "{", "{}", "[" * 100_000, '{"annotations": []}'),
    ):
        config.write_text(wrong)
        assert container_names(state, ID) is None
