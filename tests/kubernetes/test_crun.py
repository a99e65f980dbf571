# SPDX-License-Identifier: Apache-2.0
"""With crun below the container runtime, in place of runc."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from subprocess import Popen
from typing import Any

import pytest

from gpustasis.runtimes.freezer import GROUPS, frozen_groups, groups_by_container
from support.containerd_node import ContainerdWithCrun, wait_for
from support.crio_node import CrioNode, CrioWithCrun
from support.doctor import findings, problems, refusal, without
from support.engine_root import EngineRoot
from support.gpu_pod import GpuPod
from support.kubernetes_node import KubernetesNode
from support.kubernetes_objects import pod_of
from support.restored_pod import push, restored_in_another_pod

_TRIES = 10


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(one, id=one.name, marks=pytest.mark.xdist_group(one.name))
        for one in (ContainerdWithCrun, CrioWithCrun)
    ],
)
def crun_cluster(request: pytest.FixtureRequest, new_cluster: Any) -> Iterator[KubernetesNode]:
    started: AbstractContextManager[KubernetesNode] = new_cluster(request.param)
    with started as cluster:
        yield cluster


def test_in_another_pod_with_crun(crun_cluster: KubernetesNode) -> None:
    """containerd 2.1 checkpoints with crun, and gives it a word at a restore that it does not
    know."""
    if isinstance(crun_cluster.runtime, CrioNode):
        restored_in_another_pod(crun_cluster)
        return
    pod = crun_cluster.job("origin", "--mib", "8")
    archive = crun_cluster.checkpoint(pod)
    assert "1 image whole" in crun_cluster.root.run("gpustasis", "verify", archive).stdout
    pod.run_on()
    image, _ = push(crun_cluster, archive, "origin")
    crun_cluster.apply(pod_of("elsewhere", "default", image=image))
    restored = GpuPod(crun_cluster, "elsewhere", "default")
    wait_for(lambda: "crun did not terminate" in restored.events(), "refusal", restored.events)
    pod.run_on()  # it is a copy that was refused


@contextmanager
def without_libcriu(root: EngineRoot) -> Iterator[None]:
    """A checkpoint of crun's fails at once."""
    library = next(root.path("/usr/lib/x86_64-linux-gnu").glob("libcriu.so.2.*"))
    try:
        with without(root, f"/usr/lib/x86_64-linux-gnu/{library.name}"):
            root.run("ldconfig")
            yield
    finally:
        root.run("ldconfig")


def test_a_crun_without_libcriu(crun_cluster: KubernetesNode) -> None:
    pod = crun_cluster.job("with-crun", "--mib", "4")
    with without_libcriu(crun_cluster.root):
        said = problems(findings(crun_cluster))["crun"]
        assert "libcriu.so.2, by which it calls criu, is not there -> install libcriu2" in said
        said = refusal(crun_cluster, pod.path)
    assert f"checkpointing of {pod.path} failed" in said
    if isinstance(crun_cluster.runtime, CrioNode):  # which may have left it paused, and says so
        assert f"on the node: gpustasis crio resume {pod.path}" in said
        crun_cluster.root.run("gpustasis", "crio", "resume", pod.path)
    pod.run_on(1)
    assert problems(findings(crun_cluster)) == {}


@contextmanager
def without_processor(pod: GpuPod) -> Iterator[None]:
    """Its job gets next to none: it does not freeze at once."""
    (group,) = groups_by_container()[pod.container_id()][:1]
    pids = [int(word) for path in group.rglob("cgroup.procs") for word in path.read_text().split()]
    ours, all_of_it = os.sched_getaffinity(0), [*map(os.sched_getaffinity, pids)]
    one = min(ours)
    hog = Popen(["taskset", "-c", f"{one}", "chrt", "-f", "50", "sh", "-c", "while :; do :; done"])
    try:
        for pid in pids:
            os.sched_setaffinity(pid, {one})
        os.sched_setaffinity(0, ours - {one})
        yield
    finally:
        hog.kill()
        hog.wait()
        os.sched_setaffinity(0, ours)
        for pid, before in zip(pids, all_of_it, strict=True):
            os.sched_setaffinity(pid, before)


def test_a_job_that_does_not_freeze_at_once(crun_cluster: KubernetesNode) -> None:
    """CRI-O resumes what crun says is paused; with cgroup v1 crun waits for no task, and says so
    once all of them stand. The job gets a twentieth of a processor, so one try may be too late."""
    root = crun_cluster.root
    pod = crun_cluster.job("slow", "--mib", "4")
    command = crun_cluster.runtime.command
    is_left = command == "crio" and (GROUPS / "freezer").is_dir()

    def tried(once: Callable[[], str], is_seen: Callable[[str], bool]) -> str:
        """What was said of the first one that has left the container paused."""
        for _ in range(_TRIES):
            with without_processor(pod):
                said = once()
            if is_seen(said):
                assert is_left, said
                return said
        assert not is_left
        return ""

    def exported() -> str:
        words = ("gpustasis", command, "checkpoint", pod.path, "--export", "/tmp/slow.tar")
        done = root.run(*words, check=False)
        assert done.returncode == 16, done.stdout
        return done.stderr

    with without_libcriu(root):
        tried(lambda: refusal(crun_cluster, pod.path), lambda _: is_paused(pod))
        said = root.run("gpustasis", command, "resume", pod.path).stdout
        assert ("was paused and runs on" in said) == is_left
        pod.run_on(1)
        tried(exported, lambda said: "it was left paused, and was resumed" in said)
        assert not is_paused(pod)
        pod.run_on(1)


def is_paused(pod: GpuPod) -> bool:
    return bool(frozen_groups(pod.container_id()))
