# SPDX-License-Identifier: Apache-2.0
"""The watch beside a runtime that is back and does not answer yet: what the last one has left
paused is resumed through its shim. Control groups, shim and runtime are played here, and criu by a
program of that name; tests/kubernetes has real ones."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpustasis.runtimes import cri_containers, crio, left_paused, pauses, shim
from gpustasis.runtimes.left_paused import Watch
from support.played_runtime import ID, JOB, TIMEOUT_S, Answering, Node

NAMES = {ID: ("tests", "pod", "job")}
CRIO_ELSEWHERE = "cri-o, elsewhere"  # what it keeps of its containers is not to be seen


@pytest.fixture(params=["containerd"])
def bare(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Node]:
    """Begin the watch with made.thread.start()."""
    made = Node(tmp_path)
    monkeypatch.setattr(cri_containers, "LOCKS", tmp_path / "run/locks")
    monkeypatch.setattr(left_paused, "POLL_S", 0.25)
    monkeypatch.setattr(Answering, "name", f"{request.param} 2.1")
    storage = Path("elsewhere") if request.param == CRIO_ELSEWHERE else Path("storage")
    monkeypatch.setattr(shim, "container_names", lambda state, one: NAMES.get(one))
    found = {(Path("storage"), ID): NAMES[ID]}
    monkeypatch.setattr(crio, "container_names", lambda *words: found.get(words))
    for name, value in {
        "find_instance": made.find_instance,
        "Cri": Answering,
        "containers": made.containers,
        "groups_by_container": lambda: {ID: [Path("group")]},
        "is_frozen": lambda group: made.frozen,
        "wait": made.wait,
        "thaw": lambda group: made.thaw("freezer"),
        "find_shim": lambda *words: made.shim,
        "storage_directory": lambda *words: storage,
        "resume_task": made.resume_task,
    }.items():
        monkeypatch.setattr(left_paused, name, value)
    made.start()
    stop, end = os.pipe()
    watch = Watch("/run/containerd.sock", "gpustasis containerd", made.tell)
    made.thread = threading.Thread(target=watch.run, args=(stop,))
    yield made
    os.write(end, b"x")
    made.go_on()
    made.hold_at = ""
    made.thread.join()
    os.close(stop)
    os.close(end)
    if made.runtime is not None:
        made.kill()


@pytest.fixture
def node(bare: Node) -> Node:
    """It is watched."""
    bare.thread.start()
    bare.wait_for_look(1)
    assert bare.said() == ["watching"]
    return bare


def test_a_runtime_that_is_back_and_does_not_answer(node: Node) -> None:
    with node.open_in("criu"):
        node.pause()
        node.wait_for_look()
        node.kill()
        node.wait_for("ended")
        node.answers = False  # not before: of the first one that would be said, too
        node.start()
        node.wait_for("failed")
        node.require_paused(2)
    node.wait_for("resumed")
    assert node.resumed == ["shim"] and not node.shim.paused
    assert node.said() == ["watching", "ended", "waiting", "failed", "resumed"] or (
        node.said() == ["watching", "ended", "failed", "resumed"]
    )


def test_a_file_that_is_named_as_another_container_is_not_that_one_s() -> None:
    other, layer = "ab" * 32, "cd" * 32
    known = {ID, other}
    state = "/run/containerd/io.containerd.runtime.v2.task/k8s.io"
    assert left_paused.owners([f"{state}/{ID}/rootfs/data/{other}"], known) == {ID}
    group = f"/sys/fs/cgroup/kubepods.slice/cri-containerd-{other}.scope/cgroup.freeze"
    assert left_paused.owners([f"/var/lib/{layer}/{ID}/x", group, "/tmp/x"], known) == {ID, other}
    assert left_paused.owners([f"/data/{ID}{other}"], known) == set()


BOTH = pytest.mark.parametrize("bare", ["containerd", "cri-o", CRIO_ELSEWHERE], indirect=True)


def ways(request: pytest.FixtureRequest, otherwise: str) -> list[str]:
    """By which a container is resumed: containerd's through its shim."""
    return ["shim"] if request.node.callspec.params["bare"] == "containerd" else [otherwise]


