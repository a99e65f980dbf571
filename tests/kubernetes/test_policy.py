# SPDX-License-Identifier: Apache-2.0
"""Annotations `io.gpustasis.*` of a pod. CRI-O runs OCI hooks, so they hold there; containerd has
no hook directory, and they mean nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.containerd_node import wait_for
from support.crio_node import CrioNode
from support.gpu_pod import GpuPod
from support.kubernetes_node import KubernetesNode
from support.kubernetes_objects import pod_of

pytestmark = pytest.mark.usefixtures("tidy")

STORE = Path("/var/lib/gpustasis/containers")


def parent_of(cluster: KubernetesNode, archive: Path) -> Any:
    said = cluster.root.run("gpustasis", "inspect", "--json", archive).stdout
    return json.loads(said)["parent"]


def test_incremental_and_keep(cluster: KubernetesNode) -> None:
    asked = {"io.gpustasis.incremental": "true", "io.gpustasis.keep": "2"}
    pod = cluster.job("chained", "--mib", "8", annotations=asked)
    identity = pod.container_id()
    archives = []
    for _ in range(3):
        archives.append(cluster.checkpoint(pod))
        pod.run_on()
    parents = [parent_of(cluster, archive) for archive in archives]
    store = STORE / identity
    if not has_hooks(cluster):
        assert parents == [None, None, None] and not cluster.root.path(store).exists()
        pod.delete()
        return
    assert parents[0] is None and None not in parents[1:]
    assert parents[2]["checkpoint_id"] != parents[1]["checkpoint_id"]
    for archive in archives:
        verified = cluster.root.run("gpustasis", "verify", archive, "--parent", store).stdout
        assert "1 image whole" in verified
    pod.delete()


def test_keep(cluster: KubernetesNode) -> None:
    """A container that has ended leaves that many of its checkpoints, and their parents. With
    max_chain = 1 the third of four is a full one, and the fourth is built on it."""
    cluster.root.write("/etc/gpustasis/config.toml", config := cluster.config() + "max_chain = 1\n")
    try:
        asked = {"io.gpustasis.incremental": "true", "io.gpustasis.keep": "2"}
        pod = cluster.job("kept", "--mib", "4", annotations=asked)
        store = STORE / pod.container_id()
        for _ in range(4):
            cluster.checkpoint(pod)
        assert not has_hooks(cluster) or len(kept(cluster, store)) == 4
        pod.delete()
    finally:
        cluster.root.write("/etc/gpustasis/config.toml", config.rsplit("max_chain", 1)[0])
    if not has_hooks(cluster):
        assert not cluster.root.path(store).exists()
        return
    wait_for(lambda: len(kept(cluster, store)) == 2, "two checkpoints in the store", cluster.log)


def has_hooks(cluster: KubernetesNode) -> bool:
    return isinstance(cluster.runtime, CrioNode)


def kept(cluster: KubernetesNode, store: Path) -> set[str]:
    """Ids of the checkpoints in a store, which also has a link to the newest."""
    found = json.loads(cluster.root.run("gpustasis", "list", "--json", store).stdout)
    return {entry["checkpoint_id"] for entry in found["entries"]}


def test_a_container_that_its_pod_starts_again_has_its_policy(cluster: KubernetesNode) -> None:
    asked = {"io.gpustasis.incremental": "true"}
    pod = cluster.job("restarted", "--mib", "4", annotations=asked)
    before = pod.container_id()
    cluster.checkpoint(pod)
    pod.run_on()
    cluster.root.run("pkill", "-KILL", "-x", "steady_job")
    wait_for(lambda: pod.container_id() not in ("", before), "second container", cluster.log)
    pod.wait_for_start()
    pod.run_on(2)
    first, second = cluster.checkpoint(pod), cluster.checkpoint(pod)
    assert parent_of(cluster, first) is None  # another container's memory is none of its own
    assert (parent_of(cluster, second) is not None) == has_hooks(cluster)
    pod.run_on()
    pod.delete()


def test_a_wrong_one_stops_the_container_and_says_why(cluster: KubernetesNode) -> None:
    wrong = {"io.gpustasis.keep": "many"}
    cluster.apply(pod_of("wrong", "default", ("--mib", "4"), annotations=wrong))
    pod = GpuPod(cluster, "wrong", "default")
    if has_hooks(cluster):
        wait_for(lambda: "io.gpustasis.keep" in pod.events(), "event", pod.events)
        assert "many" in pod.events()
    else:
        pod.wait_for_start()
    pod.delete()
