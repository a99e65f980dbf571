# SPDX-License-Identifier: Apache-2.0
"""The node is started anew, as after the loss of power, in the middle of a checkpoint and right
after one: the job is started again, nothing is frozen, every archive is whole or absent, and the
next checkpoint is as good as any."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpustasis.runtimes.kubelet_archives import DIRECTORY
from support.containerd_node import wait_for
from support.crio_node import CrioNode
from support.gpu_pod import GpuPod
from support.kubernetes_node import TIMEOUT_S, KubernetesNode
from support.kubernetes_objects import pod_of, set_of

pytestmark = pytest.mark.usefixtures("tidy")

NAME = "rebooted"
STORE = Path("/var/lib/gpustasis/containers")


@pytest.fixture
def job(cluster: KubernetesNode) -> Iterator[None]:
    """A pod whose controller makes another where it cannot be started again: a kubelet that has
    just been started may refuse it, because the GPUs' device plugin is not back yet."""
    asked = {"io.gpustasis.incremental": "true"}
    cluster.apply(set_of(pod_of(NAME, "default", ("--mib", "16"), annotations=asked)))
    yield
    cluster.kubectl("delete", "replicaset", NAME)


class Listed(GpuPod):
    """As a list had it: by now it may be gone."""

    def __init__(self, node: KubernetesNode, item: dict[str, Any]) -> None:
        super().__init__(node, item["metadata"]["name"], item["metadata"]["namespace"])
        self._status = item["status"]

    def status(self) -> Any:
        return self._status


def running(cluster: KubernetesNode, before: str = "") -> GpuPod:
    """The job's pod in another container than `before`; it has made two steps there."""
    found: list[GpuPod] = []

    def runs() -> bool:
        items = cluster.get("pods", "--selector", f"set={NAME}")["items"]
        pods = [Listed(cluster, one) for one in items]
        found[:] = [
            GpuPod(cluster, one.name, one.namespace)
            for one in pods
            if one.container_id() not in ("", before)
        ]
        return bool(found)

    wait_for(runs, "running job", cluster.log, TIMEOUT_S)
    found[0].run_on(2)
    return found[0]


def test_reboots(cluster: KubernetesNode, job: None) -> None:
    root, earlier = cluster.root, archives(cluster)
    pod = running(cluster)
    first, container = cluster.checkpoint(pod), pod.container_id()
    words = ("checkpoint", "delay", "--delay-ms", "60000")
    root.run("gpustasis", "emulator", "fault", "add", *words)
    client = cluster.begin_checkpoint(pod)
    cluster.wait_for_driver(client)
    cluster.reboot()
    assert client.wait(TIMEOUT_S) != 0
    pod = running(cluster, container)
    assert archives(cluster) == earlier | {first}
    verify(cluster, first, container)

    container = pod.container_id()
    second, third = cluster.checkpoint(pod), cluster.checkpoint(pod)
    cluster.reboot()
    pod = running(cluster, container)
    assert archives(cluster) == earlier | {first, second, third}
    verify(cluster, second, container)
    verify(cluster, third, container)
    parent = json.loads(root.run("gpustasis", "inspect", "--json", third).stdout)["parent"]
    assert (parent is not None) == isinstance(cluster.runtime, CrioNode)
    assert_nothing_is_left(cluster, pod)
    verify(cluster, cluster.checkpoint(pod), pod.container_id())
    pod.run_on()


def archives(cluster: KubernetesNode) -> set[Path]:
    return {DIRECTORY / path.name for path in cluster.root.path(DIRECTORY).iterdir()}


def verify(cluster: KubernetesNode, archive: Path, container: str) -> None:
    """It is whole. What it is built on lies in the store of that container, which outlives both
    container and boot."""
    store = STORE / container
    there = cluster.root.path(store).is_dir()
    assert there == isinstance(cluster.runtime, CrioNode)  # only CRI-O goes by annotations
    parents = ("--parent", store) if there else ()
    assert "1 image whole" in cluster.root.run("gpustasis", "verify", archive, *parents).stdout


def read(state: Path) -> str:
    """Empty: the group has gone."""
    try:
        return state.read_text()
    except OSError:
        return ""


def assert_nothing_is_left(cluster: KubernetesNode, pod: GpuPod) -> None:
    """No process is frozen or locked, and of what we keep in /run only the running job's policy."""
    root = cluster.root
    groups = root.path("/sys/fs/cgroup")
    states = [*groups.glob("freezer/**/freezer.state"), *groups.glob("**/cgroup.freeze")]
    assert {read(state) for state in states} - {""} in ({"THAWED\n"}, {"0\n"}, {"THAWED\n", "0\n"})
    kept = [path for path in root.path("/run/gpustasis").glob("*/*") if path.suffix != ".lock"]
    policy = {f"{pod.container_id()}.toml"} if isinstance(cluster.runtime, CrioNode) else set()
    assert {path.name for path in kept} == policy, kept
    for words in ((), ("--container", pod.path)):
        said = root.run("gpustasis", "doctor", "--json", *words, check=False).stdout
        found = [one for one in json.loads(said)["findings"] if one["status"] == "problem"]
        assert not found, found