@BOTH
def test_a_dump_that_the_runtime_left_under_way(node: Node, request: pytest.FixtureRequest) -> None:
    """It ends, and criu pauses the container again, between two looks of a busy machine."""
    with node.open_in("criu"):
        node.wait_for_look()
        node.hold_at = "ended"
        node.kill()
        node.wait_for("ended")
        time.sleep(pauses.IN_FLIGHT_S + 0.5)
    node.pause()
    node.hold_at = ""
    node.wait_for("resumed")
    assert not node.frozen and node.resumed == ways(request, "freezer")


@pytest.mark.parametrize("bare", ["cri-o"], indirect=True)
def test_what_is_paused_while_its_archive_is_packed(node: Node) -> None:
    """The container is to stand still until then: what the archive holds of it changes else."""
    with node.open_in("crio"):
        node.pause()
        node.wait_for_look()
        node.kill()
        node.wait_for("ended")
        node.require_paused(4)
    node.wait_for("resumed")
    assert node.resumed == ["freezer"] and not node.frozen


def test_what_a_command_of_ours_is_at_is_left_to_it(node: Node) -> None:
    with cri_containers.alone(JOB):
        node.pause()
        node.wait_for_look()
        node.kill()
        node.wait_for("failed")
        assert "another checkpoint of container" in node.events[-1].text
        node.require_paused(2)
    node.wait_for("resumed")
    assert node.resumed == ["shim"] and not node.frozen


