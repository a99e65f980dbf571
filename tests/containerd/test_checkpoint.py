# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of GPU containers through a real containerd's CRI, and restores of them."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.asked_again import UNFROZEN, ask_again, done_once_frozen
from support.containerd_node import JOB_IMAGE, ContainerdNode, Pod
from support.containerd_node import Container as NodeContainer
from support.engine_root import EngineRoot
from support.json_output import check_document


@pytest.fixture(scope="module")
def pod(node: ContainerdNode) -> Pod:
    return node.pod("trainer")


@pytest.fixture(scope="module")
def job(pod: Pod) -> Iterator[NodeContainer]:
    job = pod.job("job", "--mib", "8", "--pinned-kib", "64")
    yield job
    job.stop()  # the node lives on, and the job takes a third of a processor


@pytest.fixture
def fault(node: ContainerdNode) -> Iterator[str]:
    """What `gpustasis emulator fault add` is to be called with; forgotten afterwards."""
    yield "fault"
    node.root.run("gpustasis", "emulator", "fault", "clear")


def step_numbers(container: NodeContainer) -> list[int]:
    return [
        int(match[1]) for line in container.output() if (match := re.search(r"step (\d+)", line))
    ]


def test_a_gpu_container_goes_to_another_node(
    node: ContainerdNode,
    pod: Pod,
    shared: Path,
    job_program: Path,
    tmp_path: Path,
) -> None:
    job = pod.job("mover", "--mib", "8", "--children", "1")
    job.run_on(6)  # of two processes: both have made three steps
    archive = shared / "mover.tar"
    done = node.root.run("gpustasis", "containerd", "checkpoint", job.path, "--export", archive)
    assert re.fullmatch(
        rf"container {job.path} \({job.id[:13]}\) is in {archive}: [\d.]+ MiB "
        r"\(containerd v?2\.[^)]*, [\d.]+ s\)\n",
        done.stdout,
    )
    job.run_on()
    assert [path.name for path in shared.iterdir() if path.name.startswith(".")] == []
    with tarfile.open(archive) as tar:
        names = tar.getnames()
    assert "2 images whole" in node.root.run("gpustasis", "verify", archive).stdout
    assert {"config.dump", "spec.dump", "status.dump"} <= set(names)
    assert archive.stat().st_mode & 0o077 == 0
    seen = max(step_numbers(job))

    place = tmp_path / "elsewhere"
    place.mkdir()
    visible = {str(shared): shared}
    with (
        EngineRoot(place, shared=visible) as root,
        ContainerdNode(root, job_program) as elsewhere,
    ):
        # Its image is the archive; the image under that is pulled from the registry.
        restored = elsewhere.pod("trainer").create("mover", str(archive), [])
        assert step_numbers(restored) == []
        restored.start()
        restored.run_on(6)
        first = min(step_numbers(restored))
        assert 2 < first <= seen  # from where it was, not from the beginning
    job.stop()
    job.remove()


def test_containers_are_listed_and_named(
    node: ContainerdNode, job: NodeContainer, shared: Path
) -> None:
    listed = node.root.run("gpustasis", "containerd", "list").stdout.splitlines()
    assert listed[0].split() == ["ID", "NAMESPACE", "POD", "CONTAINER", "IMAGE", "STATE"]
    words = ("gpustasis", "containerd", "checkpoint", job.path, "--json", "--export")
    said = node.root.run(*words, shared / "json.tar").stdout
    assert check_document(said, "containerd checkpoint")["container"]["id"] == job.id
    wanted = [job.id[:13], "tests", "trainer", "job", JOB_IMAGE, "running"]
    assert wanted in [line.split() for line in listed]
    said = node.root.run("gpustasis", "containerd", "list", "--json").stdout
    found = check_document(said, "containerd list")["containers"]
    assert job.id in [container["id"] for container in found]


def test_no_container_is_named(
    node: ContainerdNode, pod: Pod, job: NodeContainer, shared: Path
) -> None:
    def refused(name: str) -> str:
        words = ("gpustasis", "containerd", "checkpoint", name, "-e", shared / "none.tar")
        done = node.root.run(*words, check=False)
        assert done.returncode == 16
        assert not (shared / "none.tar").exists()
        return done.stderr

    ended = pod.job("ended")
    ended.stop()
    assert "does not run (state: exited)" in refused(ended.path)
    ended.remove()
    assert "has no container tests/trainer/none" in refused("tests/trainer/none")
    assert "is no NAMESPACE/POD/CONTAINER" in refused("trainer/job")


