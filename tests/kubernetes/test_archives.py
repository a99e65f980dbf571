# SPDX-License-Identifier: Apache-2.0
"""What a kubelet's archive is to our commands, and to checkpointctl's own program."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support.containerd_node import JOB_IMAGE
from support.gpu_pod import GpuPod
from support.json_output import check_document
from support.kubernetes_node import PROGRAMS, KubernetesNode

pytestmark = pytest.mark.usefixtures("tidy")

CHECKPOINTCTL = f"{PROGRAMS}/checkpointctl"


@pytest.fixture(scope="module")
def made(cluster: KubernetesNode) -> tuple[Path, str]:
    """An archive, and the id of the container that it is of."""
    pod = cluster.job("archived", "--mib", "8")
    container, made = pod.container_id(), cluster.checkpoint(pod)
    pod.run_on()
    pod.delete()
    return made, container


@pytest.fixture(scope="module")
def archive(made: tuple[Path, str]) -> Path:
    return made[0]


@pytest.fixture(scope="module")
def container(made: tuple[Path, str]) -> str:
    return made[1]


def test_our_commands_read_it(cluster: KubernetesNode, archive: Path, container: str) -> None:
    root = cluster.root
    assert "1 image whole" in root.run("gpustasis", "verify", archive).stdout
    assert "8 chunks" in root.run("gpustasis", "inspect", archive).stdout
    listed = root.run("gpustasis", "kubelet", "list").stdout.splitlines()
    (line,) = [line for line in listed if container[:12] in line]
    assert line.split()[0] == "job" and f"  {cluster.runtime.name}  " in line, listed
    root.run("gpustasis", "flatten", archive, "-o", "/tmp/flat")
    assert "1 image whole" in root.run("gpustasis", "verify", "/tmp/flat").stdout
    same = root.run("gpustasis", "diff", archive, "/tmp/flat").stdout
    assert "total" in same and "100 %" in same and "only in B" in same, same


def test_checkpointctl_reads_it(cluster: KubernetesNode, archive: Path, container: str) -> None:
    """The name of the archive has "job" in it, so that says nothing."""
    root = cluster.root
    for command in ("show", "inspect"):
        shown = root.run(CHECKPOINTCTL, command, archive).stdout
        for what in (container[:12], JOB_IMAGE, cluster.runtime.name):
            assert what in shown, shown
    lines = root.run(CHECKPOINTCTL, "list").stdout.splitlines()
    (line,) = [line for line in lines if archive.name in line]
    assert line.split()[:3] == ["default", "archived", "job"], lines


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
