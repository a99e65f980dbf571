# SPDX-License-Identifier: Apache-2.0
"""A node of a cluster without the cluster: containerd, a registry and emulated GPUs in one
system."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from glob import glob
from pathlib import Path
from signal import Signals
from types import TracebackType
from typing import Any, Self

from gpustasis.errors import EngineError
from gpustasis.runtimes.cri import Cri
from support.container_logs import records, text_of
from support.cri_tables import NODE_MESSAGES, NODE_METHODS, NODE_NETWORK
from support.engine_gpu import DEVICE, add_gpus, start_emulator
from support.engine_image import make_archive
from support.engine_root import ENVIRON, EngineRoot
from support.oci_image import oci_archive

POLL_S = 0.05
TIMEOUT_S = 180.0  # longer than anything takes on a busy machine
REGISTRY = "127.0.0.1:5000"
KUBELET_PORT = 10250
JOB_IMAGE = f"{REGISTRY}/gpustasis/job:1"
PAUSE_IMAGE = "localhost/gpustasis-pause:latest"
LOGS = Path("/var/log/pods")
SOCKET = "/run/containerd/containerd.sock"
# Without CAP_SYS_RESOURCE no container's oom_score_adj can be lowered.
_CONFIG = f"""\
version = 3
[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = '{PAUSE_IMAGE}'
[plugins.'io.containerd.cri.v1.runtime']
restrict_oom_score_adj = true
"""
_CRUN = """\
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
runtime_type = 'io.containerd.runc.v2'
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
BinaryName = '/usr/bin/crun'
"""
_OLD_CONFIG = f"""\
version = 2
[plugins.'io.containerd.grpc.v1.cri']
sandbox_image = '{PAUSE_IMAGE}'
restrict_oom_score_adj = true
enable_cdi = true
cdi_spec_dirs = ['/etc/cdi']
"""
_REGISTRY_CONFIG = f"""\
version: 0.1
storage: {{filesystem: {{rootdirectory: /var/lib/containerd/registry}}}}
http: {{addr: {REGISTRY}}}
"""
_STEP = re.compile(r"(\d+) step (\d+) ok")


class ContainerdNode:
    """containerd in `root`, from start to close(); a context manager. program: tests/programs'
    steady_job, which is what its image runs. old: where in `root` the programs of containerd 1.7
    are, to run those."""

    name = "containerd"
    command = "containerd"
    endpoint = f"unix://{SOCKET}"
    oci_runtime = "runc"
    gpu_memory = "512MiB"

    def __init__(self, root: EngineRoot, program: Path, old: Path | None = None) -> None:
        self.root = root
        self._old = old
        self._daemons: list[subprocess.Popen[str]] = []
        try:
            self._prepare()
            self._start_daemons()
            self._load_images(program)
            self.cri = self._open_cri()
        except BaseException:
            self._stop_daemons()
            raise

    @property
    def socket(self) -> str:
        """Path, as seen from here, of containerd's socket."""
        return str(self.root.path(SOCKET))

    def pod(
        self, name: str, namespace: str = "tests", annotations: Mapping[str, str] | None = None
    ) -> Pod:
        """Start a pod's sandbox, in the network of the node: no CNI."""
        return Pod(self, name, namespace, annotations or {})

    def pull(self, image: str) -> None:
        """Have it pulled from its registry."""
        if self._old:
            return
        self.cri.call(
            "/runtime.v1.ImageService/PullImage", timeout_s=TIMEOUT_S, image={"image": image}
        )

    def log(self) -> str:
        """What containerd has said."""
        return self.root.path("/var/log/containerd.log").read_text(errors="replace")

    def _prepare(self) -> None:
        root = self.root
        config = _CONFIG + (_CRUN if self.oci_runtime == "crun" else "")
        root.write("/etc/containerd/config.toml", _OLD_CONFIG if self._old else config)
        add_gpus(root, memory=self.gpu_memory)

    def _start_daemons(self) -> None:
        start_registry(self.root, self._daemons)
        self.restart()

    def _open_cri(self) -> Cri:
        return Cri(self.socket, (NODE_MESSAGES, NODE_METHODS))

    def _answers(self) -> bool:
        """Also the part that kubelets ask, which is there later than the rest."""
        assert self._containerd.poll() is None, self.log()[-4000:]
        if self.root.run("ctr", "version", check=False).returncode != 0:
            return False
        try:
            with self._open_cri() as cri:
                cri.call("ListContainers")
        except EngineError:
            return False
        return True

    def kill(self) -> None:
        """As when it crashes: its shims, and what runs under them, live on."""
        self._daemons.remove(self._containerd)
        end(self._containerd, "KILL")

    def restart(self) -> None:
        """After kill."""
        with self.root.path("/var/log/containerd.log").open("a") as log:
            first = f"{self._old}:" if self._old else ""
            environ = {"PATH": first + ENVIRON["PATH"]}
            self._containerd = self.root.start(
                "containerd", environ=environ, stdout=log, stderr=log
            )
        self._daemons.append(self._containerd)
        wait_for(self._answers, "answer of containerd", self.log)

    def boot(self) -> None:
        """After root.reboot(): the GPUs, the registry and containerd are started again."""
        for daemon in self._daemons:
            daemon.wait()
        self._daemons.clear()
        self.cri.__exit__(None, None, None)
        start_emulator(self.root, memory=self.gpu_memory)
        self._start_daemons()
        self.cri = self._open_cri()

    def _load_images(self, program: Path) -> None:
        layer = make_archive(self.root, [program])
        for image, command in (
            (PAUSE_IMAGE, ["/bin/sleep", "1000000"]),
            (JOB_IMAGE, [f"/bin/{program.name}"]),
        ):
            self.root.path("/tmp/image.tar").write_bytes(oci_archive(layer, image, command))
            self._ctr("images", "import", "/tmp/image.tar")
        if self._old:  # no restore, so no registry: the image stays as it was imported
            return
        self._ctr("images", "push", "--plain-http", JOB_IMAGE)
        self._ctr("images", "rm", JOB_IMAGE)

    def _ctr(self, *words: str) -> str:
        ctr = self._old / "ctr" if self._old else "ctr"
        return self.root.run(ctr, "-n", "k8s.io", *words).stdout

    def _stop_daemons(self) -> None:
        end_all(self.root, self._daemons)

    def close(self) -> None:
        self.cri.__exit__(None, None, None)
        self._stop_daemons()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class ContainerdWithCrun(ContainerdNode):
    """As ContainerdNode, with crun in place of runc."""

    oci_runtime = "crun"


class Pod:
    """A pod's sandbox. id: of the sandbox."""

    def __init__(
        self, node: ContainerdNode, name: str, namespace: str, annotations: Mapping[str, str]
    ) -> None:
        self.node, self.name, self.namespace = node, name, namespace
        options = {"network": NODE_NETWORK}
        self.config = {
            "metadata": {"name": name, "uid": f"uid-{name}", "namespace": namespace},
            "annotations": dict(annotations),
            "log_directory": str(LOGS / f"{namespace}_{name}"),
            "linux": {"security_context": {"namespace_options": options}},
        }
        answer = node.cri.call("RunPodSandbox", timeout_s=TIMEOUT_S, config=self.config)
        self.id: str = answer.pod_sandbox_id

    def create(self, name: str, image: str, args: list[str], **config: Any) -> Container:
        """Create a container with the node's GPUs in it; config: more of CRI's ContainerConfig."""
        fields = {
            "metadata": {"name": name},
            "image": {"image": image},
            "args": args,
            "CDI_devices": [{"name": DEVICE}],
            "log_path": f"{name}.log",
            "linux": {"security_context": {"namespace_options": {"network": NODE_NETWORK}}},
        }
        answer = self.node.cri.call(
            "CreateContainer",
            timeout_s=TIMEOUT_S,
            pod_sandbox_id=self.id,
            config=fields | config,
            sandbox_config=self.config,
        )
        return Container(self, name, answer.container_id)

    def job(self, name: str, *args: str) -> Container:
        """A container that runs steady_job, which has made two steps."""
        self.node.pull(JOB_IMAGE)
        container = self.create(name, JOB_IMAGE, list(args))
        container.start()
        container.run_on(2)
        return container


class Container:
    """A container of a pod."""

    def __init__(self, pod: Pod, name: str, identifier: str) -> None:
        self.pod, self.name, self.id = pod, name, identifier
        self._cri = pod.node.cri

    @property
    def path(self) -> str:
        return f"{self.pod.namespace}/{self.pod.name}/{self.name}"

    def start(self) -> None:
        self._cri.call("StartContainer", timeout_s=TIMEOUT_S, container_id=self.id)

    def stop(self) -> None:
        """Kill it and wait for its end."""
        self._cri.call("StopContainer", timeout_s=TIMEOUT_S, container_id=self.id, timeout=0)

    def remove(self) -> None:
        self._cri.call("RemoveContainer", timeout_s=TIMEOUT_S, container_id=self.id)

    def output(self) -> list[str]:
        """Lines it has written."""
        log = self.pod.node.root.path(
            LOGS / f"{self.pod.namespace}_{self.pod.name}" / f"{self.name}.log"
        )
        text = log.read_text(errors="replace") if log.exists() else ""
        return [text_of(line) for line in records(text)]

    def steps(self) -> int:
        """Steps said to be right. Fails if the job has said anything else."""
        count = 0
        for line in self.output():
            if "driver emulator" in line:
                continue
            assert _STEP.fullmatch(line), f"the job says {line!r}"
            count += 1
        return count

    def run_on(self, steps: int = 3) -> None:
        """Wait until it has made that many steps more, each of them right: its memory is."""
        wanted = self.steps() + steps
        wait_for(lambda: self.steps() >= wanted, f"{steps} steps of {self.path}", self.pod.node.log)


def start_registry(root: EngineRoot, daemons: list[subprocess.Popen[str]]) -> None:
    """A registry without TLS at REGISTRY, one more of the daemons. Returns when it listens."""
    root.write("/etc/registry.yml", _REGISTRY_CONFIG)
    said = root.path("/var/log/registry.log")
    with said.open("w") as log:
        words = ("docker-registry", "serve", "/etc/registry.yml")
        registry = root.start(*words, stdout=log, stderr=log)
    daemons.append(registry)
    connect = ("bash", "-c", f": </dev/tcp/{REGISTRY.replace(':', '/')}")

    def listens() -> bool:
        assert registry.poll() is None, said.read_text()
        return root.run(*connect, check=False).returncode == 0

    wait_for(listens, "registry", said.read_text)


def wait_for(
    condition: Callable[[], bool], what: str, say: Callable[[], str], timeout_s: float = TIMEOUT_S
) -> None:
    """Wait until condition() holds; fail with the end of what say() says."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"no {what} in {timeout_s} s:\n{say()[-4000:]}"
        time.sleep(POLL_S)


def end(daemon: subprocess.Popen[str], signal: str = "TERM") -> None:
    """End what EngineRoot.start has started: nsenter's only child is the program itself. At once:
    some tests wait for a moment to do it."""
    children = Path(f"/proc/{daemon.pid}/task/{daemon.pid}/children").read_text().split()
    for child in children:
        os.kill(int(child), Signals[f"SIG{signal}"])
    daemon.wait(TIMEOUT_S)


def end_all(
    root: EngineRoot, daemons: Sequence[subprocess.Popen[str]], signal: str = "TERM"
) -> None:
    """Those that run. Every task of that system is let run before: a frozen one cannot be killed in
    a v1 hierarchy."""
    for freezer in glob(str(root.path("/sys/fs/cgroup/freezer/**/freezer.state")), recursive=True):
        with suppress(OSError):  # the group has gone
            Path(freezer).write_text("THAWED")
    for daemon in daemons:
        if daemon.poll() is None:
            end(daemon, signal)
