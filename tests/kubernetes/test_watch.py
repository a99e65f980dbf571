# SPDX-License-Identifier: Apache-2.0
"""`resume --watch`: what a runtime leaves paused that is killed in the middle of a checkpoint runs
on by itself, and nothing else is resumed."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpustasis.runtimes.cri_containers import Container
from gpustasis.runtimes.kubelet_archives import DIRECTORY
from gpustasis.runtimes.pauses import BY_HAND_S, IN_FLIGHT_S, SETTLE_S
from support.container_logs import whole_lines
from support.containerd_node import wait_for
from support.crio_node import CrioNode
from support.gpu_pod import GpuPod
from support.idle_kubelet import wait_until_idle
from support.json_output import check_document
from support.kubernetes_faults import Client, checkpoint_under_way, paused, runtime_away
from support.kubernetes_node import TIMEOUT_S, KubernetesNode

pytestmark = pytest.mark.usefixtures("tidy")

END_S = 15.0  # after a SIGTERM
DUMP_S = 60.0  # longer than a runtime takes to start
TRIES = 5


class Watch:
    """It runs on the node."""

    def __init__(self, cluster: KubernetesNode) -> None:
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - kill() closes it
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as well
        self._command = f"{cluster.runtime.command} resume"
        self._mark = 0
        words = ("gpustasis", *self._command.split(), "--watch", "--json")
        self._process = cluster.root.start(*words, stdout=self._said, stderr=self._errors)
        try:
            self.wait_for("watching")
        except BaseException:
            self.kill()
            raise

    def forget(self) -> None:
        """What has happened until now."""
        self._mark += len(self.events())

    def events(self) -> list[str]:
        """What has happened: kind, or kind and NAMESPACE/POD/CONTAINER. But for what is there for a
        moment only, and may not be seen: a runtime that is away, or does not answer yet."""
        lines = whole_lines(os.pread(self._said.fileno(), 1 << 20, 0).decode())
        found = [check_document(line, self._command)["event"] for line in lines]
        said: list[str] = []
        for one in found:
            if one["container"]:
                said.append(f"{one['what']} {Container(**one['container']).path}")
            elif one["what"] not in ("failed", "waiting") and said[-1:] != [one["what"]]:
                said.append(one["what"])
        return said[self._mark :]

    def wait_for(self, *events: str) -> None:
        """Until these have happened in this order, whatever else has."""

        def happened() -> bool:
            assert self._process.poll() is None, self.story()
            found = iter(self.events())
            return all(one in found for one in events)

        wait_for(happened, str(events), self.story)

    def require_resumed(self, *paths: str) -> None:
        """These containers, once each, and no others; nothing that had to be tried again."""
        told = [one for one in self.events() if one.split()[0] in ("resumed", "failed")]
        assert told == [f"resumed {path}" for path in paths], self.story()

    def story(self) -> str:
        errors = os.pread(self._errors.fileno(), 1 << 20, 0).decode()
        return f"{self.events()}\nthe watch, ended with {self._process.poll()}, said:\n{errors}"

    def end(self) -> None:
        """If it was not ended before."""
        if self._process.returncode == 0:
            return
        (child,) = children(self._process.pid)
        begin = time.monotonic()
        os.kill(child, 15)
        assert self._process.wait(60) == 0 and time.monotonic() - begin < END_S, self.story()

    def kill(self) -> None:
        """If it has not ended."""
        if self._process.poll() is None:
            for one in (*children(self._process.pid), self._process.pid):
                os.kill(one, 9)
            self._process.wait(60)
        self._said.close()
        self._errors.close()


def children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(word) for word in file.read().split()]


@contextmanager
def watching(cluster: KubernetesNode) -> Iterator[Watch]:
    made = Watch(cluster)
    try:
        yield made
        made.end()
    finally:
        made.kill()


@pytest.fixture(scope="module")
def long_watch(cluster: KubernetesNode) -> Iterator[Watch]:
    with watching(cluster) as made:
        yield made


@pytest.fixture
def watch(long_watch: Watch) -> Watch:
    """One that has seen the tests before."""
    long_watch.forget()
    return long_watch


def settle(pod: GpuPod) -> int:
    """The steps of a paused job, once its log has all that it said before."""
    seen: list[int] = []

    def same() -> bool:
        time.sleep(1)
        seen.append(pod.steps())
        return seen[-3:] == [seen[-1]] * 3

    wait_for(same, f"end of what {pod.name} says", pod.story)
    return seen[-1]


def test_a_runtime_that_comes_back_after_the_dump(cluster: KubernetesNode, watch: Watch) -> None:
    """The container is resumed before, so that the runtime finds it running: containerd would take
    it for one in an unknown state, and the kubelet would replace it."""
    pod = cluster.job("back-later", "--mib", "4")
    container = pod.container_id()
    with checkpoint_under_way(cluster, pod, 4000), runtime_away(cluster):
        watch.wait_for("ended", f"resumed {pod.path}")
    pod.run_on()
    watch.wait_for("ended", f"resumed {pod.path}", "watching")
    cluster.wait_for_runtime()
    archive = cluster.checkpoint(pod)
    assert "1 image whole" in cluster.root.run("gpustasis", "verify", archive).stdout
    pod.run_on()
    assert watch.events() == ["ended", f"resumed {pod.path}", "watching"], watch.story()
    assert pod.container_id() == container != "", pod.story()
    pod.delete()


def test_a_runtime_that_comes_back_during_the_dump(cluster: KubernetesNode, watch: Watch) -> None:
    """A kubelet that is cut off in the middle of a sync tries it again within the dump, and then
    replaces a container that containerd does not know the state of."""
    pod = cluster.job("back-sooner", "--mib", "4")
    wait_until_idle(cluster)
    container = pod.container_id()

    def dumps() -> bool:
        return cluster.root.run("pgrep", "-x", "criu", check=False).returncode == 0

    with checkpoint_under_way(cluster, pod, int(DUMP_S * 1000)):
        with runtime_away(cluster):
            pass
        watch.wait_for("ended", "watching")
        assert dumps(), f"the runtime took longer to come back than the dump: {watch.story()}"
    wait_for(lambda: not dumps(), "end of the dump", watch.story, TIMEOUT_S + DUMP_S)
    pod.run_on()
    assert pod.container_id() == container != "", pod.story()
    late = [f"unknown {pod.path}"] if cluster.runtime.name == "containerd" else []
    watch.wait_for("ended", "watching", f"resumed {pod.path}", *late)
    watch.require_resumed(pod.path)
    pod.delete()


def runtime_ended_while_it_writes(
    cluster: KubernetesNode, watch: Watch, pod: GpuPod
) -> tuple[Client, Path]:
    """It is killed once the archive has its name. Where this process stood still meanwhile, the
    archive may be whole by then: that one is removed, and another try begins."""
    place = cluster.root.path(DIRECTORY)
    before = set(place.iterdir())
    for _ in range(TRIES):
        client = cluster.begin_checkpoint(pod)
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            ended = client.poll() is not None  # before the look: what is there then, it has made
            if made := set(place.iterdir()) - before:
                break
            if ended:
                client.require_running()
            assert time.monotonic() < deadline, client.said()
            time.sleep(0.001)
        with runtime_away(cluster):
            pass
        (archive,) = (DIRECTORY / one.name for one in made)
        done = cluster.root.run("gpustasis", "verify", archive, check=False)
        if done.returncode != 0:
            return client, archive
        assert "1 image whole" in done.stdout, done
        assert client.wait(TIMEOUT_S) in (0, 16), client.said()
        cluster.root.path(archive).unlink()
        watch.wait_for("ended", "watching")
        pod.run_on()
        with runtime_away(cluster):  # after that end the watch has nothing of the try to say
            pass
        watch.wait_for("ended", "watching", "ended", "watching")
        resumed = [one for one in watch.events() if one not in ("ended", "watching")]
        possible = [f"resumed {pod.path}"] if isinstance(cluster.runtime, CrioNode) else []
        assert resumed in ([], possible), watch.story()
        watch.forget()
        cluster.wait_for_runtime()
    raise AssertionError(f"{TRIES} times the archive was whole before the end of its runtime")


def test_a_runtime_that_ends_while_it_writes_the_archive(
    cluster: KubernetesNode, watch: Watch
) -> None:
    """The archive has its name already, and is cut short: every command says so. CRI-O lets a
    container stand still until the archive is written, containerd does not."""
    root = cluster.root
    pod = cluster.job("cut", "--mib", "256")
    container = pod.container_id()
    client, archive = runtime_ended_while_it_writes(cluster, watch, pod)
    assert client.wait(TIMEOUT_S) == 16, client.said()
    pod.run_on()
    resumed = [pod.path] if cluster.runtime.name == "CRI-O" else []
    watch.wait_for("ended", "watching")
    watch.wait_for("ended", *(f"resumed {path}" for path in resumed))  # before that, or after it
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
    watch.require_resumed(*resumed)
    assert pod.container_id() == container != "", pod.story()
    pod.delete()


def test_nothing_else_is_resumed(cluster: KubernetesNode, watch: Watch) -> None:
    """Neither what somebody has paused, nor what stands still for a checkpoint that is under way;
    and a runtime that is started again when nothing is paused is no matter."""
    by_hand, other = cluster.job("by-hand", "--mib", "4"), cluster.job("slow", "--mib", "4")
    with runtime_away(cluster):
        pass
    watch.wait_for("ended", "watching")
    cluster.wait_for_runtime()
    begun = time.monotonic()
    with paused(cluster, by_hand):
        steps = settle(by_hand)
        with checkpoint_under_way(cluster, other, 4000) as client:
            assert client.wait(TIMEOUT_S) == 0, client.said()
        other.run_on()
        happened = ["ended", "watching", f"kept {by_hand.path}"]  # the last one once, after a while
        wanted = happened if time.monotonic() - begun > BY_HAND_S else happened[:2]
        assert watch.events() in (happened[:2], wanted), watch.story()
        assert by_hand.steps() == steps
    by_hand.run_on()
    other.delete()
    by_hand.delete()


def test_what_was_paused_before_the_watch_began_stays_so(
    cluster: KubernetesNode, watch: Watch
) -> None:
    """Also when the runtime ends. That a watch which has seen the pause begin takes it for the
    runtime's then is why the other one is ended."""
    pod = cluster.job("left-alone", "--mib", "4")
    watch.end()
    with paused(cluster, pod), watching(cluster) as later:
        steps = settle(pod)
        later.wait_for("watching", f"kept {pod.path}")
        later.forget()
        with runtime_away(cluster):
            later.wait_for("ended", f"kept {pod.path}")
            time.sleep(IN_FLIGHT_S + SETTLE_S + 1)
            assert pod.steps() == steps, later.story()
            later.require_resumed()
    pod.delete()
