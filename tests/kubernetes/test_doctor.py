# SPDX-License-Identifier: Apache-2.0
"""What `gpustasis doctor` says of a node of a cluster: what is wrong is brought about there, named,
and what a kubelet's checkpoint or a pod's start says of it is seen too."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest

from gpustasis.install import layout
from gpustasis.runtimes.kubelet_archives import DIRECTORY
from support.containerd_node import SOCKET as CONTAINERD
from support.containerd_node import wait_for
from support.crio_node import SOCKET as CRIO
from support.crio_node import CrioNode
from support.doctor import (
    edited,
    findings,
    problems,
    refusal,
    restart,
    with_file,
    without,
)
from support.engine_root import EngineRoot
from support.gpu_pod import GpuPod
from support.kubernetes_faults import other_kubelet
from support.kubernetes_node import KubernetesNode
from support.kubernetes_objects import pod_of

pytestmark = pytest.mark.usefixtures("tidy")

PROGRAMS = Path(__file__).resolve().parent.parent / "programs"
RUNC_CONF = "/etc/criu/runc.conf"
NVIDIA_HOOK = b'{"version": "1.0.0", "hook": {"path": "/usr/bin/nvidia-container-runtime-hook"}}'
CDI = "/etc/cdi/gpustasis-emulator.json"
Change = Callable[[EngineRoot], AbstractContextManager[None]]


@pytest.fixture(scope="module")
def pod(cluster: KubernetesNode) -> Iterator[GpuPod]:
    made = cluster.job("looked-at", "--mib", "4")
    yield made
    made.delete()


def test_a_sound_node(cluster: KubernetesNode) -> None:
    found = findings(cluster)
    assert problems(found) == {}
    assert found["installation"][0]["text"].startswith("complete"), found["installation"]
    for name in ("kubelet", "kubelet's archives"):
        assert [one["status"] for one in found[name]] == ["ok"], found[name]
    assert "v1.36" in found["kubelet"][0]["text"]
    crio = [one["status"] for one in found.get("CRI-O", [])]
    assert crio == (["ok"] if isinstance(cluster.runtime, CrioNode) else [])


def in_runc_conf(edit: Callable[[str], str]) -> Change:
    return lambda root: edited(root, RUNC_CONF, edit)


def libdir(place: str) -> Change:
    return in_runc_conf(lambda text: text.replace(layout.PLUGIN_DIRECTORY, place))


def line(option: str) -> Change:
    return in_runc_conf(lambda text: f"{text}{option}\n")


# What is wrong: how, the finding's name, of its text, of its remedy.
@pytest.mark.parametrize(
    ("change", "name", "text", "remedy"),
    [
        (libdir("/opt/no"), "plugin for runc", "libdir /opt/no is not there", "gpustasis install"),
        (line("--shell-job"), "CRIU configuration", "'--shell-job' is not the name", "mend that"),
        (line("stream"), "criu stream", "criu dies of it", "remove that line"),
        (
            lambda root: without(root, layout.PLUGIN),
            "plugin for runc",
            f"libdir {layout.PLUGIN_DIRECTORY} holds no cuda_plugin.so",
            'run "gpustasis install" again',
        ),
        (
            lambda root: without(root, "/usr/sbin/criu"),
            *("CRIU", "no criu was found", "install criu >= 4.1"),
        ),
    ],
    ids=["no libdir", "unreadable line", "stream", "no plugin", "no criu"],
)
def test_what_ends_every_checkpoint(
    cluster: KubernetesNode, pod: GpuPod, change: Change, name: str, text: str, remedy: str
) -> None:
    with change(cluster.root):
        said = problems(findings(cluster))
        assert text in said[name] and remedy in said[name].split(" -> ")[1], said
        assert f"checkpointing of {pod.path} failed" in refusal(cluster, pod.path)
    pod.run_on(1)


def test_a_plugin_for_another_criu(
    cluster: KubernetesNode, pod: GpuPod, compile_c: Callable[..., Path]
) -> None:
    newer = compile_c(PROGRAMS / "newer_plugin.c", "-shared", "-fPIC").read_bytes()
    with with_file(cluster.root, f"{layout.PLUGIN_DIRECTORY}/newer_plugin.so", newer, 0o755):
        said = problems(findings(cluster))
        assert "newer_plugin.so needs added_in_criu_9" in said["other plugin"]
        assert "checkpointing of" in refusal(cluster, pod.path)
    pod.run_on(1)


def test_what_hinders_no_checkpoint_of_this_pod(cluster: KubernetesNode, pod: GpuPod) -> None:
    """Or does so on other nodes only: runc built without checkpoints, NVIDIA's own hook."""
    root = cluster.root
    runc = root.path("/usr/sbin/runc").read_bytes()
    with ExitStack() as stack:
        for change in (
            line("timeout 9")(root),
            with_file(root, "/usr/local/sbin/runc", runc + b"(runc_nocriu)", 0o755),
            with_file(root, "/usr/share/containers/oci/hooks.d/nvidia.json", NVIDIA_HOOK),
            without(root, layout.HOOK_DEFINITION),
        ):
            stack.enter_context(change)
        found = findings(cluster)
        said = problems(found)
        assert "timeout 9" in found["criu timeout"][0]["text"]
        assert "/usr/local/sbin/runc is built without checkpoints" in said["runc"]
        assert "nvidia.json: its mounts are in no config.json" in said["NVIDIA's legacy hook"]
        assert f"{layout.HOOK_DEFINITION}: it is missing" in said["installation"]
        cluster.checkpoint(pod)
    pod.run_on(1)


