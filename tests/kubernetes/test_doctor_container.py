# SPDX-License-Identifier: Apache-2.0
"""`gpustasis doctor --container NAMESPACE/POD/CONTAINER`: what hinders a checkpoint is brought
about in a pod, named, and the kubelet's checkpoint fails of it."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.containerd_node import JOB_IMAGE, wait_for
from support.crio_node import CrioNode
from support.doctor import ask, edited, findings, problems, refusal, restart, running
from support.gpu_pod import GpuPod
from support.kubernetes_faults import kubelet_away, paused
from support.kubernetes_node import KubernetesNode
from support.kubernetes_objects import pod_of

pytestmark = pytest.mark.usefixtures("tidy")

PROGRAMS = Path(__file__).resolve().parent.parent / "programs"
KINDS = ("ring", "userfaultfd", "connection", "traced", "gpu-file")
RUNC_CONF = "/etc/criu/runc.conf"
LATE = "/srv/late"


@pytest.fixture(scope="module")
def pod(cluster: KubernetesNode) -> GpuPod:
    return cluster.job("looked-into", "--mib", "4")


def test_by_its_name_and_by_its_id(cluster: KubernetesNode, pod: GpuPod) -> None:
    found = findings(cluster, "--container", pod.path)
    (container,) = found["container"]
    assert container["status"] == "ok"
    assert container["text"].startswith(f"{pod.path}: 1 process"), container
    assert problems(found) == {}
    assert findings(cluster, "--container", pod.container_id()).keys() == found.keys()


def test_a_name_that_no_container_has(cluster: KubernetesNode) -> None:
    done = cluster.root.run("gpustasis", "doctor", "--container", "a/b/c", check=False)
    assert done.returncode == 3 and "has no container a/b/c" in done.stderr, done.stderr


@pytest.fixture(scope="module")
def troubled(
    cluster: KubernetesNode, shared: Path, compile_c: Callable[..., Path]
) -> Iterator[GpuPod]:
    """A pod with a container of each of KINDS."""
    program = compile_c(PROGRAMS / "undumpable.c", "-static")
    for name in ("undumpable", "kubelet"):
        shutil.copy(program, shared / name)
    cluster.root.run("sh", "-c", "[ -e /dev/nvidia0 ] || mknod -m 666 /dev/nvidia0 c 1 3")
    made = dict(pod_of("troubled", "default", mounts={"/dev/nvidia0": "/dev/nvidia0"}))
    (container,) = made["spec"]["containers"]
    container["volumeMounts"].append({"name": "programs", "mountPath": "/programs"})
    made["spec"]["volumes"].append({"name": "programs", "hostPath": {"path": str(shared)}})
    container |= {"image": JOB_IMAGE, "resources": {}}
    made["spec"]["containers"] = [
        {**container, "name": kind, "command": ["/programs/undumpable", kind]} for kind in KINDS
    ]
    made["spec"]["containers"][-1]["command"][0] = "/programs/kubelet"
    cluster.apply(made)
    pod = GpuPod(cluster, "troubled", "default")
    pod.wait_for_start()
    yield pod
    pod.delete()


def of(pod: GpuPod, container: str) -> str:
    return f"{pod.namespace}/{pod.name}/{container}"


@pytest.mark.parametrize(
    ("kind", "name", "text", "remedy"),
    [
        ("ring", "open files", "which CRIU cannot dump", "kernel.io_uring_disabled=2"),
        ("userfaultfd", "open files", "uses a userfaultfd, which CRIU cannot dump", "start it so"),
        ("connection", "TCP connections", "2 open: the checkpoint fails", "add the line tcp-est"),
        ("traced", "debugger", "is traced by process", "end the debugger"),
    ],
    ids=KINDS[:4],
)
def test_what_criu_cannot_dump(
    cluster: KubernetesNode, troubled: GpuPod, kind: str, name: str, text: str, remedy: str
) -> None:
    container = of(troubled, kind)
    wait_for(lambda: name in findings(cluster, "--container", container), name, troubled.story)
    said = problems(findings(cluster, "--container", container))
    assert said.keys() == {name}
    assert text in said[name] and remedy in said[name].split(" -> ")[1], said
    assert f"checkpointing of {container} failed" in refusal(cluster, container)


def test_connections_that_criu_is_told_to_take_along(
    cluster: KubernetesNode, troubled: GpuPod
) -> None:
    container = of(troubled, "connection")
    with edited(cluster.root, RUNC_CONF, lambda text: f"{text}tcp-established\n"):
        found = findings(cluster, "--container", container)
        assert problems(found) == {} and "2 open" in found["TCP connections"][0]["text"]
        assert ask(cluster, container).returncode == 0


def test_a_worker_with_a_gpus_file(cluster: KubernetesNode, troubled: GpuPod) -> None:
    """/dev/nvidia0 stands for /dev/null here, which CRIU dumps."""
    name = "GPU processes"

    def said() -> dict[str, str]:
        return problems(findings(cluster, "--container", of(troubled, "gpu-file")))

    wait_for(lambda: name in said(), name, troubled.story)
    assert "has a GPU's files open and does not use CUDA" in said()[name]


def test_a_container_that_calls_itself_kubelet(cluster: KubernetesNode, troubled: GpuPod) -> None:
    """It is not run, and not looked at."""

    def counted() -> str:
        return cluster.root.run("pgrep", "-xc", "kubelet").stdout.strip()

    wait_for(lambda: counted() == "2", "container of that name", troubled.story)
    (only,) = findings(cluster)["kubelet"]
    assert only["status"] == "ok" and "v1.36" in only["text"]


def test_a_mount_that_came_later(cluster: KubernetesNode) -> None:
    """Into a volume with mountPropagation, as of a driver of network file systems."""
    root = cluster.root
    root.path(LATE).mkdir()
    root.run("mount", "--bind", LATE, LATE)
    root.run("mount", "--make-shared", LATE)
    root.path(f"{LATE}/share").mkdir()
    made = pod_of("propagated", "default", ("--mib", "2"), mounts={"/late": LATE})
    made["spec"]["containers"][0]["volumeMounts"][0]["mountPropagation"] = "HostToContainer"
    made["spec"]["automountServiceAccountToken"] = True
    cluster.apply(made)
    pod = GpuPod(cluster, "propagated", "default")
    pod.wait_for_start()
    pod.run_on(1)
    assert problems(findings(cluster, "--container", pod.path)) == {}
    root.run("mount", "--bind", "/etc", f"{LATE}/share")
    try:
        said = problems(findings(cluster, "--container", pod.path))["mounts"]
        assert said.startswith("/late/share (/etc of ") and "is in no config.json" in said
        assert "unmount it otherwise" in said
        assert f"checkpointing of {pod.path} failed" in refusal(cluster, pod.path)
    finally:
        root.run("umount", f"{LATE}/share")
    cluster.checkpoint(pod)
    pod.delete()
    root.run("umount", LATE)


def test_a_process_that_a_tool_has_left_locked(cluster: KubernetesNode, pod: GpuPod) -> None:
    pid = running(pod)
    python = "from gpustasis.driver import Driver; from gpustasis.criu.plugin import *"
    code = f"{python}; d = Driver(driver_libraries()[0]); d.init(); d.%s"
    cluster.root.run(sys.executable, "-c", code % f"lock({pid}, 5000)")
    try:
        said = problems(findings(cluster, "--container", pod.path))["driver state"]
        assert f"process {pid} is locked: a dump or a tool has left it so" in said
        assert f"gpustasis recover {pid}" in said
        assert f"checkpointing of {pod.path} failed" in refusal(cluster, pod.path)
    finally:
        cluster.root.run(sys.executable, "-c", code % f"unlock({pid})")
    pod.run_on(1)
    cluster.checkpoint(pod)


def test_a_pod_without_room_to_stage_gpu_memory(cluster: KubernetesNode) -> None:
    """The limit is the pod's, and neither of its containers would reach it alone."""
    limit = {"resources": {"limits": {"memory": "140Mi"}}}
    made = pod_of("cramped", "default", ("--mib", "16"), spec=limit)
    (container,) = made["spec"]["containers"]
    made["spec"]["containers"].append({**container, "name": "other"})
    cluster.apply(made)
    pod = GpuPod(cluster, "cramped", "default")
    pod.wait_for_start()
    pod.run_on(2)

    def said() -> str:
        return problems(findings(cluster, "--container", pod.path)).get("memory", "")

    wait_for(lambda: "may not fit" in said(), "problem", pod.story)
    assert re.search(r"of control group /kubepods/\w+/pod[-0-9a-f]{36}, ", said()), said()
    assert "raise the limit" in said()
    pod.delete()


def test_a_paused_container(cluster: KubernetesNode, pod: GpuPod) -> None:
    """As a runtime that died in a checkpoint leaves it, and as it finds it when it is back."""
    resume = f"gpustasis {cluster.runtime.command} resume {pod.path}"
    said = f"it is paused, as a checkpoint may leave it -> {resume}"
    with paused(cluster, pod):
        assert said in problems(findings(cluster, "--container", pod.path))["container"]
        if isinstance(cluster.runtime, CrioNode):
            assert "failed to pause container" in refusal(cluster, pod.path)
        else:  # it makes one, and leaves it paused
            assert ask(cluster, pod.path).returncode == 0
            assert said in problems(findings(cluster, "--container", pod.path))["container"]
        # It would start the container anew: containerd says its state is unknown.
        with kubelet_away(cluster):
            restart(cluster)
            assert said in problems(findings(cluster, "--container", pod.path))["container"]
            assert "was paused and runs on" in cluster.root.run(*resume.split()).stdout
            pod.run_on(1)
