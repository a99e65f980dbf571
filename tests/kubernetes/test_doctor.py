# SPDX-License-Identifier: Apache-2.0
"""What `gpustasis doctor` says on a node of a cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from support.gpu_pod import GpuPod
from support.kubernetes_node import KubernetesNode

pytestmark = pytest.mark.usefixtures("tidy")


@pytest.fixture(scope="module")
def pod(cluster: KubernetesNode) -> Iterator[GpuPod]:
    made = cluster.job("looked-at", "--mib", "4")
    yield made
    made.delete()


def findings(cluster: KubernetesNode, *words: str) -> dict[str, Any]:
    done = cluster.root.run("gpustasis", "doctor", "--json", *words, check=False)
    found: list[Any] = json.loads(done.stdout)["findings"]
    return {one["name"]: one for one in found}


def test_the_node(cluster: KubernetesNode) -> None:
    found = findings(cluster)
    problems = [one for one in found.values() if one["status"] == "problem"]
    assert not problems, problems
    assert found["installation"]["text"].startswith("complete"), found["installation"]


def test_a_container_by_its_name_in_the_cluster(cluster: KubernetesNode, pod: GpuPod) -> None:
    found = findings(cluster, "--container", pod.path)
    assert found["container"]["status"] == "ok", found
    assert found["container"]["text"].startswith(f"{pod.path}: 1 process"), found["container"]
    assert not [one for one in found.values() if one["status"] == "problem"], found
    by_id = findings(cluster, "--container", pod.container_id())
    assert by_id.keys() == found.keys()


def test_a_name_that_no_container_has(cluster: KubernetesNode) -> None:
    done = cluster.root.run("gpustasis", "doctor", "--container", "a/b/c", check=False)
    assert done.returncode == 3 and "has no container a/b/c" in done.stderr, done.stderr


def test_a_paused_container(cluster: KubernetesNode, pod: GpuPod) -> None:
    """As a runtime that died in a checkpoint leaves it; resumed by its name in the cluster."""
    ways = {"containerd": ("ctr", "-n", "k8s.io", "tasks", "pause"), "CRI-O": ("runc", "pause")}
    cluster.root.run(*ways[cluster.runtime.name], pod.container_id())
    said = findings(cluster, "--container", pod.path)["container"]["text"]
    resumed = cluster.root.run("gpustasis", cluster.runtime.command, "resume", pod.path).stdout
    assert "paused" in said and "was paused and runs on" in resumed
    pod.run_on()
