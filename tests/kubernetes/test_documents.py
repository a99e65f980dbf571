# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/kubernetes.md work as they stand there, from an empty cluster on."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gpustasis.runtimes.kubelet_archives import DIRECTORY
from support.containerd_node import JOB_IMAGE, REGISTRY, ContainerdNode
from support.engine_root import EngineRoot
from support.gpu_pod import GpuPod
from support.kubernetes_node import ADMIN, API_SERVER, NODE, PLACE, KubernetesNode, node_root
from support.kubernetes_objects import RESOURCE

HOME = Path("/srv/operator")
_KIND = re.compile(r"^```sh (node|cluster)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ANY = re.compile(r"^```sh", re.MULTILINE)


@pytest.fixture(scope="module")
def empty(
    tmp_path_factory: pytest.TempPathFactory, job_program: Path, repository: Path
) -> Iterator[KubernetesNode]:
    """A cluster without gpustasis and without rights of ours, whose nodes share no other's."""
    place, secrets = tmp_path_factory.mktemp("empty"), tmp_path_factory.mktemp("secrets")
    archives = {str(DIRECTORY): tmp_path_factory.mktemp("archives")}
    with (
        node_root(place, repository / "tests", archives) as root,
        KubernetesNode(root, job_program, secrets, repository / "tests") as cluster,
    ):
        undo_installation(root)
        cluster.kubectl("delete", "clusterrolebinding,clusterrole", "kubelet-checkpoint")
        yield cluster


def undo_installation(root: EngineRoot) -> None:
    root.run("gpustasis", "uninstall")
    shutil.rmtree(root.path("/etc/criu"), ignore_errors=True)
    root.path(HOME).mkdir(parents=True)
    root.write(
        "/etc/containers/registries.conf.d/local.conf",
        f'[[registry]]\nlocation = "{REGISTRY}"\ninsecure = true\n',
    )


def test_every_command(empty: KubernetesNode, repository: Path) -> None:
    assert isinstance(empty.runtime, ContainerdNode)
    text = (repository / "docs/kubernetes.md").read_text()
    blocks = _KIND.findall(text)
    assert len(blocks) == len(_ANY.findall(text)) == 8
    named = {
        "KUBECONFIG": str(ADMIN),
        "node": NODE,
        "server": API_SERVER,
        "ca": str(PLACE / "ca.pem"),
        "image": JOB_IMAGE,
        "gpu": RESOURCE,
        "registry": REGISTRY,
        "archive": "",
    }
    said, moment = "", ""
    for _, script in blocks:
        if "trainer-again" in script:
            moment = datetime.now(UTC).isoformat()
        end = '\necho "archive is $archive"\n'
        said = empty.root.run(
            *("env", "--chdir", HOME, "bash", "-euc", script + end), environ=named
        ).stdout
        named["archive"] = said.rsplit("archive is ", 1)[1].strip()
        if "gpustasis verify" in script:
            assert "1 image whole" in said
        if "curl" in script:
            assert '{"items":["/var/lib/kubelet/checkpoints/checkpoint-trainer_default-job-' in said
    restored = GpuPod(empty, "trainer-again", "default")
    restored.run_on()
    assert restored.numbers(since=moment)[0] > 2
