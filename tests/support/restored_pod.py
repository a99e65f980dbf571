# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of one pod goes on in another, by an image in a registry."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

from support.containerd_node import REGISTRY
from support.crio_node import CrioNode
from support.gpu_pod import GpuPod
from support.json_output import check_document
from support.kubernetes_faults import may_be_left_paused
from support.kubernetes_node import KubernetesNode
from support.kubernetes_objects import pod_of


def restored_in_another_pod(cluster: KubernetesNode) -> None:
    """The job itself compares every byte of its GPU memory with a copy of its own."""
    pod = cluster.job("origin", "--mib", "8")
    pod.run_on()  # it is past its first steps, which a job from the beginning would make
    archive = cluster.checkpoint(pod)
    if may_be_left_paused(cluster):
        cluster.root.run("gpustasis", "crio", "resume", pod.path)
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
