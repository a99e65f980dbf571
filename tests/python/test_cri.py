# SPDX-License-Identifier: Apache-2.0
"""The CRI client against runtimes that cannot, will not, or lie."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from gpustasis.errors import EngineError
from gpustasis.runtimes import containerd, cri_containers, freezer
from gpustasis.runtimes.cri import RESUME_TASK, Cri
from support.cri_server import (
    CONTAINERS,
    ONE,
    TWO,
    Answer,
    CriServer,
    Paused,
    inventory,
    refuse,
)
from support.job import ended

TESTS = Path(__file__).resolve().parent.parent
UNFROZEN = f'checkpointing container "{TWO}" failed: OCI runtime pause failed: unable to freeze'
# As containerd 1.7.24 answers: the method is there, and says so.
OLD = refuse(grpc.StatusCode.UNIMPLEMENTED, "method CheckpointContainer not implemented")


def failure(
    cri_path: Path, export: Path, answers: dict[str, Answer], version: str = "v2.1.9"
) -> str:
    """What a checkpoint of ONE says that must fail."""
    known = inventory("containerd", version, CONTAINERS)
    with CriServer(cri_path, known | answers), Cri(str(cri_path)) as cri:
        container = cri_containers.find(cri, "default/web/c0")
        with pytest.raises(EngineError) as caught:
            containerd.checkpoint(cri, container, export, 20)
    return str(caught.value)


def test_containerd_1_7(cri_path: Path, tmp_path: Path) -> None:
    message = failure(cri_path, tmp_path / "a.tar", {"CheckpointContainer": OLD}, "1.7.24~ds1")
    assert message.startswith("containerd 1.7.24~ds1 has no CheckpointContainer")
    assert "from 2.0 on" in message
    assert f"ctr -n k8s.io tasks checkpoint --image-path DIR {ONE}" in message


def test_containerd_2_0_without_criu(cri_path: Path, tmp_path: Path) -> None:
    message = failure(cri_path, tmp_path / "a.tar", {"CheckpointContainer": OLD}, "v2.0.3")
    assert "when it finds no criu in its PATH" in message


def test_criu_is_missing(cri_path: Path, tmp_path: Path) -> None:
    text = f'CRIU binary not found or too old (<31600). Failed to checkpoint container "{ONE}"'
    answers = {"CheckpointContainer": refuse(grpc.StatusCode.UNKNOWN, text)}
    message = failure(cri_path, tmp_path / "a.tar", answers)
    assert text in message and "install criu 4.1 or later" in message


def test_the_archive_is_written_elsewhere(cri_path: Path, tmp_path: Path) -> None:
    """By a runtime in another mount namespace."""
    answers: dict[str, Answer] = {"CheckpointContainer": lambda request, context: {}}
    message = failure(cri_path, tmp_path / "a.tar", answers)
    assert "sees other directories than this command" in message
    assert list(tmp_path.iterdir()) == []


def test_what_a_failed_checkpoint_left_is_removed(cri_path: Path, tmp_path: Path) -> None:
    def half(request: Any, context: Any) -> dict[str, object]:
        Path(request.location).write_bytes(b"half")
        return refuse(grpc.StatusCode.UNKNOWN, "no space left\x1b[2J on device")(request, context)

    message = failure(cri_path, tmp_path / "a.tar", {"CheckpointContainer": half})
    assert "no space left?[2J on device" in message
    assert list(tmp_path.iterdir()) == []


def test_a_link_is_not_taken_for_the_archive(cri_path: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")

    def link(request: Any, context: Any) -> dict[str, object]:
        Path(request.location).symlink_to(secret)
        return {}

    assert "cannot open" in failure(cri_path, tmp_path / "a.tar", {"CheckpointContainer": link})
    assert [entry.name for entry in tmp_path.iterdir()] == ["secret"]


def test_the_name_was_taken_meanwhile(cri_path: Path, tmp_path: Path) -> None:
    def taken(request: Any, context: Any) -> dict[str, object]:
        Path(request.location).write_bytes(b"new")
        (tmp_path / "a.tar").write_text("somebody's")
        return {}

    message = failure(cri_path, tmp_path / "a.tar", {"CheckpointContainer": taken})
    assert "cannot get its name" in message
    assert (tmp_path / "a.tar").read_text() == "somebody's"
    (kept,) = (entry for entry in tmp_path.iterdir() if entry.name != "a.tar")
    assert str(kept) in message and kept.read_bytes() == b"new"


@pytest.mark.parametrize("refused", [3, 4])
def test_a_container_that_was_not_frozen(cri_path: Path, tmp_path: Path, refused: int) -> None:
    """runc gives up freezing it on a busy node: it is asked again, four times in all, within the
    time that is left. The words of containerd 2.1 with runc 1.3."""
    asked: list[int] = []

    def answer(request: Any, context: Any) -> dict[str, object]:
        asked.append(request.timeout)
        if len(asked) <= refused:
            context.abort(grpc.StatusCode.UNKNOWN, UNFROZEN)
        Path(request.location).write_bytes(b"an archive")
        return {}

    archive = tmp_path / "a.tar"
    known = inventory("containerd", "v2.1.9", CONTAINERS) | {"CheckpointContainer": answer}
    with CriServer(cri_path, known), Cri(str(cri_path)) as cri:
        container = cri_containers.find(cri, TWO)
        if refused == 4:
            with pytest.raises(EngineError, match="Nothing was dumped, and the container runs on"):
                containerd.checkpoint(cri, container, archive, 80)
        else:
            containerd.checkpoint(cri, container, archive, 80)
    assert len(asked) == 4
    assert asked[0] == 80 and asked == sorted(asked, reverse=True) and 40 <= asked[-1] < 79
    assert [one.name for one in tmp_path.iterdir()] == (["a.tar"] if refused == 3 else [])


@pytest.mark.parametrize("why", ["no time is left", "it is interrupted"])
def test_a_container_that_was_not_frozen_is_not_asked_for_again(
    cri_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """A dump that is begun and cut off at once would leave it paused."""
    asked: list[int] = []

    def now() -> float:
        """The answer takes half of the time: by this clock, so that no load has it cut off."""
        return time.monotonic() + (30 if asked and why == "no time is left" else 0)

    monkeypatch.setattr(freezer, "time", SimpleNamespace(monotonic=now, sleep=time.sleep))

    def answer(request: Any, context: Any) -> dict[str, object]:
        asked.append(request.timeout)
        context.abort(grpc.StatusCode.UNKNOWN, UNFROZEN)
        return {}

    known = inventory("containerd", "v2.1.9", CONTAINERS) | {"CheckpointContainer": answer}
    stop = why == "it is interrupted"
    with CriServer(cri_path, known), Cri(str(cri_path)) as cri:
        container = cri_containers.find(cri, TWO)
        stops = lambda: stop and bool(asked)  # noqa: E731
        with pytest.raises(EngineError, match="unable to freeze"):
            containerd.checkpoint(cri, container, tmp_path / "a.tar", 60, stops)
    assert asked == [60]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_checkpoint_leaves_the_container_running(
    cri_path: Path, tmp_path: Path, number: signal.Signals
) -> None:
    runtime = Paused()
    with CriServer(cri_path, runtime.answers()):
        command = subprocess.Popen(
            [
                *(sys.executable, "-m", "gpustasis", "containerd", "--address", str(cri_path)),
                *("checkpoint", "default/web/c0", "-e", str(tmp_path / "a.tar")),
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert runtime.begun.wait(60)
            command.send_signal(number)
            _, said = command.communicate(timeout=60)
        finally:
            command.kill()
            runtime.ended.set()
            command.wait()
    assert command.returncode == 16
    assert "interrupted: container default/web/c0 " in said
    assert not runtime.paused
    assert list(tmp_path.iterdir()) == []


def test_a_container_that_stays_paused(cri_path: Path, tmp_path: Path) -> None:
    runtime = Paused()
    answers = runtime.answers() | {RESUME_TASK: refuse(grpc.StatusCode.UNKNOWN, "no")}

    def stops() -> bool:
        """Never; and no call is cut off before the runtime has begun with it."""
        return not runtime.begun.wait(60)

    with CriServer(cri_path, answers), Cri(str(cri_path)) as cri:
        container, archive = cri_containers.find(cri, TWO), tmp_path / "a.tar"
        try:
            with pytest.raises(EngineError) as caught:
                containerd.checkpoint(cri, container, archive, 1, stops)
        finally:
            runtime.ended.set()
    assert f"ctr -n k8s.io tasks resume {TWO}" in str(caught.value)


# In a pid namespace of its own. argv: the socket, and a file that is made when it is asked for a
# checkpoint.
HIDDEN = """
import sys, time
from pathlib import Path
from support.cri_server import CriServer, inventory
known = inventory("containerd", "v2.1.9", {"1" * 64: 1})
def checkpoint(request, context):
    Path(sys.argv[2]).touch()
    return {}
