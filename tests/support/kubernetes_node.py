# SPDX-License-Identifier: Apache-2.0
"""A cluster of one node: etcd, kube-apiserver, kube-scheduler, kube-controller-manager and kubelet,
all real, over a real container runtime in an EngineRoot of the suite `kubernetes`.

ci/test-root makes the root, ci/kubernetes the programs. What this machine lacks, and what is done
about it: without CAP_SYS_RESOURCE no process can lower its oom_score_adj; there is no /dev/kmsg;
the kernel's settings that a kubelet wants are not ours to change, so it sees files in their
place.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from gpustasis.emulator import RUN_DIRECTORY, Emulator
from gpustasis_bench.roots import roots_directory
from support import containerd_node, crio_node
from support.asked_again import done_once_frozen
from support.certificates import Authority, Pair
from support.containerd_node import ContainerdNode, end, wait_for
from support.crio_node import CrioNode
from support.engine_gpu import DEVICE, install
from support.engine_root import EngineRoot
from support.gpu_pod import GpuPod
from support.kubernetes_faults import Client, setting_put_back
from support.kubernetes_objects import (
    API_SERVER_WORDS,
    ETCD,
    KUBELET,
    NETWORK,
    PLACE,
    RESOURCE,
    binding,
    is_ready,
    kubeconfig,
    pod_of,
    role,
)
from support.one_at_a_time import turn

NODE = "node-1"
ADDRESS = "192.0.2.1"  # of the node; a kubelet takes none of a loopback device for its own
SERVER_USER = "kube-apiserver-kubelet-client"  # as kubeadm names it
API_SERVER = "https://127.0.0.1:6443"
PROGRAMS = crio_node.PROGRAMS
TIMEOUT_S = containerd_node.TIMEOUT_S
ADMIN = PLACE / "admin.conf"
# What a kubelet sets; a file of the node's own lies over each.
_KERNEL_SETTINGS = (
    *("vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops"),
    *("kernel/keys/root_maxkeys", "kernel/keys/root_maxbytes"),
)
_GPUS = "4"  # as the node hands them out
_BOOT_ID = "kernel/random/boot_id"


def programs_directory() -> Path:
    """Where ci/kubernetes keeps what it has built."""
    return roots_directory().parent / "kubernetes" / "bin"


def node_root(place: Path, tests: Path, shared: Mapping[str, Path] | None = None) -> EngineRoot:
    """The system of such a node, with nothing started in it. tests: this repository's."""
    programs = programs_directory()
    for program in ("kubelet", "crio"):
        assert (programs / program).is_file(), (
            f"{programs} has no {program}; ci/kubernetes makes it"
        )
    binds = {PROGRAMS: programs, str(tests): tests}
    return EngineRoot(place, binds=binds, shared=shared, suite="kubernetes")


