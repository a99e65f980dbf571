# SPDX-License-Identifier: Apache-2.0
"""Checkpoints through containerd that something gets in the way of: nothing is lost."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpustasis.emulator import RUN_DIRECTORY, Emulator
from support.containerd_node import TIMEOUT_S, Container, ContainerdNode, wait_for


@pytest.fixture
def job(node: ContainerdNode, request: pytest.FixtureRequest) -> Iterator[Container]:
    job = node.pod(request.node.name.replace("_", "-")).job("job")
    yield job
    job.stop()


@pytest.fixture
def slow(node: ContainerdNode) -> Iterator[None]:
    """The next checkpoint of a GPU process takes 12 s."""
    fault = ("gpustasis", "emulator", "fault")
    node.root.run(*fault, "add", "checkpoint", "delay", "--delay-ms", "12000")
    yield
    node.root.run(*fault, "clear")


def begin(node: ContainerdNode, job: Container, archive: Path) -> subprocess.Popen[str]:
    """Start a checkpoint; it has met the fault that was added last, and waits."""
    command = node.root.start(
        *("gpustasis", "containerd", "checkpoint", job.id, "--export", archive),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    emulator = Emulator(path=node.root.path(RUN_DIRECTORY / "default/socket"))
    try:
        wait_for(lambda: not emulator.status()["faults"], "checkpoint under way", node.log)
    except BaseException:
        command.kill()
        command.communicate()
        raise
    return command


def test_two_at_once(node: ContainerdNode, job: Container, shared: Path) -> None:
    """The second is refused; the first is as good as if it had been alone."""
    second_archive = shared / "second.tar"
    words = ("gpustasis", "containerd", "checkpoint", job.id, "--export", second_archive)
    for delay in ("3000", "12000", "48000"):  # the longer ones for machines that are busy
        fault = ("gpustasis", "emulator", "fault", "add", "checkpoint", "delay")
        node.root.run(*fault, "--delay-ms", delay)
        archive = shared / f"first-{delay}.tar"
        first = begin(node, job, archive)
        second = node.root.run(*words, check=False)
        _, said = first.communicate(timeout=TIMEOUT_S)
        assert first.returncode == 0, said
        assert "1 image whole" in node.root.run("gpustasis", "verify", archive).stdout
        if second.returncode != 0:
            break
        second_archive.unlink()
    assert second.returncode == 16
    assert f"another checkpoint of container {job.path} " in second.stderr
    assert not second_archive.exists()
    job.run_on()
    assert list(node.root.path("/run/gpustasis/containerd").iterdir()) == []


def test_containerd_dies(node: ContainerdNode, job: Container, shared: Path, slow: None) -> None:
    """The container is left paused, and goes on once there is a containerd to ask."""
    command = begin(node, job, shared / "killed.tar")
    node.kill()
    _, said = command.communicate(timeout=TIMEOUT_S)
    assert command.returncode == 16
    assert "may stand still" in said and f"ctr -n k8s.io tasks resume {job.id}" in said
    node.restart()
    node.root.run("gpustasis", "containerd", "resume", job.path)
    job.run_on()
    assert [path.name for path in shared.iterdir() if "killed" in path.name] == []


def test_the_container_is_removed(
    node: ContainerdNode, job: Container, shared: Path, slow: None
) -> None:
    """containerd lets a dump under way finish first: the archive is whole, or there is none."""
    command = begin(node, job, shared / "gone.tar")
    job.stop()
    job.remove()
    _, said = command.communicate(timeout=TIMEOUT_S)
    left = [path.name for path in shared.iterdir() if "gone" in path.name]
    if command.returncode == 0:
        assert left == ["gone.tar"]
        assert "1 image whole" in node.root.run("gpustasis", "verify", shared / "gone.tar").stdout
    else:
        assert (command.returncode, left) == (16, []), said


def test_the_job_is_killed(node: ContainerdNode, job: Container, shared: Path, slow: None) -> None:
    tasks = node.root.run("ctr", "-n", "k8s.io", "tasks", "list").stdout.split()
    pid = int(tasks[tasks.index(job.id) + 1])
    assert pid > 1
    command = begin(node, job, shared / "dead.tar")
    node.root.run("kill", "-KILL", str(pid))
    _, said = command.communicate(timeout=TIMEOUT_S)
    assert command.returncode == 16, said
    assert [path.name for path in shared.iterdir() if "dead" in path.name] == []


def test_no_space(node: ContainerdNode, job: Container, shared: Path) -> None:
    """For the archive: containerd's own storage is another matter."""
    place = shared / "small"
    place.mkdir()
    node.root.run("mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", place)
    try:
        words = ("gpustasis", "containerd", "checkpoint", job.id, "--export", place / "a.tar")
        done = node.root.run(*words, check=False)
        left = node.root.run("ls", "-A", place).stdout
    finally:
        node.root.run("umount", place)
    assert done.returncode == 16
    assert "no space left on device" in done.stderr
    assert left == ""
    job.run_on()