with CriServer(Path(sys.argv[1]), known | {"CheckpointContainer": checkpoint}):
    print("serves", flush=True)
    time.sleep(1000)
"""


def test_a_container_that_could_not_be_resumed_is_not_paused(
    cri_path: Path, tmp_path: Path
) -> None:
    """Dumps of a runtime in another pid namespace are not seen: none could be waited for."""
    asked = tmp_path / "asked"
    words = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, "-c")
    with ended(
        subprocess.Popen(
            [*words, HIDDEN, str(cri_path), str(asked)],
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(TESTS)},
        )
    ) as made:
        assert made.stdout is not None and made.stdout.readline() == b"serves\n"
        with Cri(str(cri_path)) as cri:
            container = cri_containers.find(cri, ONE)
            with pytest.raises(EngineError, match=r"^the runtime, .* in another pid namespace"):
                containerd.checkpoint(cri, container, tmp_path / "a.tar", 5)
            said = r"^container default/web/c0 \(1+\) was not resumed and may stand still: the run"
            with pytest.raises(EngineError, match=said):
                cri_containers.resume(cri, container)
    assert not asked.exists()


def test_one_that_was_paused_before_stays_so(cri_path: Path, tmp_path: Path) -> None:
    runtime = Paused()
    runtime.paused = True
    with CriServer(cri_path, runtime.answers()), Cri(str(cri_path)) as cri:
        try:
            with pytest.raises(EngineError, match="took longer than 1 s"):
                containerd.checkpoint(cri, cri_containers.find(cri, TWO), tmp_path / "a.tar", 1)
        finally:
            runtime.ended.set()
    assert runtime.paused


def test_names(cri_path: Path) -> None:
    with (
        CriServer(cri_path, inventory("containerd", "v2.1.9", CONTAINERS)),
        Cri(str(cri_path)) as cri,
    ):
        assert cri_containers.find(cri, "11").id == ONE
        assert cri_containers.find(cri, "default/web/c1").id == TWO
        for name, explained in (
            ("1", "1 names 2 containers: default/web/c0 (1111111111111), "),
            ("dead", "container default/web/c2 (deaddeaddeadd) does not run (state: exited)"),
            ("feed", f"containerd v2.1.9 at {cri_path} has no container feed; "),
            ("default/web", "is no NAMESPACE/POD/CONTAINER"),
            ("a b", "is no container's id"),
            ("", "is no container's id"),
        ):
            with pytest.raises(EngineError) as caught:
                cri_containers.find(cri, name)
            assert explained in str(caught.value)


def test_no_runtime(cri_path: Path, tmp_path: Path) -> None:
    def refused(address: str) -> str:
        with pytest.raises(EngineError) as caught, Cri(address) as cri:
            cri.runtime()
        return str(caught.value)

    assert "No such file or directory; does the runtime run" in refused(str(cri_path))
    cri_path.touch()
    assert "nobody listens there" in refused(f"unix://{cri_path}")
    cri_path.unlink()
    assert "is no address of a container runtime" in refused("tcp://127.0.0.1:1")
    assert "at most 107 bytes" in refused("/" + "x" * 107)
    with CriServer(cri_path, {}):
        assert "does not speak CRI v1" in refused(str(cri_path))
    with socket.socket(socket.AF_UNIX) as silent:  # takes connections, and is no gRPC server
        silent.bind(str(cri_path))
        silent.listen()
        stop = threading.Event()

        def hang_up() -> None:
            silent.settimeout(0.05)
            while not stop.is_set():
                try:
                    silent.accept()[0].close()
                except TimeoutError:
                    time.sleep(0)

        thread = threading.Thread(target=hang_up)
        thread.start()
        try:
            assert "does not say its version" in refused(str(cri_path))
        finally:
            stop.set()
            thread.join()


def test_the_extra_is_missing() -> None:
    """And `gpustasis.cli` does without it."""
    script = (
        "import sys; sys.modules['grpc'] = None; from gpustasis.cli import cli;"
        "from gpustasis.errors import UnsupportedError\n"
        "try: cli.main(['containerd', 'list'], standalone_mode=False)\n"
        "except UnsupportedError as exc: print(exc)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert "install the extra \"cri\": pip install 'WHEEL[cri]', WHEEL being" in done.stdout
