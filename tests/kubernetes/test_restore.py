# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of one pod goes on in another, by an image in a registry, as docs/kubernetes.md has
it."""

from __future__ import annotations

import json
from datetime import UTC, datetime

from support.containerd_node import REGISTRY
from support.crio_node import CrioNode
from support.gpu_pod import GpuPod
from support.json_output import check_document
from support.kubernetes_node import KubernetesNode
from support.kubernetes_objects import pod_of


def test_in_another_pod(cluster: KubernetesNode) -> None:
    """The job itself compares every byte of its GPU memory with a copy of its own."""
    pod = cluster.job("origin", "--mib", "8")
    archive = cluster.checkpoint(pod)
    pod.run_on()
    seen = pod.numbers()[-1]
    pod.delete()

    image = f"{REGISTRY}/gpustasis/origin:checkpoint"
    built = cluster.root.run("gpustasis", "build-image", "--json", archive, "-t", image).stdout
    wanted = check_document(built, "build-image")["mounts"]
    cluster.root.run("buildah", "push", "--tls-verify=false", image)
    restored = GpuPod(cluster, "elsewhere", "default")
    moment = datetime.now(UTC).isoformat()
    # What CDI mounted into the first, CRI-O wants the second to name.
    mounts = gpu_mounts(cluster) if isinstance(cluster.runtime, CrioNode) else {}
    assert sorted(wanted) == sorted(mounts)
    cluster.apply(pod_of("elsewhere", "default", image=image, mounts=mounts))
    restored.wait_for_start()
    restored.run_on(6)
    first = restored.numbers(since=moment)[0]
    assert 2 < first <= seen  # from where it was, not from the beginning
    assert restored.status()["containerStatuses"][0]["restartCount"] == 0
    restored.delete()


def gpu_mounts(cluster: KubernetesNode) -> dict[str, str]:
    """What a GPU's CDI specification mounts: path in the container -> path on the node."""
    listed = json.loads(cluster.root.path("/etc/cdi/gpustasis-emulator.json").read_text())
    (device,) = listed["devices"]
    mounts = device["containerEdits"]["mounts"]
    return {mount["containerPath"]: mount["hostPath"] for mount in mounts}
