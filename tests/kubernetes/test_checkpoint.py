# SPDX-License-Identifier: Apache-2.0
"""Checkpoints through a real kubelet, asked directly and through a real API server."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpustasis.runtimes.kubelet_archives import DIRECTORY
from support.containerd_node import KUBELET_PORT, end, wait_for
from support.gpu_pod import GpuPod
from support.json_output import check_document
from support.kubernetes_faults import Client, other_kubelet
from support.kubernetes_node import ADDRESS, NODE, TIMEOUT_S, KubernetesNode
from support.kubernetes_objects import PLACE, pod_of

pytestmark = pytest.mark.usefixtures("tidy")

SLOW_S = 20


def test_through_the_api_server(cluster: KubernetesNode) -> None:
    pod = cluster.job("proxied", "--mib", "8")
    done = cluster.root.run(
        *("gpustasis", "kubelet", "checkpoint", "--json", "--node", NODE),
        *("--kubeconfig", PLACE / "admin.conf", pod.path),
    )
    (one,) = check_document(done.stdout, "kubelet checkpoint")["checkpoints"]
    assert one["ok"], one
    archive = Path(one["archives"][0])
    assert "1 image whole" in cluster.root.run("gpustasis", "verify", archive).stdout
    pod.run_on()
    pod.delete()


# The kubelet itself, asked by who may.
DIRECT = (
    *("gpustasis", "kubelet", "checkpoint", "--node", ADDRESS, "--ca", PLACE / "ca.pem"),
    *("--cert", PLACE / "admin-client.pem", "--key", PLACE / "admin-client.key"),
)


@pytest.fixture(scope="module")
def pods(cluster: KubernetesNode) -> list[GpuPod]:
    """Two."""
    names = ("worker-0", "worker-1")
    cluster.apply(*(pod_of(name, "default", ("--mib", "2")) for name in names))
    made = [GpuPod(cluster, name, "default") for name in names]
    for pod in made:
        pod.wait_for_start()
        pod.run_on(1)
    return made


@pytest.fixture
def slow(cluster: KubernetesNode, request: pytest.FixtureRequest) -> Iterator[None]:
    """The driver takes SLOW_S, or the parameter, for the next checkpoint."""
    fault = ("gpustasis", "emulator", "fault")
    delay = str(getattr(request, "param", SLOW_S) * 1000)
    cluster.root.run(*fault, "add", "checkpoint", "delay", "--delay-ms", delay)
    yield
    cluster.root.run(*fault, "clear")


def begin(cluster: KubernetesNode, *words: str) -> Client:
    """Ask for checkpoints; the driver is at the first one, and slow."""
    log = cluster.root.path("/tmp/slow-client.log")

    def start() -> subprocess.Popen[str]:
        with log.open("w") as errors:
            return cluster.root.start(*DIRECT, *words, stdout=subprocess.PIPE, stderr=errors)

    client = Client(start, log)
    cluster.wait_for_driver(client)
    return client


def test_many_pods_at_once(cluster: KubernetesNode, pods: list[GpuPod]) -> None:
    """Each succeeds or fails by itself; the command fails if one did."""
    root = cluster.root
    first, second = pods
    wanted = (first.path, f"{second.path}@{ADDRESS}:{KUBELET_PORT}")
    done = root.run(*DIRECT, *wanted)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[0] == ["CONTAINER", "NODE", "RESULT", "SECONDS", "ARCHIVE"]
    assert [line[0] for line in lines[1:]] == [pod.path for pod in pods]
    for pod, line in zip(pods, lines[1:], strict=True):
        assert line[2] == "done"
        assert Path(line[4]).name.startswith(f"checkpoint-{pod.name}_default-job-")
        assert "1 image whole" in root.run("gpustasis", "verify", line[4]).stdout
        pod.run_on(1)

    absent = ("default/worker-1/none", "default/none/job")
    done = root.run(*DIRECT, "--json", first.path, *absent, check=False)
    assert done.returncode == 16
    results = check_document(done.stdout, "kubelet checkpoint")["checkpoints"]
    assert [result["ok"] for result in results] == [True, False, False]
    assert "2 of 3 checkpoints failed" in done.stderr
    assert '"container none does not exist" (404): the pod has no such container' in done.stderr
    assert '"pod does not exist" (404): no such pod on this node' in done.stderr

    listed = root.run("gpustasis", "kubelet", "list").stdout.splitlines()
    assert listed[0].split("  ")[0] == "CONTAINER"
    assert len(listed) == 1 + len(list(root.path(DIRECTORY).glob("*.tar")))
    (found,) = [line for line in listed if second.container_id()[:12] in line]
    assert found.split()[0] == "job" and f"  {cluster.runtime.name}  " in found, found


def test_the_runtimes_reason_is_passed_on(cluster: KubernetesNode, pods: list[GpuPod]) -> None:
    fault = ("gpustasis", "emulator", "fault")
    cluster.root.run(*fault, "add", "checkpoint", "error", "--code", "999")
    try:
        done = cluster.root.run(*DIRECT, pods[0].path, check=False)
    finally:
        cluster.root.run(*fault, "clear")
    assert done.returncode == 16
    assert f"checkpointing of {pods[0].path} failed (rpc error: code = Unknown" in done.stderr
    assert "(500); the container runs on, and criu's log is in" in done.stderr
    pods[0].run_on(1)


@pytest.mark.usefixtures("slow")
def test_an_interrupt_begins_no_more(cluster: KubernetesNode, pods: list[GpuPod]) -> None:
    """What is under way is waited for: the node would go on with it anyway."""
    words = ("--parallel", "1", "--json", *(pod.path for pod in pods))
    client = begin(cluster, *words)
    assert client.poll() is None, client.said()
    end(client.process, "INT")
    said, _ = client.process.communicate()
    errors = client.log.read_text()
    assert client.poll() == 16, errors
    assert errors.startswith("no more are begun; waiting for those under way\n"), errors
    assert [result["ok"] for result in json.loads(said)["checkpoints"]] == [True, False]
    assert f"{pods[1].path} on {ADDRESS}: not begun" in errors


@pytest.fixture
def impatient(cluster: KubernetesNode, pods: list[GpuPod]) -> Iterator[None]:
    """The kubelet gives its runtime ten seconds for what it is asked, or what the client says if
    that is more. Ten are enough for all but a slow checkpoint."""
    with other_kubelet(cluster, runtimeRequestTimeout="10s"):
        wait_for(lambda: cluster.kubelet_knows(pods[0]), "pod that it knows", cluster.log)
        yield


@pytest.mark.parametrize("slow", [45], indirect=True)
@pytest.mark.usefixtures("impatient", "slow")
def test_a_timeout_is_passed_on(cluster: KubernetesNode, pods: list[GpuPod]) -> None:
    """A runtime may leave a container paused whose checkpoint a kubelet gives up; the message says
    how to go on, and that works."""
    pod = pods[0]
    client = begin(cluster, "--timeout", "30", pod.path)
    client.process.communicate(timeout=TIMEOUT_S)
    errors = client.log.read_text()
    assert client.poll() == 16, errors
    assert time.monotonic() - client.begun > 30  # the kubelet's own is less
    assert "not done in 30 s; --timeout gives it longer" in errors, errors
    resume = f"gpustasis {cluster.runtime.command} resume {pod.path}"
    assert resume in errors
    cluster.root.run(*resume.split())
    pod.run_on(1)
