# SPDX-License-Identifier: Apache-2.0
"""A container that its runtime has left paused, although the runtime has answered."""

from __future__ import annotations

import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import grpc
import pytest

from gpustasis.errors import EngineError
from gpustasis.runtimes import containerd, cri_containers, freezer
from gpustasis.runtimes.cri import GET_TASK, RESUME_TASK, CallError, Cri
from support.cri_server import CONTAINERS, TWO, Answer, CriServer, Paused, inventory, refuse

CRUN = f'failed to checkpoint container {TWO}: running "/usr/bin/crun" ["checkpoint" "{TWO}"]'
DUMPS = f"failed to write config dumps for container {TWO}: no space left on device"
CHANGES = f"failed to write file system changes of container {TWO}: no space left on device"
FREEZES = "OCI runtime pause failed: timeout of 10s reached waiting for the cgroup to freeze"
BY_OTHERS = "OCI runtime pause failed: cannot pause a paused container"


class Left(Paused):
    """Answers a checkpoint, and leaves the container paused. words: of an error, or "": of none.
    name: "cri-o": it has none of containerd's own calls, and the container's group says what is."""

    def __init__(self, words: str, group: Path, name: str = "cri-o") -> None:
        self._freeze = group / "cgroup.freeze"
        group.mkdir(parents=True)
        super().__init__()
        self.words, self.name = words, name

    @property
    def paused(self) -> bool:
        return self._freeze.read_text() == "1"

    @paused.setter
    def paused(self, value: bool) -> None:
        self._freeze.write_text("1" if value else "0")

    def leave(self, request: Any, context: Any) -> dict[str, object]:
        self.paused = True
        if self.words:
            context.abort(grpc.StatusCode.UNKNOWN, self.words)
        Path(request.location).write_bytes(b"an archive")
        return {}

    def answers(self) -> dict[str, Answer]:
        found = super().answers() | inventory(self.name, "1.36.3", CONTAINERS)
        if self.name == "cri-o":
            del found[GET_TASK], found[RESUME_TASK]
        return found | {"CheckpointContainer": self.leave}


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the container's is."""
    monkeypatch.setattr(freezer, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(cri_containers, "unpause", lambda path, container: False)
    return tmp_path / "groups" / f"crio-{TWO}.scope"


@pytest.mark.parametrize("words", [CRUN, DUMPS, CHANGES, FREEZES, BY_OTHERS])
@pytest.mark.parametrize("how", ["resumed", "paused before", "not resumed"])
def test_after_an_error(
    cri_path: Path,
    tmp_path: Path,
    group: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: str,
    how: str,
) -> None:
    """The words of CRI-O 1.36 and runc 1.3. What somebody else has paused stays so."""
    runtime = Left(words, group)
    runtime.paused = how == "paused before"
    if how == "not resumed":
        monkeypatch.setattr(cri_containers, "thaw", lambda group: None)
    with CriServer(cri_path, runtime.answers()), Cri(str(cri_path)) as cri:
        container = cri_containers.find(cri, TWO)
        with pytest.raises(EngineError) as caught:
            containerd.checkpoint(cri, container, tmp_path / "a.tar", 30)
    said = str(caught.value)
    assert f"did not checkpoint container default/web/c1 (1212121212121): {words}" in said
    is_looked_at = how != "paused before" and words != BY_OTHERS
    assert ("the container was left paused, and was resumed" in said) == (
        is_looked_at and how == "resumed"
    )
    assert ("was not resumed and may stand still" in said) == (is_looked_at and how != "resumed")
    assert runtime.paused != (is_looked_at and how == "resumed")


@pytest.mark.parametrize(
    ("name", "paused_before", "resumed"),
    [("cri-o", False, True), ("cri-o", True, False), ("containerd", False, False)],
)
def test_after_a_checkpoint(
    cri_path: Path, tmp_path: Path, group: Path, name: str, paused_before: bool, resumed: bool
) -> None:
    """By a CRI-O whose crun does not say yet that it is paused. containerd asks nobody that."""
    runtime = Left("", group, name)
    runtime.paused = paused_before
    archive = tmp_path / "a.tar"
    with CriServer(cri_path, runtime.answers()), Cri(str(cri_path)) as cri:
        containerd.checkpoint(cri, cri_containers.find(cri, TWO), archive, 30)
    assert archive.read_bytes() == b"an archive" and runtime.paused != resumed


HOWS = ["ends", "ends while it is resumed", "is not seen", "is not seen before"]


@pytest.mark.parametrize("how", HOWS)
def test_a_checkpoint_of_one_that_cannot_be_seen(
    cri_path: Path, tmp_path: Path, group: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """It is whole: nothing says that the container stands still."""
    runtime = Left("", group)
    runtime.paused = False
    if how.startswith("is not seen"):
        shutil.rmtree(group)

    def answer(request: Any, context: Any) -> dict[str, object]:
        if how == "is not seen before":  # nor whether somebody has paused it
            group.mkdir()
        if how in ("ends while it is resumed", "is not seen before"):
            return runtime.leave(request, context)
        Path(request.location).write_bytes(b"an archive")
        shutil.rmtree(group, ignore_errors=True)
        return {}

    monkeypatch.setattr(cri_containers, "thaw", shutil.rmtree)

    archive = tmp_path / "a.tar"
    answers = runtime.answers() | {"CheckpointContainer": answer}
    with CriServer(cri_path, answers), Cri(str(cri_path)) as cri:
        containerd.checkpoint(cri, cri_containers.find(cri, TWO), archive, 30)
    assert archive.read_bytes() == b"an archive"
    assert group.exists() == (how == "is not seen before")


@pytest.mark.parametrize("is_taken", [False, True])
@pytest.mark.parametrize("resumed", [False, True])
def test_whatever_becomes_of_the_archive(
    cri_path: Path,
    tmp_path: Path,
    group: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_taken: bool,
    resumed: bool,
) -> None:
    """The container runs on, or it is said that it does not. is_taken: the archive's name is."""
    if not resumed:
        monkeypatch.setattr(cri_containers, "thaw", lambda group: None)
    archive, runtime = tmp_path / "a.tar", Left("", group)
    runtime.paused = False

    def leave(request: Any, context: Any) -> dict[str, object]:
        if is_taken:
            archive.touch()
        return runtime.leave(request, context)

    answers = runtime.answers() | {"CheckpointContainer": leave}
    said = ""
    with CriServer(cri_path, answers), Cri(str(cri_path)) as cri:
        container = cri_containers.find(cri, TWO)
        try:
            containerd.checkpoint(cri, container, archive, 30)
        except EngineError as exc:
            said = str(exc)
    left = "container default/web/c1 (1212121212121) was not resumed and may stand still"
    assert runtime.paused == (left in said) == (not resumed)
    assert ("it cannot get its name" in said) == is_taken
    assert (f"{archive} is complete, but {left}" in said) == (not is_taken and not resumed)
    assert bool(said) == (is_taken or not resumed)
    assert archive.exists()


@pytest.mark.parametrize("state", ["running", "paused"])
def test_one_that_only_its_group_says_is_paused(cri_path: Path, group: Path, state: str) -> None:
    """As runc leaves one that it could not freeze in time: to containerd it runs. What is paused to
    containerd stays so if containerd does not resume it."""
    played = Left("", group, "containerd")
    runtime = Paused()
    runtime.paused = state == "paused"
    refused = refuse(grpc.StatusCode.FAILED_PRECONDITION, "cannot resume a running process")
    answers = runtime.answers() | {RESUME_TASK: refused}
    with CriServer(cri_path, answers), Cri(str(cri_path)) as cri:
        container = cri_containers.find(cri, TWO)
        played.paused = False
        if state == "running":
            assert not cri_containers.resume(cri, container)
        played.paused = True
        if state == "paused":
            with pytest.raises(EngineError, match="was not resumed and may stand still: it is st"):
                cri_containers.resume(cri, container)
        else:
            assert cri_containers.resume(cri, container)
        assert played.paused == (state == "paused")


def test_a_runtime_that_is_away_resumes_nothing(cri_path: Path, group: Path) -> None:
    """Beside it nothing is thawed either: it may have found the container paused."""
    runtime = Left("", group)
    runtime.paused = True
    away = refuse(grpc.StatusCode.UNAVAILABLE, "it starts")
    answers = runtime.answers() | {RESUME_TASK: away}
    with CriServer(cri_path, answers), Cri(str(cri_path)) as cri:
        container = cri_containers.find(cri, TWO)
        with pytest.raises(CallError, match="it starts"):
            cri_containers.resume_task(cri, container)
    assert runtime.paused


def test_one_that_ends_as_it_is_resumed(cri_path: Path) -> None:
    runtime = Paused()
    runtime.paused = True
    gone = refuse(grpc.StatusCode.NOT_FOUND, "task not found")

    def resume(request: Any, context: Any) -> Any:
        runtime.ended.set()
        return gone(request, context)

    def get(request: Any, context: Any) -> Any:
        return (gone if runtime.ended.is_set() else paused)(request, context)

    paused = runtime.answers()[GET_TASK]
    answers = runtime.answers() | {GET_TASK: get, RESUME_TASK: resume}
    with CriServer(cri_path, answers), Cri(str(cri_path)) as cri:
        assert cri_containers.resume(cri, cri_containers.find(cri, TWO))


def test_who_is_attached_is_at_no_checkpoint(
    cri_path: Path, tmp_path: Path, group: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CRI-O has a pipe of the container's open all that time."""
    control = f"/run/containers/storage/overlay-containers/{TWO}/userdata/ctl"
    archive = f"/var/lib/containers/storage/overlay-containers/{TWO}/userdata/checkpoint/x.img"
    opened: dict[str, dict[int, list[str]]] = {"criu": {}, "crio": {7: [control]}}
    monkeypatch.setattr(cri_containers, "open_files", lambda *comms: deepcopy(opened))
    runtime = Left("", group)
    runtime.paused = False
    with CriServer(cri_path, runtime.answers()), Cri(str(cri_path)) as cri:
        container = cri_containers.find(cri, TWO)
        assert cri_containers.at_work(container) == []
        containerd.checkpoint(cri, container, tmp_path / "a.tar", 30)
        assert not runtime.paused
        opened["crio"][7].append(archive)  # another checkpoint, which has paused it
        assert cri_containers.at_work(container) == [7]
        containerd.checkpoint(cri, container, tmp_path / "b.tar", 30)
        assert runtime.paused


def test_a_crio_that_ends_after_its_answer(cri_path: Path, tmp_path: Path, group: Path) -> None:
    """It may have left the container paused."""
    archive, runtime = tmp_path / "a.tar", Left("", group)
    runtime.paused = False
    answered: list[bool] = []

    def leave(request: Any, context: Any) -> dict[str, object]:
        answered.append(True)
        return runtime.leave(request, context)

    def get(request: Any, context: Any) -> Any:
        code = grpc.StatusCode.UNAVAILABLE if answered else grpc.StatusCode.UNIMPLEMENTED
        return refuse(code, "it ends")(request, context)

    answers = runtime.answers() | {"CheckpointContainer": leave, GET_TASK: get}
    with CriServer(cri_path, answers), Cri(str(cri_path)) as cri:
        container = cri_containers.find(cri, TWO)
        with pytest.raises(EngineError, match="is complete, but whether container default/web/c1"):
            containerd.checkpoint(cri, container, archive, 30)
    assert archive.exists()