def test_an_archive_is_not_overwritten(
    node: ContainerdNode, job: NodeContainer, shared: Path
) -> None:
    archive = shared / "there.tar"
    archive.write_text("somebody's")
    words = ("gpustasis", "containerd", "checkpoint", job.id[:12], "-e", archive)
    done = node.root.run(*words, check=False)
    assert (done.returncode, archive.read_text()) == (16, "somebody's")
    assert "exists already" in done.stderr


def test_a_checkpoint_that_fails_says_why_and_leaves_the_container(
    node: ContainerdNode, job: NodeContainer, shared: Path, fault: str
) -> None:
    node.root.run("gpustasis", "emulator", fault, "add", "checkpoint", "error", "--code", "999")
    words = ("gpustasis", "containerd", "checkpoint", job.id, "-e", shared / "failed.tar")
    done = node.root.run(*words, check=False)
    assert done.returncode == 16
    assert f"did not checkpoint container {job.path}" in done.stderr
    assert re.search(r"\n  criu: .*cuCheckpointProcessCheckpoint .*CUDA_ERROR_UNKNOWN", done.stderr)
    assert [path.name for path in shared.iterdir() if "failed" in path.name] == []
    job.run_on()


@pytest.mark.parametrize("operation", ["lock", "checkpoint"])
def test_a_checkpoint_that_takes_too_long_leaves_the_container_running(
    node: ContainerdNode, job: NodeContainer, shared: Path, fault: str, operation: str
) -> None:
    node.root.run("gpustasis", "emulator", fault, "add", operation, "delay", "--delay-ms", "3000")
    words = ("gpustasis", "containerd", "checkpoint", job.id, "-e", shared / "late.tar")
    # With so little time it does not ask again by itself where the job did not freeze.
    done = ask_again(lambda: node.root.run(*words, "--timeout", "1", check=False), UNFROZEN)
    assert done.returncode == 16
    assert "took longer than 1 s" in done.stderr
    assert [path.name for path in shared.iterdir() if "late" in path.name] == []
    job.run_on()  # containerd alone would leave it paused


def test_a_container_left_paused_is_resumed(
    node: ContainerdNode, job: NodeContainer, shared: Path, fault: str
) -> None:
    pause = ("ctr", "-n", "k8s.io", "tasks", "pause", job.id)
    done_once_frozen(lambda: node.root.run(*pause, check=False))
    done = node.root.run("gpustasis", "containerd", "resume", job.path)
    assert "was paused and runs on" in done.stdout
    job.run_on()
    done = node.root.run("gpustasis", "containerd", "resume", job.path)
    assert "is not paused" in done.stdout
    said = node.root.run("gpustasis", "containerd", "resume", job.path, "--json").stdout
    assert not check_document(said, "containerd resume")["resumed"]


def test_crio_s_commands_are_the_same(
    node: ContainerdNode, job: NodeContainer, shared: Path
) -> None:
    """Over the socket that they are told."""
    words = ("gpustasis", "crio", "--address", "/run/containerd/containerd.sock")
    said = node.root.run(*words, "list", "--json").stdout
    assert job.id in [one["id"] for one in check_document(said, "crio list")["containers"]]
    archive = shared / "crio.tar"
    said = node.root.run(*words, "checkpoint", job.path, "--json", "--export", archive).stdout
    assert check_document(said, "crio checkpoint")["container"]["id"] == job.id
    said = node.root.run(*words, "resume", job.path, "--json").stdout
    assert not check_document(said, "crio resume")["resumed"]


def test_ctr_checkpoints_with_the_plugin(
    node: ContainerdNode, job: NodeContainer, shared: Path
) -> None:
    images = shared / "ctr-images"
    words = (
        *("ctr", "-n", "k8s.io", "tasks", "checkpoint"),
        *("--image-path", images, "--work-path", images, job.id),
    )
    done_once_frozen(lambda: node.root.run(*words, check=False))
    job.run_on()
    assert "1 image whole" in node.root.run("gpustasis", "verify", images).stdout
