# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of one pod goes on in another, by an image in a registry, as docs/kubernetes.md has
it."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest

from support.archives import flip_a_byte_of_gpu_memory
from support.containerd_node import wait_for
from support.crio_node import CrioNode
from support.gpu_pod import GpuPod
from support.kubernetes_node import KubernetesNode
from support.kubernetes_objects import pod_of
from support.restored_pod import mounts_to_name, push, restored_in_another_pod

pytestmark = pytest.mark.usefixtures("tidy")


def test_in_another_pod(cluster: KubernetesNode) -> None:
    restored_in_another_pod(cluster)


def test_a_damaged_checkpoint_leaves_nothing_running(cluster: KubernetesNode, shared: Path) -> None:
    pod = cluster.job("undamaged", "--mib", "8")
    made = cluster.checkpoint(pod)
    pod.delete()
    wait_for(lambda: not jobs(cluster), "end of the first", cluster.log)
    damaged = shared / "damaged.tar"
    shutil.copy(cluster.root.path(made), damaged)
    flip_a_byte_of_gpu_memory(damaged)
    assert cluster.root.run("gpustasis", "verify", damaged, check=False).returncode == 10

    image, _ = push(cluster, damaged, "damaged")
    # Once: at a second try criu has made the job's processes again, for a moment.
    once = {"restartPolicy": "Never"}
    mounts = mounts_to_name(cluster)
    moment = datetime.now(UTC).isoformat()
    cluster.apply(pod_of("damaged", "default", image=image, mounts=mounts, spec=once))
    again = GpuPod(cluster, "damaged", "default")

    wait_for(lambda: "estor" in again.failure(), "refused restore", again.story)
    if isinstance(cluster.runtime, CrioNode):  # it says so while runc still ends what criu has made
        wait_for(lambda: not jobs(cluster), "end of the job's processes", again.story)
    assert not jobs(cluster)
    assert not again.numbers(since=moment)  # it never ran
    again.delete()


def jobs(cluster: KubernetesNode) -> list[str]:
    """Processes of jobs on the node."""
    return cluster.root.run("pgrep", "-x", "steady_job", check=False).stdout.split()
