# SPDX-License-Identifier: Apache-2.0
"""`resume --watch`: what a runtime leaves paused that is killed in the middle of a checkpoint runs
on by itself, and nothing else is resumed."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gpustasis.runtimes.containerd import Container
from gpustasis.runtimes.kubelet_archives import DIRECTORY
from support.containerd_node import wait_for
from support.gpu_pod import GpuPod
from support.json_output import check_document
from support.kubernetes_node import TIMEOUT_S, KubernetesNode

pytestmark = pytest.mark.usefixtures("tidy")

END_S = 15.0  # after a SIGTERM
SYNC_S = 3.0  # for what a kubelet does when a container has started


class Watch:
    """It runs on the node."""

    def __init__(self, cluster: KubernetesNode) -> None:
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - end() closes it
        self._command = f"{cluster.runtime.command} resume"
        words = ("gpustasis", *self._command.split(), "--watch", "--json")
        self._process = cluster.root.start(*words, stdout=self._said, stderr=subprocess.DEVNULL)
        self.wait_for("watching")

    def events(self) -> list[str]:
        """What has happened: kind, or kind and NAMESPACE/POD/CONTAINER. But for what is there for a
        moment only, and may not be seen: a runtime that is away, or does not answer yet."""
        lines = os.pread(self._said.fileno(), 1 << 20, 0).decode().splitlines()
        found = [check_document(line, self._command)["event"] for line in lines]
        said: list[str] = []
        for one in found:
            of = f" {Container(**one['container']).path}" if one["container"] else ""
            if one["what"] not in ("failed", "waiting") and said[-1:] != [one["what"] + of]:
                said.append(one["what"] + of)
        return said

    def wait_for(self, *events: str) -> None:
        """Until these are the last ones."""
        last = list(events)
        wait_for(lambda: self.events()[-len(last) :] == last, str(last), lambda: str(self.events()))

    def end(self) -> None:
        (child,) = children(self._process.pid)
        begin = time.monotonic()
        os.kill(child, 15)
        assert self._process.wait(60) == 0 and time.monotonic() - begin < END_S
        self._said.close()


def children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(word) for word in file.read().split()]


@pytest.fixture(scope="module")
def watch(cluster: KubernetesNode) -> Iterator[Watch]:
    made = Watch(cluster)
    yield made
    made.end()


@contextmanager
def dump_of(cluster: KubernetesNode, pod: GpuPod, delay_ms: int) -> Iterator[subprocess.Popen[str]]:
    """One that takes so long, from its begin; the kubelet's client of it."""
    fault = ("gpustasis", "emulator", "fault")
    cluster.root.run(*fault, "add", "checkpoint", "delay", "--delay-ms", str(delay_ms))
    client = cluster.begin_checkpoint(pod)
    try:
        cluster.wait_for_driver()
        yield client
    finally:
        cluster.root.run(*fault, "clear")
        client.wait(60)


def test_a_runtime_that_comes_back_after_the_dump(cluster: KubernetesNode, watch: Watch) -> None:
    """The container is resumed before, so that the runtime finds it running: containerd would take
    it for one in an unknown state, and the kubelet would replace it."""
    pod = cluster.job("back-later", "--mib", "4")
    with dump_of(cluster, pod, 4000):
        cluster.runtime.kill()
    watch.wait_for("ended", f"resumed {pod.path}")
    cluster.runtime.restart()
    pod.run_on()
    watch.wait_for("watching")
    cluster.wait_for_runtime()
    archive = cluster.checkpoint(pod)
    assert "1 image whole" in cluster.root.run("gpustasis", "verify", archive).stdout
    pod.run_on()
    assert watch.events()[-1] == "watching"
    pod.delete()


def test_a_runtime_that_comes_back_during_the_dump(cluster: KubernetesNode, watch: Watch) -> None:
    """A kubelet that is cut off in the middle of a sync tries it again within the dump, and then
    replaces a container that containerd does not know the state of."""
    pod = cluster.job("back-sooner", "--mib", "4")
    time.sleep(SYNC_S)
    container = pod.container_id()
    with dump_of(cluster, pod, 15_000):
        cluster.runtime.kill()
        cluster.runtime.restart()
        watch.wait_for("ended", "watching")
    pod.run_on()
    assert pod.container_id() == container, pod.story()
    late = [f"unknown {pod.path}"] if cluster.runtime.name == "containerd" else []
    watch.wait_for("watching", f"resumed {pod.path}", *late)
    pod.delete()


def test_a_runtime_that_ends_while_it_writes_the_archive(
    cluster: KubernetesNode, watch: Watch
) -> None:
    """The archive has its name already, and is cut short: every command says so. CRI-O lets a
    container stand still until the archive is written, containerd does not."""
    root, place = cluster.root, cluster.root.path(DIRECTORY)
    pod = cluster.job("cut", "--mib", "64")
    before = set(place.iterdir())
    client = cluster.begin_checkpoint(pod)
    deadline = time.monotonic() + TIMEOUT_S
    while not (made := set(place.iterdir()) - before):
        assert time.monotonic() < deadline and client.poll() is None
        time.sleep(0.001)
    cluster.runtime.kill()
    cluster.runtime.restart()
    assert client.wait(TIMEOUT_S) == 16
    pod.run_on()
    resumed = [f"resumed {pod.path}"] if cluster.runtime.name == "CRI-O" else []
    watch.wait_for("watching", *resumed)
    (archive,) = (DIRECTORY / one.name for one in made)
    for words in (
        ("verify", archive),
        ("inspect", archive),
        ("build-image", archive, "-t", "localhost/cut:1"),
        ("kubelet", "list"),
    ):
        done = root.run("gpustasis", *words, check=False)
        assert done.returncode == 13 and f"{archive}: is cut short" in done.stderr, done
    root.path(archive).unlink()
    root.run("gpustasis", "kubelet", "list")
    cluster.wait_for_runtime()
    archive = cluster.checkpoint(pod)  # a CRI-O that takes it for paused would refuse
    assert "1 image whole" in root.run("gpustasis", "verify", archive).stdout
    pod.delete()


def test_nothing_else_is_resumed(cluster: KubernetesNode, watch: Watch) -> None:
    """Neither what somebody has paused, nor what stands still for a checkpoint that is under way;
    and a runtime that is started again when nothing is paused is no matter."""
    by_hand, other = cluster.job("by-hand", "--mib", "4"), cluster.job("slow", "--mib", "4")
    cluster.runtime.kill()
    cluster.runtime.restart()
    watch.wait_for("ended", "watching")
    cluster.wait_for_runtime()
    before = watch.events()
    ways = {"containerd": ("ctr", "-n", "k8s.io", "tasks"), "CRI-O": ("runc",)}
    way, container = ways[cluster.runtime.name], by_hand.container_id()
    cluster.root.run(*way, "pause", container)
    steps = -1
    while steps != (steps := by_hand.steps()):  # until the log has all that it said before
        time.sleep(1)
    with dump_of(cluster, other, 4000) as client:
        assert client.wait(60) == 0
    other.run_on()
    assert by_hand.steps() == steps and watch.events() == before
    cluster.root.run(*way, "resume", container)
    by_hand.run_on()
    other.delete()
    by_hand.delete()
