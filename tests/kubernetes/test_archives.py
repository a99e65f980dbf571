# SPDX-License-Identifier: Apache-2.0
"""What a kubelet's archive is to our commands, and to checkpointctl's own program."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support.gpu_pod import GpuPod
from support.json_output import check_document
from support.kubernetes_node import PROGRAMS, KubernetesNode

pytestmark = pytest.mark.usefixtures("tidy")

CHECKPOINTCTL = f"{PROGRAMS}/checkpointctl"


@pytest.fixture(scope="module")
def archive(cluster: KubernetesNode) -> Path:
    pod = cluster.job("archived", "--mib", "8")
    made = cluster.checkpoint(pod)
    pod.run_on()
    pod.delete()
    return made


def test_our_commands_read_it(cluster: KubernetesNode, archive: Path) -> None:
    root = cluster.root
    assert "1 image whole" in root.run("gpustasis", "verify", archive).stdout
    assert "8 chunks" in root.run("gpustasis", "inspect", archive).stdout
    listed = root.run("gpustasis", "kubelet", "list").stdout
    assert cluster.runtime.name in listed and "job" in listed
    root.run("gpustasis", "flatten", archive, "-o", "/tmp/flat")
    assert "1 image whole" in root.run("gpustasis", "verify", "/tmp/flat").stdout
    same = root.run("gpustasis", "diff", archive, "/tmp/flat").stdout
    assert "total" in same and "100 %" in same and "only in B" in same, same


def test_checkpointctl_reads_it(cluster: KubernetesNode, archive: Path) -> None:
    root = cluster.root
    shown = root.run(CHECKPOINTCTL, "show", archive).stdout
    assert "job" in shown and cluster.runtime.name in shown
    assert "job" in root.run(CHECKPOINTCTL, "inspect", archive).stdout
    lines = root.run(CHECKPOINTCTL, "list").stdout.splitlines()
    (line,) = [line for line in lines if archive.name in line]
    assert "job" in line, lines


def test_checkpointctl_finds_our_plugin(cluster: KubernetesNode, archive: Path) -> None:
    root = cluster.root
    name = "checkpointctl-gpustasis"
    root.path(f"/usr/local/bin/{name}").symlink_to(Path(sys.prefix) / "bin" / name)
    done = root.run(CHECKPOINTCTL, "gpustasis", archive)
    assert "GPU memory" in done.stdout


def test_two_pods_differ(cluster: KubernetesNode, archive: Path) -> None:
    other: GpuPod = cluster.job("another", "--mib", "8", "--seed", "7")
    made = cluster.checkpoint(other)
    said = cluster.root.run("gpustasis", "diff", "--json", archive, made).stdout
    total = check_document(said, "diff")["total"]
    assert total["only_in_b_bytes"] + total["changed_bytes"] > 0, said
    other.delete()
