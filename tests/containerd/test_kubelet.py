# SPDX-License-Identifier: Apache-2.0
"""Checkpoints through the kubelet's API, of GPU containers that run under a real containerd."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpustasis.runtimes.kubelet_archives import DIRECTORY
from support.certificates import Authority, Pair
from support.containerd_node import KUBELET_PORT, ContainerdNode, kubelet_on
from support.json_output import check_document
from support.kubelet_server import ALLOWED

TOKEN = "a-token-of-the-tests"


@dataclass(frozen=True)
class Cluster:
    """One node, its kubelet, and who may ask it."""

    node: ContainerdNode
    ca: Path
    admin: Pair

    def checkpoint(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.node.root.run(
            *("gpustasis", "kubelet", "checkpoint", "--node", "127.0.0.1", "--ca", self.ca),
            *("--cert", self.admin.certificate, "--key", self.admin.key, *words),
            check=False,
        )


@pytest.fixture(scope="module")
def cluster(node: ContainerdNode, shared: Path, repository: Path) -> Iterator[Cluster]:
    authority = Authority(shared, "cluster-ca")
    server = authority.server("127.0.0.1")
    admin = authority.client(ALLOWED)
    files = (server.certificate, server.key, authority.certificate)
    with kubelet_on(node, repository / "tests", *files, tokens=(f"{TOKEN}={ALLOWED}",)):
        yield Cluster(node, authority.certificate, admin)


def test_many_pods_at_once(cluster: Cluster, node: ContainerdNode) -> None:
    """Each succeeds or fails by itself; the command fails if one did."""
    jobs = [node.pod(f"worker-{number}").job("job", "--mib", "2") for number in range(3)]
    done = cluster.checkpoint(*(job.path for job in jobs))
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[0] == ["CONTAINER", "NODE", "RESULT", "SECONDS", "ARCHIVE"]
    assert [line[0] for line in lines[1:]] == [job.path for job in jobs]
    for job, line in zip(jobs, lines[1:], strict=True):
        assert line[2] == "done"
        archive = Path(line[4])
        assert archive.name.startswith(f"checkpoint-{job.pod.name}_tests-job-")
        job.run_on()
        assert "1 image whole" in node.root.run("gpustasis", "verify", archive).stdout

    done = cluster.checkpoint("--json", jobs[0].path, "tests/worker-1/none", "tests/none/job")
    assert done.returncode == 16
    results = check_document(done.stdout, "kubelet checkpoint")["checkpoints"]
    assert [result["ok"] for result in results] == [True, False, False]
    assert "2 of 3 checkpoints failed" in done.stderr
    assert '"container none does not exist" (404): the pod has no such container' in done.stderr
    assert '"pod does not exist" (404): no such pod on this node' in done.stderr

    listed = node.root.run("gpustasis", "kubelet", "list").stdout.splitlines()
    assert listed[0].split("  ")[0] == "CONTAINER"
    assert len(listed) == 1 + len(list(node.root.path(DIRECTORY).iterdir()))
    words = listed[1].split()
    assert (words[0], words[2], words[3]) == ("job", jobs[0].id[:12], "io.containerd.runc.v2")
    assert words[5] == "containerd"
    for job in jobs:
        job.stop()


def test_a_token_is_as_good(cluster: Cluster, node: ContainerdNode, shared: Path) -> None:
    job = node.pod("by-token").job("job")
    (shared / "token").write_text(f"{TOKEN}\n")
    done = node.root.run(
        *("gpustasis", "kubelet", "checkpoint", f"{job.path}@127.0.0.1:{KUBELET_PORT}"),
        *("--ca", cluster.ca, "--token-file", shared / "token"),
    )
    assert " done " in done.stdout
    job.stop()


def test_the_runtimes_reason_is_passed_on(cluster: Cluster, node: ContainerdNode) -> None:
    job = node.pod("faulty").job("job")
    node.root.run("gpustasis", "emulator", "fault", "add", "checkpoint", "error", "--code", "999")
    try:
        done = cluster.checkpoint(job.path)
    finally:
        node.root.run("gpustasis", "emulator", "fault", "clear")
    assert done.returncode == 16
    assert "criu failed" in done.stderr and "(500)" in done.stderr
    job.run_on()
    job.stop()


def test_a_timeout_is_passed_on(cluster: Cluster, node: ContainerdNode) -> None:
    """containerd leaves a container paused whose checkpoint a kubelet gives up; the message says
    how to go on, and that works."""
    job = node.pod("slow").job("job")
    node.root.run(
        "gpustasis", "emulator", "fault", "add", "checkpoint", "delay", "--delay-ms", "3000"
    )
    try:
        done = cluster.checkpoint("--timeout", "1", job.path)
    finally:
        node.root.run("gpustasis", "emulator", "fault", "clear")
    assert done.returncode == 16
    assert "not done in 1 s" in done.stderr
    assert f"gpustasis containerd resume {job.path}" in done.stderr
    node.root.run("gpustasis", "containerd", "resume", job.path)
    job.run_on()
    job.stop()
