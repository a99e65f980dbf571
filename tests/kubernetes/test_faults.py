# SPDX-License-Identifier: Apache-2.0
"""The programs of the node are killed in the middle of a checkpoint; the job runs on, or is started
again by its pod's policy, and nothing stays locked."""

from __future__ import annotations

import pytest

from support.asked_again import UNFROZEN, ask_again
from support.containerd_node import wait_for
from support.crio_node import CrioNode
from support.doctor import ask
from support.idle_kubelet import wait_until_idle
from support.kubernetes_faults import checkpoint_under_way, kubelet_away, runtime_away
from support.kubernetes_node import TIMEOUT_S, KubernetesNode

pytestmark = pytest.mark.usefixtures("tidy")


DELAY_MS = 4000


def test_the_kubelet_is_killed(cluster: KubernetesNode) -> None:
    pod = cluster.job("kubelet-killed", "--mib", "4")
    container = pod.container_id()
    with checkpoint_under_way(cluster, pod, DELAY_MS) as client, kubelet_away(cluster):
        assert client.wait(TIMEOUT_S) == 16, "the checkpoint was not broken off"
    pod.run_on()
    wait_for(lambda: cluster.kubelet_knows(pod), "pod that the kubelet knows", cluster.log)
    # To CRI-O it is paused until CRI-O has asked runc once more, after the resume.
    causes = ("is not running",) if isinstance(cluster.runtime, CrioNode) else ()
    done = ask_again(lambda: ask(cluster, pod.path), UNFROZEN, *causes)
    assert done.returncode == 0, done.stderr
    archive = done.stdout.split()[-1]
    assert "1 image whole" in cluster.root.run("gpustasis", "verify", archive).stdout
    pod.run_on()
    assert pod.container_id() == container != "", pod.story()
    pod.delete()


def test_the_runtime_is_killed(cluster: KubernetesNode) -> None:
    """Both runtimes have paused the container, and neither remembers that."""
    pod = cluster.job("runtime-killed", "--mib", "4")
    wait_until_idle(cluster)  # else it may replace the container within the dump
    with checkpoint_under_way(cluster, pod, DELAY_MS) as client, runtime_away(cluster):
        assert client.wait(TIMEOUT_S) == 16, "the checkpoint was not broken off"
    said = cluster.root.run("gpustasis", cluster.runtime.command, "resume", pod.path).stdout
    assert "was paused and runs on" in said
    pod.run_on()
    again = cluster.root.run("gpustasis", cluster.runtime.command, "resume", pod.path).stdout
    assert "is not paused" in again
    if isinstance(cluster.runtime, CrioNode):  # a kubelet does not find one of containerd's then
        archive = cluster.checkpoint(pod)
        assert "1 image whole" in cluster.root.run("gpustasis", "verify", archive).stdout
    pod.delete()