def test_a_hook_that_does_not_start(cluster: KubernetesNode) -> None:
    """containerd runs none."""
    with edited(cluster.root, layout.HOOK, lambda text: text.replace("oci_hook", "gone")):
        said = problems(findings(cluster))["OCI hook"]
        assert "No module named 'gpustasis.gone'" in said and "do not start" in said
        kept = {"io.gpustasis.keep": "2"}
        cluster.apply(pod_of("hooked", "default", ("--mib", "2"), annotations=kept))
        hooked = GpuPod(cluster, "hooked", "default")
        if isinstance(cluster.runtime, CrioNode):
            wait_for(lambda: "gpustasis.gone" in hooked.events(), "failed start", hooked.story)
        else:
            hooked.wait_for_start()
        hooked.delete()


def test_a_cdi_specification_of_another_driver(cluster: KubernetesNode) -> None:
    library = "/usr/lib/libcuda.so.570.1.2"

    def of_before(text: str) -> str:
        listed = json.loads(text)
        mount = {"hostPath": library, "containerPath": library, "options": ["bind", "ro"]}
        listed["devices"][0]["containerEdits"]["mounts"].append(mount)
        return json.dumps(listed)

    with edited(cluster.root, CDI, of_before):
        said = problems(findings(cluster))["CDI"]
        assert f"{CDI} is for driver 570.1.2; this host has 580.95.05" in said
        cluster.apply(pod_of("stale", "default", ("--mib", "2")))
        stale = GpuPod(cluster, "stale", "default")
        wait_for(lambda: f"open {library}" in stale.failure(), "failed start", stale.story)
        stale.delete()


@contextmanager
def crio_with(cluster: KubernetesNode, lines: str) -> Iterator[None]:
    """CRI-O runs with these lines of [crio.runtime]."""
    lines = f"[crio.runtime]\n{lines}"
    try:
        with with_file(cluster.root, "/etc/crio/crio.conf.d/90-test.conf", lines.encode()):
            restart(cluster)
            yield
    finally:
        restart(cluster, at_once=True)


def test_only_of_cri_o_it_is_said_how_it_runs(cluster: KubernetesNode) -> None:
    assert ("CRI-O" in findings(cluster)) == isinstance(cluster.runtime, CrioNode)


@pytest.mark.with_crio
def test_a_cri_o_that_refuses_checkpoints(cluster: KubernetesNode, pod: GpuPod) -> None:
    """It is told to, or there was no criu when it started. containerd has no such setting, and
    looks for criu at each checkpoint."""
    for setting in ("false", "true"):
        with crio_with(cluster, f"enable_criu_support = {setting}\n"):
            if setting == "true":
                with without(cluster.root, "/usr/sbin/criu"):
                    restart(cluster)
            said = problems(findings(cluster))["CRI-O"]
            assert "it refuses checkpoints" in said and "restart it" in said
            assert "checkpoint/restore support not available" in refusal(cluster, pod.path)
    cluster.checkpoint(pod)


