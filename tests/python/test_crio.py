# SPDX-License-Identifier: Apache-2.0
"""What is made of CRI-O's answers. That a real one understands us is shown in tests/kubernetes."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpustasis.errors import EngineError
from gpustasis.runtimes import crio as runtimes_crio
from gpustasis.runtimes.crio import container_names, storage_directory, unpause

ID = "0123456789abcdef" * 4
Factory = pytest.TempPathFactory


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


def test_an_answer_that_comes_for_ever_is_not_waited_for(
    tmp_path_factory: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that goes on at each look: no load has a single read take all the time."""
    clock = itertools.count(step=20)
    monkeypatch.setattr(runtimes_crio, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    path = str(tmp_path_factory.mktemp("s") / "socket")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()

        def drip() -> None:
            with server.accept()[0] as connection, contextlib.suppress(OSError):
                while True:
                    connection.sendall(b"x")
                    time.sleep(0.05)

        thread = threading.Thread(target=drip)
        thread.start()
        with pytest.raises(EngineError, match=r"does not answer: its answer has no end after 60 s"):
            storage_directory(path, 60)
        thread.join()


def test_nobody_listens() -> None:
    with pytest.raises(EngineError, match=r"does not answer: .*No such file"):
        unpause("/run/nobody/crio.sock", ID)


def test_where_its_storage_is() -> None:
    known = '{"storage_driver":"overlay","storage_root":"/var/lib/containers/storage"}'
    with crio(f"HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n{known}") as (path, asked):
        assert storage_directory(path) == Path("/var/lib/containers/storage/overlay-containers")
    assert asked[0].startswith(b"GET /info HTTP/1.0\r\n")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"storage_driver":"overlay","storage_root":7}', "[" * 20_000]
)
def test_a_storage_that_it_does_not_tell(text: str) -> None:
    with crio(f"HTTP/1.0 200 OK\r\n\r\n{text}") as (path, _), pytest.raises(EngineError) as caught:
        storage_directory(path)
    assert "does not say where its storage is (200)" in str(caught.value)


LABELS = {
    "io.kubernetes.container.name": "job",
    "io.kubernetes.pod.name": "trainer",
    "io.kubernetes.pod.namespace": "default",
}


def description(labels: object, kind: object = "container") -> str:
    words = {
        "io.kubernetes.cri-o.ContainerType": kind,
        "io.kubernetes.cri-o.Labels": json.dumps(labels),
    }
    return json.dumps({"annotations": words})


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (description(LABELS), ("default", "trainer", "job")),
        (
            description(LABELS | {"io.kubernetes.pod.name": "a\x1b[31m\nb"}),
            ("default", "a?[31m b", "job"),
        ),
        (description(LABELS, "sandbox"), None),
        (description({}), None),
        (description([]), None),
        (description(LABELS | {"io.kubernetes.pod.name": 7}), None),
        ("{}", None),
        ("[" * 20_000, None),
        ("", None),
    ],
)
def test_names_of_a_container(
    tmp_path: Path, text: str, names: tuple[str, str, str] | None
) -> None:
    place = tmp_path / ID / "userdata"
    place.mkdir(parents=True)
    assert container_names(tmp_path, ID) is None
    (place / "config.json").write_text(text)
    assert container_names(tmp_path, ID) == names


def test_a_description_that_holds_up_nobody(tmp_path: Path) -> None:
    place = tmp_path / ID / "userdata"
    place.mkdir(parents=True)
    os.mkfifo(place / "config.json")
    assert container_names(tmp_path, ID) is None
