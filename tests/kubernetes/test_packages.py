# SPDX-License-Identifier: Apache-2.0
"""gpustasis comes to a node without Python, by a DaemonSet or as a Debian package, is brought up to
date, and is taken off again to the byte."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.containerd_node import REGISTRY, wait_for
from support.crio_node import CrioNode
from support.doctor import findings, problems
from support.engine_root import EngineRoot
from support.gpu_pod import GpuPod
from support.kubernetes_node import KubernetesNode

MANIFESTS = "packaging/kubernetes"
FIRST, NEWER = "0.1.0", "0.1.1"
FIRST_IMAGE = f"REGISTRY/gpustasis:{FIRST}"
# Where something is installed; the rest of a node's disk is the cluster's and the engines'.
_LOOKED_AT = "/etc /usr /opt /srv /var/lib/gpustasis"
_WATCH = "[containerd, resume, --watch]"
_CRITICAL = "      priorityClassName: system-node-critical\n"
_RIGHTS = "{capabilities: {add: [SYS_PTRACE, DAC_READ_SEARCH]}}"
_SNAPSHOT = f"""
find {_LOOKED_AT} ! -type d -printf '%p %y %m %U %G %s %T@ %l\\n' 2>/dev/null
find {_LOOKED_AT} -type d -printf '%p %y %m %U %G\\n' 2>/dev/null
find /etc -type f -exec sha256sum {{}} +
"""


pytestmark = pytest.mark.usefixtures("tidy")


@pytest.fixture
def node(cluster: KubernetesNode) -> Iterator[KubernetesNode]:
    """Without gpustasis and without Python; both are there again afterwards."""
    root = cluster.root
    root.run("gpustasis", "uninstall")
    names = ("gpustasis", "checkpointctl-gpustasis")  # the second is there after test_archives
    links = {root.path("/usr/local/bin") / name for name in names}
    targets = {link: link.readlink() for link in links if link.is_symlink()}
    for link in targets:
        link.unlink()
    # The one that the environment of the tests is bound to stays, under a name of its own.
    root.run("sh", "-c", "mkdir /tmp/hidden; mv /usr/bin/python3* /tmp/hidden", check=False)
    yield cluster
    root.run("sh", "-c", "mv /tmp/hidden/* /usr/bin/; rm -rf /tmp/hidden", check=False)
    for link, target in targets.items():
        link.unlink(missing_ok=True)
        link.symlink_to(target)
    root.run("gpustasis", "install")


def build_and_push(root: EngineRoot, context: Path, version: str) -> None:
    """As docs/kubernetes.md has it. context: build/packages/image, or one like it."""
    root.path("/tmp/image").mkdir()
    for path in context.iterdir():
        shutil.copy(path, root.path("/tmp/image"))
    name = f"{REGISTRY}/gpustasis:{version}"
    root.run("buildah", "build", "--quiet", "--tag", name, "/tmp/image")
    root.run("buildah", "push", "--quiet", "--tls-verify=false", name)
    root.run("buildah", "rmi", name)
    shutil.rmtree(root.path("/tmp/image"))


def newer(context: Path, work: Path, repository: Path) -> Path:
    """An image of a later version: one module more, one less."""
    made, tree = work / "image", work / "files/opt/gpustasis"
    made.mkdir()
    shutil.copy(context / "Containerfile", made)
    (work / "files").mkdir()
    subprocess.run(["tar", "-xf", context / "files.tar", "-C", work / "files"], check=True)
    package = tree / "packages/gpustasis"
    source = package / "__init__.py"
    source.write_text(source.read_text().replace(f'"{FIRST}"', f'"{NEWER}"'))
    (package / "new_module.py").write_text('"""New."""\n')
    (gone,) = tree.glob("lib/python3.*/this.py")
    gone.unlink()
    for path in package.glob("__pycache__/__init__.*"):
        path.unlink()
    spec = importlib.util.spec_from_file_location("bundle", repository / "packaging/bundle.py")
    assert spec is not None and spec.loader is not None
    bundle = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bundle)
    bundle.list_files(tree)
    subprocess.run(
        [
            *("tar", "-cf", made / "files.tar", "--owner", "0", "--group", "0"),
            *("-C", work / "files", "."),
        ],
        check=True,
    )
    return made


def apply(cluster: KubernetesNode, manifest: Path, version: str) -> None:
    """Returns when its pods are ready."""
    text = manifest.read_text().replace(FIRST_IMAGE, f"{REGISTRY}/gpustasis:{version}")
    assert FIRST_IMAGE not in text and version in text
    if isinstance(cluster.runtime, CrioNode):
        if manifest.name == "install.yaml":  # as docs/kubernetes.md says
            assert _WATCH in text
            text = text.replace(_WATCH, "[crio, resume, --watch]")
        # Test machines lack one capability: without it nothing gets the oom_score_adj of a critical
        # pod (containerd is told not to try), and CRI-O gives privileged containers all there are.
        assert _CRITICAL in text or manifest.name != "install.yaml"
        text = text.replace(_CRITICAL, "")
        assert "{privileged: true}" in text
        text = text.replace("{privileged: true}", _RIGHTS)
    cluster.root.write("/tmp/manifest.yaml", text)
    cluster.kubectl("apply", "--filename", "/tmp/manifest.yaml")
    name = "daemonset/" + text.split("kind: DaemonSet\nmetadata:\n  name: ")[1].split()[0]
    words = ("rollout", "status", name, "--namespace", "gpustasis", "--timeout", "200s")
    done = cluster.kubectl(*words, check=False)
    assert done.returncode == 0, reasons(cluster)


def reasons(cluster: KubernetesNode) -> str:
    """What its pods are in, and what their containers have said."""
    words = ("--namespace", "gpustasis")
    pods = cluster.get("pods", *words)["items"]
    said = [
        cluster.kubectl("logs", *words, pod["metadata"]["name"], "--all-containers", check=False)
        for pod in pods
    ]
    kinds = ("initContainerStatuses", "containerStatuses")
    states = [json.dumps(pod["status"].get(kind), indent=1) for pod in pods for kind in kinds]
    return "\n".join([*states, *(f"{one.stdout}{one.stderr}" for one in said)])


def snapshot(root: EngineRoot) -> list[str]:
    found = sorted(root.run("sh", "-c", _SNAPSHOT, check=False).stdout.splitlines())
    assert len(found) > 1000
    assert any(line.endswith("/etc/passwd") for line in found)
    return found


def test_a_daemon_set(node: KubernetesNode, repository: Path, tmp_path: Path) -> None:
    root, manifests = node.root, repository / MANIFESTS
    before = snapshot(root)
    assert root.run("sh", "-c", "command -v python3 gpustasis", check=False).stdout == ""
    image = repository / "build/packages/image"
    build_and_push(root, image, FIRST)
    build_and_push(root, newer(image, tmp_path, repository), NEWER)

    apply(node, manifests / "install.yaml", FIRST)
    assert root.run("gpustasis", "--version").stdout.split()[-1] == FIRST
    words = ("logs", "--namespace", "gpustasis", "daemonset/gpustasis", "-c", "resume")

    def said() -> str:
        return node.kubectl(*words).stdout

    watching = f"watching {node.runtime.name.lower()}"
    wait_for(lambda: watching in said().lower(), watching, said)
    job = node.job("installed", "--mib", "4")
    whole(node, job)

    apply(node, manifests / "install.yaml", NEWER)
    assert root.run("gpustasis", "--version").stdout.split()[-1] == NEWER
    assert root.path("/opt/gpustasis/packages/gpustasis/new_module.py").exists()
    assert not list(root.path("/opt/gpustasis/lib").glob("python3.*/this.py"))
    whole(node, job)
    job.delete()

    apply(node, manifests / "uninstall.yaml", NEWER)
    node.kubectl("delete", "namespace", "gpustasis", "--wait")
    assert difference(before, snapshot(root)) == ""


def test_the_debian_package(node: KubernetesNode, repository: Path) -> None:
    root = node.root
    before = snapshot(root)
    (package,) = (repository / "build/packages").glob("*.deb")
    shutil.copy(package, root.path("/tmp/gpustasis.deb"))
    line = "libdir /usr/lib/criu\n"
    runc = root.path("/etc/criu/runc.conf")
    runc.parent.mkdir(exist_ok=True)
    runc.write_text(line)

    refused = root.run("dpkg", "--install", "/tmp/gpustasis.deb", check=False)
    assert refused.returncode != 0
    said = "/etc/criu/runc.conf, line 1: 'libdir /usr/lib/criu' is set already"
    assert said in refused.stdout + refused.stderr
    assert runc.read_text() == line
    runc.unlink()
    root.run("dpkg", "--configure", "gpustasis")
    assert root.run("gpustasis", "--version").stdout.split()[-1] == FIRST
    job = node.job("packaged", "--mib", "4")
    whole(node, job)
    root.run("dpkg", "--install", "/tmp/gpustasis.deb")
    whole(node, job)
    job.delete()

    root.run("dpkg", "--purge", "gpustasis")
    assert difference(before, snapshot(root)) == ""


def difference(before: list[str], after: list[str]) -> str:
    return "\n".join(sorted(set(before) ^ set(after)))


def whole(cluster: KubernetesNode, job: GpuPod) -> None:
    """It can be checkpointed, by what is on the node, which doctor is content with."""
    found = findings(cluster)
    assert found["installation"][0]["text"].startswith("complete"), found
    assert found["OCI hook"][0]["status"] == "ok", found
    assert problems(found) == {}
    archive = cluster.checkpoint(job)
    assert "1 image whole" in cluster.root.run("gpustasis", "verify", archive).stdout
    job.run_on()