@pytest.mark.with_crio
def test_a_cri_o_with_programs_and_hooks_of_its_own(cluster: KubernetesNode) -> None:
    """hooks_dir that leaves ours out, a crun beside that in PATH, and a runtime handler, whose name
    archives have. What containerd says of its runtimes is in test_crun.py."""
    root = cluster.root
    crun = root.path("/usr/bin/crun").read_bytes()
    crun = crun.replace(b"/etc/criu/crun.conf", b"/etc/criu/none.conf")
    monitor = 'monitor_path = "/usr/bin/conmon"\n'
    handler = '[crio.runtime.runtimes.nvidia]\nruntime_path = "/usr/bin/runc"\n'
    # It stays: a kubelet goes on with a pod that was deleted, and CRI-O cannot without it.
    root.write("/etc/crio/crio.conf.d/80-nvidia.conf", handler + monitor)
    lines = 'hooks_dir = ["/opt/hooks"]\n[crio.runtime.runtimes.crun]\n'
    lines += f'runtime_path = "/opt/crio/crun"\n{monitor}'
    runtime_class = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "handler": "nvidia"}
    cluster.apply({**runtime_class, "metadata": {"name": "gpu"}})
    with with_file(root, "/opt/crio/crun", crun, 0o755), crio_with(cluster, lines):
        found = findings(cluster)
        assert "hooks_dir = ['/opt/hooks'] leaves out" in problems(found)["CRI-O"]
        assert [one["status"] for one in found["runc"]] == ["ok"]
        old = [one["text"] for one in found["crun"] if one["status"] == "note"]
        assert len(old) == 1 and old[0].startswith("/opt/crio/crun is older than 1.26"), found
        wrong = {"io.gpustasis.keep": "many"}
        spec = {"runtimeClassName": "gpu"}
        cluster.apply(pod_of("unhooked", "default", ("--mib", "2"), spec=spec, annotations=wrong))
        unhooked = GpuPod(cluster, "unhooked", "default")
        unhooked.wait_for_start()
        unhooked.run_on(1)
        archive = cluster.checkpoint(unhooked)
        (runtime,) = findings(cluster, "--archive", str(archive))["runtime"]
        assert (runtime["status"], runtime["text"]) == ("ok", "nvidia")
        unhooked.delete()


def test_a_kubelet_without_the_feature_gate(cluster: KubernetesNode, pod: GpuPod) -> None:
    with other_kubelet(cluster, {"ContainerCheckpoint": False}):
        said = problems(findings(cluster))["kubelet"]
        assert "feature gate ContainerCheckpoint is off" in said
        assert "featureGates: {ContainerCheckpoint: true}" in said
        assert "feature gate ContainerCheckpoint is off" in refusal(cluster, pod.path)
    wait_for(lambda: cluster.kubelet_knows(pod), "pod that the kubelet knows", cluster.log)


def test_no_room_for_archives(cluster: KubernetesNode, pod: GpuPod) -> None:
    """Neither runtime removes what it could not finish."""
    cluster.root.run("mount", "--types", "tmpfs", "--options", "size=1m", "none", DIRECTORY)
    try:
        assert "no space left on device" in refusal(cluster, pod.path)
        said = problems(findings(cluster))["kubelet's archives"]
        assert said.startswith(f"1 archive in {DIRECTORY}, 1.0 MiB; 0.0 MiB are free"), said
        assert "delete those" in said
    finally:
        cluster.root.run("umount", DIRECTORY)


def test_an_archive(cluster: KubernetesNode) -> None:
    """Its pod is gone; then what its runtime is run by, and what it had mounted, are gone too."""
    root = cluster.root
    root.path("/srv/of-this-node").mkdir()
    mounts = {"/data": "/srv/of-this-node"}
    cluster.apply(pod_of("of-archive", "default", ("--mib", "2"), mounts=mounts))
    archived = GpuPod(cluster, "of-archive", "default")
    archived.wait_for_start()
    archived.run_on(1)
    archive = str(cluster.checkpoint(archived))
    archived.delete()
    assert problems(findings(cluster, "--archive", archive)) == {}
    shutil.rmtree(root.path("/srv/of-this-node"))
    crio = isinstance(cluster.runtime, CrioNode)
    with without(root, "/usr/sbin/runc" if crio else "/usr/bin/containerd-shim-runc-v2"):
        said = problems(findings(cluster, "--archive", archive))
    assert said.keys() == {"runtime", "mounts"}
    named = "runc" if crio else "io.containerd.runc.v2"
    assert f"made by {named}, which is not here -> install {named}" in said["runtime"]
    assert "has /srv/of-this-node mounted, which is not on this host" in said["mounts"]


def test_a_socket_that_another_runtime_has_left(cluster: KubernetesNode, pod: GpuPod) -> None:
    crio = isinstance(cluster.runtime, CrioNode)
    left = CONTAINERD if crio else CRIO
    cluster.root.path(left).parent.mkdir(exist_ok=True)
    code = f"import socket; socket.socket(socket.AF_UNIX).bind({left!r})"
    cluster.root.run("python3", "-c", code)
    try:
        found = findings(cluster)
        assert problems(found) == {}
        assert crio or "nobody says there how CRI-O runs" in found["CRI-O"][0]["text"]
        assert problems(findings(cluster, "--container", pod.path)) == {}
    finally:
        cluster.root.path(left).unlink()