def test_a_shim_that_is_not_to_be_seen(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """containerd is waited for, and resumes the container itself."""
    monkeypatch.setattr(left_paused, "find_shim", lambda *words: None)
    node.pause()
    node.wait_for_look()
    node.kill()
    node.wait_for("ended")
    node.require_paused(3)
    node.start()
    node.wait_for("resumed")
    assert node.resumed == ["runtime"] and not node.shim.paused


@BOTH
def test_a_container_that_no_list_had_yet(node: Node, request: pytest.FixtureRequest) -> None:
    """It was started, and its checkpoint begun, since the last list."""
    node.pause()
    node.listed = False
    node.wait_for_look()
    node.kill()
    node.wait_for("ended")
    elsewhere = CRIO_ELSEWHERE in request.node.name
    if not elsewhere:  # containerd kills it if it is paused still when it is back
        node.wait_for("resumed")
    node.listed = True
    node.start()
    node.wait_for("resumed")
    assert not node.frozen and node.resumed == ways(request, "runtime" if elsewhere else "freezer")
    (resumed,) = [event for event in node.events if event.what == "resumed"]
    assert resumed.container is not None and resumed.container.path == "tests/pod/job"


@BOTH
def test_a_dump_of_a_container_that_no_list_had_yet(
    node: Node, request: pytest.FixtureRequest
) -> None:
    """The next runtime is there before the dump ends, and before the watch has looked."""
    node.listed = False
    node.wait_for_look()
    with node.open_in("criu"):
        time.sleep(0.1)  # starts are told by the clock tick
        node.kill()
        node.start()
        node.listed = True
        node.wait_for("ended")
        time.sleep(2)
        node.pause()
    node.wait_for("resumed")
    assert not node.frozen and node.resumed == ways(request, "runtime")


@BOTH
def test_what_was_paused_before_the_watch_began_stays_so(bare: Node) -> None:
    """The runtime does not list its containers before it ends."""
    bare.pause()
    bare.answers = False
    bare.thread.start()
    bare.wait_for("failed")
    bare.kill()
    bare.wait_for("ended")
    time.sleep(1)
    bare.answers = True
    bare.start()
    bare.wait_for("watching")
    bare.require_paused(3)


@BOTH
def test_what_somebody_paused_while_the_runtime_hung_stays_so(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pauses, "BY_HAND_S", 2.0)
    node.wait_for_look()
    node.answers = False
    node.wait_for("failed")
    node.pause()
    node.wait_for("kept")  # it has stood still for so long
    node.kill()
    node.wait_for("kept", 2)
    node.require_paused(2)


def test_what_stands_still_for_long_is_said(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each pause."""
    monkeypatch.setattr(pauses, "BY_HAND_S", 0.5)
    node.wait_for_look()
    for _ in range(2):
        node.pause()
        node.wait_for("kept")
        node.require_paused(2)
        said = [event.text for event in node.events if event.what == "kept"]
        assert len(said) == 1
        assert "has stood still for long" in said[0]
        assert f"resume {JOB.path} lets it run on" in said[0]
        node.events.clear()
        node.frozen = False
        node.wait_for_look()


@pytest.mark.parametrize("is_served", [False, True])
def test_a_crio_that_is_back_resumes_it_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_served: bool
) -> None:
    """It may have found the container paused: thawed beside it, that would stay so to CRI-O."""
    monkeypatch.setattr(cri_containers, "LOCKS", tmp_path / "run/locks")
    made = Node(tmp_path)
    if is_served:
        made.start()
    made.frozen = True
    thawed: list[Path] = []

    def thaw(group: Path) -> None:
        thawed.append(group)
        made.frozen = False

    monkeypatch.setattr(left_paused, "find_instance", made.find_instance)
    monkeypatch.setattr(left_paused, "is_frozen", lambda group: made.frozen)
    monkeypatch.setattr(left_paused, "thaw", thaw)
    watch = Watch("/run/crio/crio.sock", "gpustasis crio", made.tell)
    watch._runtime, watch._groups = "cri-o 1.36.3", {ID: [Path("group")]}
    try:
        assert watch._resume(None, None, JOB) == (not is_served)
    finally:
        if is_served:
            made.kill()
    assert thawed == ([] if is_served else [Path("group")])


def test_a_checkpoint_by_the_next_runtime_is_not_cut_off(node: Node) -> None:
    """The watch is held up; meanwhile the runtime ends, and the next one has begun."""
    node.hold()
    node.change()
    time.sleep(3)
    node.pause()
    node.go_on()
    node.wait_for("ended")
    node.wait_for("watching", 2)
    node.require_paused(3)


def test_a_checkpoint_by_the_next_runtime_right_after_the_resume(node: Node) -> None:
    node.pause()
    node.wait_for_look()
    node.kill()
    node.wait_for("resumed")
    assert node.resumed == ["shim"]
    node.start()
    node.wait_for("watching", 2)  # the container is still looked at often
    node.pause()
    time.sleep(3)
    assert node.frozen and node.said().count("resumed") == 1 and node.resumed == ["shim"]


@pytest.mark.parametrize("bare", ["cri-o", CRIO_ELSEWHERE], indirect=True)
def test_a_runtime_in_between_that_never_lists(node: Node) -> None:
    node.listed = False
    node.wait_for_look()
    node.pause()
    node.hold_at = "ended"  # until the next one is there: else CRI-O's is thawed without it
    node.kill()
    node.wait_for("ended")
    node.answers = False
    node.start()
    node.hold_at = ""
    node.wait_for("failed")
    node.require_paused(4)  # what it would pause from now on is its own
    node.answers = node.listed = True
    node.change()
    node.wait_for("resumed")
    assert not node.frozen and node.resumed == ["runtime"]


def test_what_it_does_not_list_is_said_once(node: Node) -> None:
    node.answers = False
    node.wait_for("failed")
    time.sleep(3)
    assert node.said() == ["watching", "failed"]
    node.answers = True
    deadline = time.monotonic() + TIMEOUT_S
    while node.said() != ["watching", "failed", "watching"]:
        assert time.monotonic() < deadline, node.events
        time.sleep(0.02)


def test_a_group_that_crun_makes_a_moment_after_the_container_s_own(
    bare: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search for another container's groups had found it without."""
    other = dataclasses.replace(JOB, id="f" * 64)
    groups = {other.id: [Path("other")], ID: [Path("group")]}
    listed = [other]
    monkeypatch.setattr(left_paused, "groups_by_container", lambda: dict(groups))
    monkeypatch.setattr(left_paused, "containers", lambda *_: list(listed))
    below = Path("group/container")
    monkeypatch.setattr(left_paused, "is_frozen", lambda group: bare.frozen and group == below)
    bare.thread.start()
    bare.wait_for("watching")
    bare.wait_for_look()
    groups[ID] = [Path("group"), below]
    listed.append(JOB)
    bare.wait_for_look(6)
    with bare.open_in("criu"):
        bare.pause()
        bare.wait_for_look(6)
        bare.kill()
        bare.wait_for("ended")
    bare.start()
    bare.wait_for("resumed")
    assert not bare.frozen
