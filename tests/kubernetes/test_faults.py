# SPDX-License-Identifier: Apache-2.0
"""The programs of the node are killed in the middle of a checkpoint; the job runs on, or is started
again by its pod's policy, and nothing stays locked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from support.containerd_node import wait_for
from support.crio_node import CrioNode
from support.gpu_pod import GpuPod
from support.kubernetes_node import KubernetesNode

pytestmark = pytest.mark.usefixtures("tidy")


@contextmanager
def checkpoint_under_way(cluster: KubernetesNode, pod: GpuPod) -> Iterator[None]:
    """Its driver is asked for a checkpoint, and takes four seconds. The client must fail."""
    root = cluster.root
    words = ("checkpoint", "delay", "--delay-ms", "4000")
    root.run("gpustasis", "emulator", "fault", "add", *words)
    client = cluster.begin_checkpoint(pod)
    try:
        cluster.wait_for_driver()
        yield
    finally:
        root.run("gpustasis", "emulator", "fault", "clear")
        status = client.wait(60)
    assert status == 16, "the checkpoint was not broken off"


def test_the_kubelet_is_killed(cluster: KubernetesNode) -> None:
    pod = cluster.job("kubelet-killed", "--mib", "4")
    try:
        with checkpoint_under_way(cluster, pod):
            cluster.kill("kubelet")
    finally:
        cluster.start_kubelet()
    pod.run_on()
    wait_for(lambda: cluster.kubelet_knows(pod), "pod that the kubelet knows", cluster.log)
    archive = cluster.checkpoint(pod)
    assert "1 image whole" in cluster.root.run("gpustasis", "verify", archive).stdout
    pod.run_on()
    pod.delete()


def test_the_runtime_is_killed(cluster: KubernetesNode) -> None:
    """Both runtimes have paused the container, and neither remembers that."""
    pod = cluster.job("runtime-killed", "--mib", "4")
    try:
        with checkpoint_under_way(cluster, pod):
            cluster.runtime.kill()
    finally:
        cluster.runtime.restart()
    said = cluster.root.run("gpustasis", cluster.runtime.command, "resume", pod.path).stdout
    assert "was paused and runs on" in said
    pod.run_on()
    again = cluster.root.run("gpustasis", cluster.runtime.command, "resume", pod.path).stdout
    assert "is not paused" in again
    if isinstance(cluster.runtime, CrioNode):  # a kubelet does not find one of containerd's then
        archive = cluster.checkpoint(pod)
        assert "1 image whole" in cluster.root.run("gpustasis", "verify", archive).stdout
    pod.delete()
