# SPDX-License-Identifier: Apache-2.0
"""Where a container's shim listens, what it is asked, and what is made of its answers. The bytes
are written down here from containerd's api/runtime/task/v3/shim.proto, and ttrpc's PROTOCOL.md and
request.proto. That real shims understand us is shown in tests/kubernetes."""

from __future__ import annotations

import json
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpustasis.errors import EngineError
from gpustasis.runtimes.shim import Shim, container_names, find_shim

ID = "0123456789abcdef" * 4
HASH = "ab" * 8
HEADER_BYTES = 10
# Of a request: the length of what follows, stream 1, kind 1, no flags; then service (field 1),
# method (2), payload (3: field 1 is the id, of 64 characters) and ten seconds in nanoseconds (4).
HEADER = b"\0\0\0%c\0\0\0\1\1\0"
SERVICE = b"\x0a\x17containerd.task.v%d.Task"
PAYLOAD = b"\x1a\x42\x0a\x40" + ID.encode()
TIMEOUT = b"\x20\x80\xc8\xaf\xa0\x25"
STATE = b"\x12\x05State"
RESUME = b"\x12\x06Resume"
# Of an answer: stream 1, kind 2; an empty status, which is none, and a StateResponse: id, bundle,
# process 12345, the status, and what follows it.
STATE_ANSWER = (
    *(b"\0\0\0\x5c\0\0\0\1\2\0", b"\x0a\0", b"\x12\x58", b"\x0a\x40" + ID.encode()),
    *(b"\x12\x07/bundle", b"\x18\xb9\x60", b"\x20%c", b"\x2a\x02in", b"\x32\x02ou"),
)
EMPTY_ANSWER = b"\0\0\0\4\0\0\0\1\2\0" + b"\x0a\0" + b"\x12\0"
REFUSAL = b"\0\0\0\x18\0\0\0\1\2\0" + b"\x0a\x16" + b"\x08\2" + b"\x12\x12no \x1b[31m such task"


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
    "fields",
    [
        {"protocol": "grpc"},
        {"address": "vsock://2:1"},
        {"address": 7},
        {"version": "x"},
        {"version": float("inf")},
        {"address": f"unix:///{'x' * 300}/s/{HASH * 300}"},
        {"address": f"unix:///\0/s/{HASH}g"},
    ],
)
def test_a_shim_of_another_kind_is_none(state: Path, fields: dict[str, object]) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(state / "s" / HASH))
        write(state)
        assert find_shim(state, ID) is not None
        write(state, **fields)
        assert find_shim(state, ID) is None


def test_a_file_that_is_nested_too_deep_is_none(state: Path) -> None:
    (bundle(state) / "bootstrap.json").write_text("[" * 60000)
    assert find_shim(state, ID) is None


@pytest.mark.parametrize("text", ["", "[]", "{", "{}"])
def test_what_is_no_description_is_none(state: Path, text: str) -> None:
    (bundle(state) / "bootstrap.json").write_text(text)
    assert find_shim(state, ID) is None  # and no traceback


@contextmanager
def shim(state: Path, answer: Callable[[bytes], bytes]) -> Iterator[Shim]:
    """One that answers each request so; answer is given the request's frame."""
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
                header = connection.recv(HEADER_BYTES, socket.MSG_WAITALL)
                length = int.from_bytes(header[:4], "big")
                text = connection.recv(length, socket.MSG_WAITALL)
                connection.sendall(answer(header + text))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield Shim(ID, state / "s" / HASH, 3)
    finally:
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
        server.close()


def request(method: bytes, length: int, version: int = 3) -> bytes:
    return HEADER % length + SERVICE % version + method + PAYLOAD + TIMEOUT


@pytest.mark.parametrize(("status", "paused"), [(2, False), (4, True)])
def test_what_it_is_asked(state: Path, status: int, paused: bool) -> None:
    asked: list[bytes] = []

    def answer(asks: bytes) -> bytes:
        asked.append(asks)
        return b"".join(STATE_ANSWER) % status if STATE in asks else EMPTY_ANSWER

    with shim(state, answer) as one:
        assert one.is_paused() == paused
        one.resume()
        Shim(ID, one.socket, 2).resume()
    assert asked == [request(STATE, 106), request(RESUME, 107), request(RESUME, 107, 2)]


def of_kind(kind: int) -> bytes:
    return EMPTY_ANSWER[:8] + bytes([kind]) + EMPTY_ANSWER[9:]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (REFUSAL, "refuses Resume: no ?[31m such task"),
        (of_kind(3), "answers Resume with what is no answer"),
        (b"\x40\0\0\0\0\0\0\1\2\0", "answers Resume with what is no answer"),
        (EMPTY_ANSWER[:-1], "does not answer Resume: it has closed the connection"),
        (b"", "does not answer Resume: it has closed the connection"),
    ],
)
def test_answers_that_are_none(state: Path, answer: bytes, said: str) -> None:
    with shim(state, lambda _: answer) as one, pytest.raises(EngineError) as caught:
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
