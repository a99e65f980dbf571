# SPDX-License-Identifier: Apache-2.0
"""With crun below the container runtime, in place of runc."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from gpustasis.runtimes.freezer import GROUPS, freeze, frozen_groups, groups_by_container
from support.containerd_node import ContainerdWithCrun, wait_for
from support.crio_node import CrioNode, CrioWithCrun
from support.doctor import findings, problems, refusal, without
from support.engine_root import EngineRoot
from support.gpu_pod import GpuPod
from support.kubernetes_faults import may_be_left_paused
from support.kubernetes_node import KubernetesNode
from support.kubernetes_objects import pod_of
from support.restored_pod import push, restored_in_another_pod

_TRIES = 10
_FEW_V1 = {"cpu.cfs_period_us": "1000000", "cpu.cfs_quota_us": "1000"}


@pytest.fixture(
    scope="module",
    params=[pytest.param(one, id=one.name) for one in (ContainerdWithCrun, CrioWithCrun)],
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
    if isinstance(crun_cluster.runtime, CrioNode):
        advice = f"on the node: gpustasis crio resume {pod.path}, or gpustasis containerd resume"
        assert f"may have left the container paused; {advice}" in said
    if may_be_left_paused(crun_cluster):
        crun_cluster.root.run("gpustasis", "crio", "resume", pod.path)
    pod.run_on(1)
    assert problems(findings(crun_cluster)) == {}
    pod.delete()


@contextmanager
def without_processor(pod: GpuPod) -> Iterator[None]:
    """Its job runs a thousandth of the time: it does not freeze at once."""
    container = pod.container_id()
    group = groups_by_container()[container][0]
    texts = [path.read_text() for path in group.rglob("cgroup.procs")]
    with slowed(cpu_group(" ".join(texts).split()[0], container)):
        yield


def cpu_group(pid: str, container: str) -> Path:
    """Of that process, which is in no group of the cpu controller but the container's own."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "cpu" in controllers.split(",") or not (controllers or (GROUPS / "cpu").is_dir()):
            assert container in path
            return GROUPS / ("cpu" if controllers else "") / path.lstrip("/")
    raise AssertionError(f"process {pid} is in no group of the cpu controller")


@contextmanager
def slowed(group: Path) -> Iterator[None]:
    v2 = (group / "cpu.max").exists()
    few = {"cpu.max": "1000 1000000"} if v2 else _FEW_V1
    before = {name: (group / name).read_text() for name in reversed(few)}
    try:
        for name, value in few.items():
            (group / name).write_text(value)
        yield
    finally:
        for name, value in before.items():
            with suppress(FileNotFoundError):  # the job has ended
                (group / name).write_text(value)


def test_a_job_that_does_not_freeze_at_once(crun_cluster: KubernetesNode) -> None:
    """CRI-O resumes what crun says is paused; with cgroup v1 crun waits for no task, and says so
    once all of them stand. Now and then the job freezes within one try."""
    root = crun_cluster.root
    pod = crun_cluster.job("slow", "--mib", "4")
    command, is_left = crun_cluster.runtime.command, may_be_left_paused(crun_cluster)

    def tried(once: Callable[[], str], is_seen: Callable[[str], bool]) -> None:
        """Until one of them has left the container paused."""
        for _ in range(_TRIES if is_left else 1):
            with without_processor(pod):
                said = once()
            if is_seen(said):
                assert is_left, said
                return
        assert not is_left

    def exported(status: int) -> str:
        words = ("gpustasis", command, "checkpoint", pod.path, "--export", "/tmp/slow.tar")
        done = root.run(*words, check=False)
        assert done.returncode == status, done
        return done.stderr

    with without_libcriu(root):
        tried(lambda: refusal(crun_cluster, pod.path), lambda _: is_paused(pod))
        said = root.run("gpustasis", command, "resume", pod.path).stdout
        assert ("was paused and runs on" in said) == is_left
        pod.run_on(1)
        tried(lambda: exported(16), lambda said: "left paused, and was resumed" in said)
        assert not is_paused(pod)
        pod.run_on(1)
    exported(0)
    assert not is_paused(pod)
    pod.run_on(1)
    pod.delete()


def is_paused(pod: GpuPod) -> bool:
    return bool(frozen_groups(pod.container_id()))


def test_one_that_only_its_group_says_is_paused(crun_cluster: KubernetesNode) -> None:
    """As a runc leaves it that has given up waiting for its tasks: to containerd it runs."""
    pod = crun_cluster.job("frozen", "--mib", "4")
    words = ("gpustasis", crun_cluster.runtime.command, "resume", pod.path)
    for group in groups_by_container()[pod.container_id()][:1]:
        freeze(group)
    assert is_paused(pod)
    assert "was paused and runs on" in crun_cluster.root.run(*words).stdout
    assert not is_paused(pod)
    assert "is not paused" in crun_cluster.root.run(*words).stdout
    pod.run_on(1)
    archive = crun_cluster.checkpoint(pod)
    assert "1 image whole" in crun_cluster.root.run("gpustasis", "verify", archive).stdout
    if may_be_left_paused(crun_cluster):
        crun_cluster.root.run(*words)
    pod.run_on(1)
    pod.delete()