class KubernetesNode:
    """The cluster in `root`, from start to close(); a context manager. program: tests/programs'
    steady_job. secrets: an empty directory of this machine for keys. runtime: what the kubelet's
    containers run under."""

    def __init__(
        self,
        root: EngineRoot,
        program: Path,
        secrets: Path,
        tests: Path,
        runtime: type[ContainerdNode | CrioNode] = ContainerdNode,
    ) -> None:
        self.root = root
        self._tests = tests
        self._daemons: dict[str, subprocess.Popen[str]] = {}
        self._stack = ExitStack()
        self._stack.callback(self._stop)
        try:
            with turn(programs_directory()):  # two at once would take each other's processors
                begin = time.monotonic()
                self._prepare(secrets)
                self._boot()
                started = self._stack.enter_context(runtime(root, program))
                self.runtime: ContainerdNode | CrioNode = started
                install(root)
                self._start_control_plane()
                self._install_control_plane()
                self.start_kubelet()
                self._start_device_plugin()
                self.wait_for_account("default")
                self.seconds_to_start = time.monotonic() - begin
        except BaseException:
            self._stack.close()
            raise

    def kubectl(self, *words: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        """As the cluster's administrator."""
        return self.root.run("kubectl", "--kubeconfig", ADMIN, *words, check=check)

    def get(self, *words: str) -> Any:
        """What `kubectl get` has to say, from JSON."""
        return json.loads(self.kubectl("get", *words, "--output", "json").stdout)

    def wait_for_account(self, namespace: str) -> None:
        """Until the namespace has the service account that its pods need."""
        words = ("get", "serviceaccount", "default", "--namespace", namespace)
        wait_for(
            lambda: self.kubectl(*words, check=False).returncode == 0,
            f"service account in {namespace}",
            lambda: self.log("kube-controller-manager"),
        )

    def apply(self, *objects: Mapping[str, Any]) -> None:
        """Make or change objects of the API."""
        listed = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        self.root.write("/tmp/objects.json", json.dumps(listed))
        self.kubectl("apply", "--filename", "/tmp/objects.json")

    def job(self, name: str, *args: str, namespace: str = "default", **metadata: Any) -> GpuPod:
        """A pod whose container `job` runs steady_job on the node's GPUs; it has made two steps."""
        pod = GpuPod(self, name, namespace)
        self.apply(pod_of(name, namespace, args, **metadata))
        pod.wait_for_start()
        pod.run_on(2)
        return pod

    def checkpoint(self, pod: GpuPod, *words: str) -> Path:
        """Have the kubelet checkpoint it, asked directly by who may; the archive's path there."""
        asked = (*self._checkpoint_words(pod), "--json", *words)
        done = done_once_frozen(lambda: self.root.run(*asked, check=False))
        (one,) = json.loads(done.stdout)["checkpoints"]
        assert one["ok"], one
        (archive,) = one["archives"]
        now = time.time()
        time.sleep(1 - now % 1)  # a kubelet names archives by the second
        return Path(archive)

    def begin_checkpoint(self, pod: GpuPod) -> Client:
        log = self.root.path(f"/tmp/client-of-{pod.name}.log")

        def start() -> subprocess.Popen[str]:
            with log.open("w") as said:
                return self.root.start(*self._checkpoint_words(pod), stdout=said, stderr=said)

        return Client(start, log)

    def _checkpoint_words(self, pod: GpuPod) -> tuple[str | Path, ...]:
        return (
            *("gpustasis", "kubelet", "checkpoint", pod.path, "--node", ADDRESS),
            *("--ca", PLACE / "ca.pem", "--cert", PLACE / "admin-client.pem"),
            *("--key", PLACE / "admin-client.key"),
        )

    def wait_for_driver(self, client: Client) -> None:
        """Until its emulator has met all faults that were added: the client's dump waits there."""
        emulator = Emulator(path=self.root.path(RUN_DIRECTORY / "default/socket"))

        def waits() -> bool:
            client.require_running()
            return not emulator.status()["faults"]

        wait_for(waits, "dump under way", self.log)

    def wait_for_runtime(self) -> None:
        """Until the kubelet can ask its runtime, which was started again."""
        words = ("get", "--raw", f"/api/v1/nodes/{NODE}/proxy/runningpods/")
        wait_for(lambda: self.kubectl(*words, check=False).returncode == 0, "runtime", self.log)

    def log(self, name: str = "kubelet") -> str:
        """What a program of the node has said."""
        path = self.root.path(f"/var/log/{name}.log")
        return path.read_text(errors="replace") if path.exists() else ""

    def config(self) -> str:
        """The plugin's configuration on the node."""
        return self.root.path("/etc/gpustasis/config.toml").read_text()

    def delete_all_pods(self) -> None:
        """Returns when none of their processes is left."""
        words = ("--all", "--all-namespaces", "--grace-period", "0", "--force", "--wait=true")
        self.kubectl("delete", "pods", *words)

        jobs = ("pgrep", "-x", "steady_job")
        wait_for(lambda: self.root.run(*jobs, check=False).returncode == 1, "end of jobs", self.log)

    def kubelet_knows(self, pod: GpuPod) -> bool:
        """Whether it could be asked for that pod. Not at once after it has started."""
        known = json.loads(self.kubectl("get", "--raw", f"/api/v1/nodes/{NODE}/proxy/pods").stdout)
        return pod.name in [one["metadata"]["name"] for one in known["items"] or ()]

    def runs(self, name: str) -> bool:
        """Whether that program was started and not killed since."""
        return name in self._daemons

    def kill(self, name: str) -> None:
        """As when it crashes."""
        end(self._daemons.pop(name), "KILL")

    def reboot(self) -> None:
        """Every process of the node is killed at once, what is no file on its disk is gone, and all
        is started again. Returns when the node is ready and its GPUs can be had."""
        with setting_put_back(self.root):
            self.root.reboot()
        for daemon in self._daemons.values():
            daemon.wait()
        self._daemons.clear()
        self._boot()
        self.runtime.boot()
        self._start_control_plane()
        self.start_kubelet()
        self._start_device_plugin()

    def start_kubelet(self, gates: Mapping[str, bool] | None = None, **settings: str) -> None:
        """Returns when the node is ready, with its GPUs if they are handed out. gates: feature
        gates. settings: of its configuration."""
        config = {**KUBELET, "containerRuntimeEndpoint": self.runtime.endpoint, **settings}
        config["featureGates"] = {**KUBELET["featureGates"], **(gates or {})}
        self.root.write(PLACE / "kubelet.json", json.dumps(config))
        begin = time.time()
        self._start(
            "kubelet",
            *("--config", PLACE / "kubelet.json", "--kubeconfig", PLACE / "kubelet.conf"),
            *("--hostname-override", NODE, "--node-ip", ADDRESS, "--v", "2"),
        )
        wait_for(lambda: self._is_up(begin), "ready node", self.log)
        wait_for(self._answers, "answer of the kubelet", self.log)

    def _is_up(self, since: float) -> bool:
        """What is known of an earlier kubelet, and of GPUs that were handed out by that one, stays
        in the node's status, and would have a pod refused."""
        self._require("kubelet")
        done = self.kubectl("get", "node", NODE, "--output", "json", check=False)
        status = json.loads(done.stdout)["status"] if done.returncode == 0 else {}
        if not self.runs("device-plugin"):
            return is_ready(status, since)
        self._require("device-plugin")
        return is_ready(status, since) and status["allocatable"].get(RESOURCE) == _GPUS

    def _require(self, name: str) -> None:
        """That program runs."""
        assert self._daemons[name].poll() is None, self.log(name)[-4000:]

    def _answers(self) -> bool:
        """Itself: what the API server knows of it may be of an earlier one."""
        self._require("kubelet")
        path = f"/api/v1/nodes/{NODE}/proxy/healthz"
        return self.kubectl("get", "--raw", path, check=False).stdout == "ok"

    def _start(self, name: str, *words: str | Path) -> None:
        with self.root.path(f"/var/log/{name}.log").open("a") as log:
            program = f"{PROGRAMS}/{name}" if name.startswith("kube") else name
            self._daemons[name] = self.root.start(program, *words, stdout=log, stderr=log)

    def _start_control_plane(self) -> None:
        self._start(
            "etcd",
            *("--data-dir", "/var/lib/etcd", "--listen-client-urls", ETCD),
            *("--advertise-client-urls", ETCD, "--unsafe-no-fsync"),
        )
        self._start("kube-apiserver", *API_SERVER_WORDS)
        wait_for(self._serves, "API server", lambda: self.log("kube-apiserver"))
        self._start(
            "kube-controller-manager",
            *("--kubeconfig", PLACE / "controller-manager.conf", "--leader-elect=false"),
            *("--service-account-private-key-file", PLACE / "accounts.key"),
            *("--root-ca-file", PLACE / "ca.pem", "--use-service-account-credentials"),
            *("--bind-address", "127.0.0.1"),
        )
        self._start(
            "kube-scheduler",
            *("--kubeconfig", PLACE / "scheduler.conf", "--leader-elect=false"),
            *("--bind-address", "127.0.0.1"),
        )

    def _install_control_plane(self) -> None:
        """The rights that a cluster's tools give the API server's own client of kubelets."""
        self.apply(
            binding("kubelet-api", "system:kubelet-api-admin", SERVER_USER),
            role("kubelet-checkpoint", "create", "nodes/checkpoint"),
            binding("kubelet-checkpoint", "kubelet-checkpoint", SERVER_USER),
        )

    def _serves(self) -> bool:
        self._require("kube-apiserver")
        return self.kubectl("get", "--raw", "/readyz", check=False).returncode == 0

    def _start_device_plugin(self) -> None:
        begin = time.time()
        with self.root.path("/var/log/device-plugin.log").open("a") as said:
            words = (self._tests / "support/device_plugin.py", RESOURCE, DEVICE, _GPUS)
            self._daemons["device-plugin"] = self.root.start(
                *(sys.executable, *words),
                environ={"PYTHONPATH": str(self._tests)},
                stdout=said,
                stderr=said,
            )
        wait_for(lambda: self._is_up(begin), "GPU to allocate", lambda: self.log("device-plugin"))

    def _prepare(self, secrets: Path) -> None:
        root = self.root
        root.write("/etc/cni/net.d/10-pods.conflist", json.dumps(NETWORK))
        root.path("/opt/cni").mkdir(parents=True, exist_ok=True)
        root.path("/opt/cni/bin").symlink_to("/usr/lib/cni")
        authority = Authority(secrets)
        self._put("ca.pem", authority.certificate)
        self._put_pair("server", authority.server("127.0.0.1", "10.96.0.1", names=["localhost"]))
        self._put_pair("kubelet", authority.server(ADDRESS, names=[NODE]))
        self._put_pair("apiserver", authority.client(SERVER_USER))
        for name, user, *groups in (
            ("admin", "admin", "system:masters"),
            ("controller-manager", "system:kube-controller-manager"),
            ("scheduler", "system:kube-scheduler"),
            ("kubelet", f"system:node:{NODE}", "system:nodes"),
        ):
            self.write_kubeconfig(PLACE / f"{name}.conf", authority.client(user, *groups))
        self.authority = authority
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        pem = serialization.Encoding.PEM
        private = key.private_bytes(
            pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        public = key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
        root.write(PLACE / "accounts.key", private.decode(), 0o600)
        root.write(PLACE / "accounts.pub", public.decode())

    def _boot(self) -> None:
        """What each start of the node's kernel sets up."""
        self.root.run("mount", "--make-rshared", "/")  # as systemd makes it
        root = self.root
        root.run("ip", "address", "add", f"{ADDRESS}/32", "dev", "lo")
        settings = {name: Path("/proc/sys", name).read_text() for name in _KERNEL_SETTINGS}
        for name, value in (settings | {_BOOT_ID: f"{uuid.uuid4()}\n"}).items():
            place = f"/tmp/settings/{name.replace('/', '-')}"
            root.write(place, value)
            root.run("mount", "--bind", place, f"/proc/sys/{name}")
        if not root.path("/dev/kmsg").exists():  # where a kubelet reads of tasks killed for memory
            root.path("/dev/kmsg").symlink_to("null")

    def write_kubeconfig(self, path: Path, pair: Pair) -> None:
        """A kubeconfig file at `path` on the node, for who has that certificate."""
        stem = path.with_suffix("").name + "-client"
        self._put_pair(stem, pair)
        self.root.write(path, json.dumps(kubeconfig(API_SERVER, stem)), 0o600)

    def _put(self, name: str, source: Path) -> None:
        self.root.write(PLACE / name, source.read_text(), 0o600)

    def _put_pair(self, name: str, pair: Pair) -> None:
        self._put(f"{name}.pem", pair.certificate)
        self._put(f"{name}.key", pair.key)

    def _stop(self) -> None:
        for daemon in reversed(self._daemons.values()):
            if daemon.poll() is None:
                end(daemon)

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
