# SPDX-License-Identifier: Apache-2.0
"""With crun below the container runtime, in place of runc."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest

from support.containerd_node import ContainerdWithCrun, wait_for
from support.crio_node import CrioNode, CrioWithCrun
from support.doctor import findings, problems, refusal, without
from support.gpu_pod import GpuPod
from support.kubernetes_node import KubernetesNode
from support.kubernetes_objects import pod_of
from support.restored_pod import push, restored_in_another_pod


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


def test_a_crun_without_libcriu(crun_cluster: KubernetesNode) -> None:
    root = crun_cluster.root
    pod = crun_cluster.job("with-crun", "--mib", "4")
    library = next(root.path("/usr/lib/x86_64-linux-gnu").glob("libcriu.so.2.*"))
    try:
        with without(root, f"/usr/lib/x86_64-linux-gnu/{library.name}"):
            root.run("ldconfig")
            said = problems(findings(crun_cluster))["crun"]
            assert "libcriu.so.2, by which it calls criu, is not there -> install libcriu2" in said
            assert f"checkpointing of {pod.path} failed" in refusal(crun_cluster, pod.path)
    finally:
        root.run("ldconfig")
    pod.run_on(1)
    assert problems(findings(crun_cluster)) == {}
