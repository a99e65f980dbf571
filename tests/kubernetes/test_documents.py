# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/kubernetes.md work as they stand there, from an empty cluster on, and so do
those of docs/operating.md for a kubelet."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gpustasis.runtimes.kubelet_archives import DIRECTORY
from support.containerd_node import JOB_IMAGE, REGISTRY, ContainerdNode, wait_for
from support.engine_root import EngineRoot
from support.gpu_pod import GpuPod
from support.kubernetes_node import ADDRESS, ADMIN, API_SERVER, NODE, KubernetesNode, node_root
from support.kubernetes_objects import PLACE, RESOURCE

HOME = Path("/srv/operator")
SCRIPT_S = 600.0  # some of their commands wait for 300 s themselves
_KIND = re.compile(r"^```sh (node|cluster)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_KUBELET = re.compile(r"^```sh kubelet\n(.*?)^```$", re.MULTILINE | re.DOTALL)
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
        undo_installation(root, repository)
        cluster.kubectl("delete", "clusterrolebinding,clusterrole", "kubelet-checkpoint")
        yield cluster


def undo_installation(root: EngineRoot, repository: Path) -> None:
    """And have what the page needs of a checkout."""
    root.run("gpustasis", "uninstall")
    # The one that the environment of the tests is bound to stays, under a name of its own.
    root.run("sh", "-c", "rm /usr/local/bin/gpustasis; rm -f /usr/bin/python3*", check=False)
    shutil.rmtree(root.path("/etc/criu"), ignore_errors=True)
    for name in ("build/packages/image", "packaging/kubernetes"):
        shutil.copytree(repository / name, root.path(HOME / name))
    root.write(
        "/etc/containers/registries.conf.d/local.conf",
        f'[[registry]]\nlocation = "{REGISTRY}"\ninsecure = true\n',
    )


@pytest.mark.timeout(1800)
def test_every_command(empty: KubernetesNode, repository: Path) -> None:
    assert isinstance(empty.runtime, ContainerdNode)
    text = (repository / "docs/kubernetes.md").read_text()
    blocks = _KIND.findall(text)
    assert len(blocks) == len(_ANY.findall(text)) == 10
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
    trainer = GpuPod(empty, "trainer", "default")
    for _, script in blocks:
        if script.startswith("gpustasis kubelet checkpoint"):  # "Ready" says nothing of steps
            wait_for(lambda: trainer.steps() > 2, "three steps", trainer.story)
        if "trainer-again" in script:
            moment = datetime.now(UTC).isoformat()
        end = '\necho "archive is $archive"\n'
        said = empty.root.run(
            *("env", "--chdir", HOME, "bash", "-euc", script + end),
            environ=named,
            timeout_s=SCRIPT_S,
        ).stdout
        named["archive"] = said.rsplit("archive is ", 1)[1].strip()
        if "gpustasis verify" in script:
            assert "1 image whole" in said
        if "curl" in script:
            assert '{"items":["/var/lib/kubelet/checkpoints/checkpoint-trainer_default-job-' in said
    restored = GpuPod(empty, "trainer-again", "default")
    restored.run_on()
    assert restored.numbers(since=moment)[0] > 2


def test_every_command_for_a_kubelet(cluster: KubernetesNode, repository: Path) -> None:
    checkpoint, listed = _KUBELET.findall((repository / "docs/operating.md").read_text())
    trainer = cluster.job("trainer", "--mib", "4")
    for source, name in (
        ("ca.pem", "kubelet-ca.crt"),
        ("admin-client.pem", "apiserver-kubelet-client.crt"),
        ("admin-client.key", "apiserver-kubelet-client.key"),
    ):
        text = cluster.root.path(PLACE / source).read_text()
        cluster.root.write(PLACE / "pki" / name, text, 0o600)
    said = cluster.root.run("bash", "-euc", checkpoint, environ={"node": ADDRESS}).stdout
    assert " done " in said
    said = cluster.root.run("bash", "-euc", listed).stdout
    assert cluster.runtime.name in said and "1 image whole" in said
    trainer.run_on()
    trainer.delete()
