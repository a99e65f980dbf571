# SPDX-License-Identifier: Apache-2.0
"""What is away on a KubernetesNode for a while, or stands still, and is put back whatever
happens."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from gpustasis.runtimes.freezer import GROUPS
from support.asked_again import UNFROZEN, done_once_frozen
from support.containerd_node import TIMEOUT_S

if TYPE_CHECKING:
    from support.engine_root import EngineRoot
    from support.gpu_pod import GpuPod
    from support.kubernetes_node import KubernetesNode

_USERFAULTFD = Path("/proc/sys/vm/unprivileged_userfaultfd")
_RAISED = "/run/gpustasis/userfaultfd-raised"  # not empty: by a dump under way, or a killed one
_PAUSE = {"containerd": ("ctr", "-n", "k8s.io", "tasks"), "CRI-O": ("runc",)}


@dataclass(slots=True)
class Client:
    """The kubelet's client of a checkpoint, begun. start: how. log: what it says."""

    start: Callable[[], subprocess.Popen[str]]
    log: Path
    process: subprocess.Popen[str] = field(init=False)
    begun: float = field(init=False)  # monotonic seconds, of the last one

    def __post_init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.begun = time.monotonic()
        self.process = self.start()

    def require_running(self) -> None:
        """It is begun again where the container could not be frozen, and nothing was dumped."""
        if self.poll() not in (None, 0) and UNFROZEN in self.said():
            self._begin()
        assert self.poll() is None, self.said()

    def poll(self) -> int | None:
        return self.process.poll()

    def wait(self, timeout_s: float) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise

    def said(self) -> str:
        text = self.log.read_text(errors="replace") if self.log.exists() else "nothing"
        return f"the client, ended with {self.poll()}, has said:\n{text}"


@contextmanager
def checkpoint_under_way(cluster: KubernetesNode, pod: GpuPod, delay_ms: int) -> Iterator[Client]:
    """Its driver is asked for a checkpoint, and takes so long from then on."""
    fault = ("gpustasis", "emulator", "fault")
    cluster.root.run(*fault, "add", "checkpoint", "delay", "--delay-ms", str(delay_ms))
    client = cluster.begin_checkpoint(pod)
    try:
        cluster.wait_for_driver(client)
        yield client
    except BaseException as error:
        error.add_note(client.said())
        raise
    finally:
        cluster.root.run(*fault, "clear")
        client.wait(TIMEOUT_S)


@contextmanager
def runtime_away(cluster: KubernetesNode) -> Iterator[None]:
    """It is killed; what runs under it runs on."""
    cluster.runtime.kill()
    try:
        yield
    finally:
        cluster.runtime.restart()


@contextmanager
def kubelet_away(cluster: KubernetesNode) -> Iterator[None]:
    cluster.kill("kubelet")
    try:
        yield
    finally:
        cluster.start_kubelet()


@contextmanager
def other_kubelet(
    cluster: KubernetesNode, gates: Mapping[str, bool] | None = None, **settings: str
) -> Iterator[None]:
    """The kubelet runs with these feature gates and settings."""
    with kubelet_away(cluster):
        try:
            cluster.start_kubelet(gates, **settings)
            yield
        finally:
            with suppress(FileNotFoundError):  # it did not start
                cluster.kill("kubelet")


def may_be_left_paused(cluster: KubernetesNode) -> bool:
    """By a checkpoint: CRI-O resumes what crun calls paused, and with cgroup v1 crun does so only
    once all tasks stand."""
    runtime = (cluster.runtime.command, cluster.runtime.oci_runtime)
    return runtime == ("crio", "crun") and (GROUPS / "freezer").is_dir()


@contextmanager
def paused(cluster: KubernetesNode, pod: GpuPod) -> Iterator[None]:
    """By somebody, at its runtime. Where it was resumed meanwhile, nothing is left to do."""
    way, container = _PAUSE[cluster.runtime.name], pod.container_id()
    assert container
    done_once_frozen(lambda: cluster.root.run(*way, "pause", container, check=False))
    try:
        yield
    finally:
        cluster.root.run(*way, "resume", container, check=False)


@contextmanager
def setting_put_back(root: EngineRoot) -> Iterator[None]:
    """A dump of that system's which is killed meanwhile leaves a setting of this machine's raised,
    and its note of that is gone with the system's files."""
    note = root.path(_RAISED)
    with note.open() if note.exists() else nullcontext() as opened:
        yield
        if opened is not None and opened.read():
            _USERFAULTFD.write_text("0\n")
