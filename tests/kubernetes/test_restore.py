# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of one pod goes on in another, by an image in a registry, as docs/kubernetes.md has
it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from support.archives import flip_a_byte_of_gpu_memory
from support.containerd_node import REGISTRY, ContainerdWithCrun, wait_for
from support.crio_node import CrioNode, CrioWithCrun
from support.gpu_pod import GpuPod
from support.json_output import check_document
from support.kubernetes_node import KubernetesNode, crio_directory
from support.kubernetes_objects import pod_of


@pytest.fixture(
    scope="module",
    params=[ContainerdWithCrun, *([CrioWithCrun] if crio_directory() else [])],
    ids=lambda runtime: runtime.name,
)
def crun_cluster(request: pytest.FixtureRequest, new_cluster: Any) -> Iterator[KubernetesNode]:
    started: AbstractContextManager[KubernetesNode] = new_cluster(request.param)
    with started as cluster:
        yield cluster


def test_in_another_pod(cluster: KubernetesNode) -> None:
    restored_in_another_pod(cluster)


def test_in_another_pod_with_crun(crun_cluster: KubernetesNode) -> None:
    restored_in_another_pod(crun_cluster)


def restored_in_another_pod(cluster: KubernetesNode) -> None:
    """The job itself compares every byte of its GPU memory with a copy of its own."""
    pod = cluster.job("origin", "--mib", "8")
    archive = cluster.checkpoint(pod)
    facts = json.loads(cluster.root.run("gpustasis", "inspect", "--json", archive).stdout)
    assert facts["archive"]["runtime"].endswith(cluster.runtime.oci_runtime) or (
        not isinstance(cluster.runtime, CrioNode)  # containerd names its shim
    )
    pod.run_on()
    seen = pod.numbers()[-1]
    pod.delete()

    image, wanted = push(cluster, archive, "origin")
    # What CDI mounted into the first, CRI-O wants the second to name.
    assert sorted(wanted) == sorted(mounts_to_name(cluster))
    restored = GpuPod(cluster, "elsewhere", "default")
    moment = datetime.now(UTC).isoformat()
    cluster.apply(pod_of("elsewhere", "default", image=image, mounts=mounts_to_name(cluster)))
    restored.wait_for_start()
    restored.run_on(6)
    first = restored.numbers(since=moment)[0]
    assert 2 < first <= seen  # from where it was, not from the beginning
    assert restored.status()["containerStatuses"][0]["restartCount"] == 0
    restored.delete()


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
    cluster.apply(pod_of("damaged", "default", image=image, mounts=mounts_to_name(cluster)))
    again = GpuPod(cluster, "damaged", "default")

    def failed() -> bool:
        (container,) = again.status().get("containerStatuses", [{}])
        return "Error" in container.get("state", {}).get("waiting", {}).get("reason", "")

    wait_for(failed, "refused restore", again.events)
    assert not jobs(cluster)
    again.delete()


def jobs(cluster: KubernetesNode) -> list[str]:
    """Processes of jobs on the node."""
    return cluster.root.run("pgrep", "-x", "steady_job", check=False).stdout.split()


def push(cluster: KubernetesNode, archive: Path, name: str) -> tuple[str, list[str]]:
    """Make an image of it in the registry: its name, and mounts that CRI-O wants to be named."""
    image = f"{REGISTRY}/gpustasis/{name}:checkpoint"
    built = cluster.root.run("gpustasis", "build-image", "--json", archive, "-t", image).stdout
    cluster.root.run("buildah", "push", "--tls-verify=false", image)
    wanted: list[str] = check_document(built, "build-image")["mounts"]
    return image, wanted


def mounts_to_name(cluster: KubernetesNode) -> dict[str, str]:
    """What a GPU's CDI specification mounts, where a pod has to name it: path in the container ->
    path on the node."""
    if not isinstance(cluster.runtime, CrioNode):
        return {}
    listed = json.loads(cluster.root.path("/etc/cdi/gpustasis-emulator.json").read_text())
    (device,) = listed["devices"]
    mounts = device["containerEdits"]["mounts"]
    return {mount["containerPath"]: mount["hostPath"] for mount in mounts}
