# SPDX-License-Identifier: Apache-2.0
"""CRI-O, which ci/kubernetes builds, on a node: with a registry and emulated GPUs in one system."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

from support.containerd_node import (
    JOB_IMAGE,
    PAUSE_IMAGE,
    REGISTRY,
    end,
    end_all,
    start_registry,
    wait_for,
)
from support.engine_gpu import add_gpus, start_emulator
from support.engine_image import make_archive
from support.engine_root import EngineRoot
from support.oci_image import oci_archive

PROGRAMS = "/opt/kubernetes/bin"
SOCKET = "/run/crio/crio.sock"
_DROP_IN = "/etc/crio/crio.conf.d/10-node.conf"
_REGISTRIES = f'[[registry]]\nlocation = "{REGISTRY}"\ninsecure = true\n'
_POLICY = '{"default": [{"type": "insecureAcceptAnything"}]}'


def _config(oci_runtime: str) -> str:
    return f"""\
[crio.runtime]
default_runtime = "{oci_runtime}"
cgroup_manager = "cgroupfs"
conmon_cgroup = "pod"
pinns_path = "{PROGRAMS}/pinns"
[crio.runtime.runtimes.{oci_runtime}]
runtime_path = "/usr/bin/{oci_runtime}"
runtime_root = "/run/{oci_runtime}"
monitor_path = "/usr/bin/conmon"
[crio.image]
pause_image = "{PAUSE_IMAGE}"
[crio.network]
plugin_dirs = ["/usr/lib/cni"]
[crio.checkpoint_restore]
container_level_enabled = "checkpoint_restore"
"""


class CrioNode:
    """CRI-O in `root`, from start to close(); a context manager. program: tests/programs'
    steady_job, which is what its image runs."""

    name = "CRI-O"
    command = "crio"
    endpoint = f"unix://{SOCKET}"
    oci_runtime = "runc"
    gpu_memory = "512MiB"

    def __init__(self, root: EngineRoot, program: Path) -> None:
        self.root = root
        self._daemons: list[subprocess.Popen[str]] = []
        try:
            root.write(_DROP_IN, _config(self.oci_runtime))
            root.write("/etc/containers/registries.conf.d/node.conf", _REGISTRIES)
            root.write("/etc/containers/policy.json", _POLICY)
            add_gpus(root, memory=self.gpu_memory)
            start_registry(root, self._daemons)
            self._load_images(program)
            self.restart()
        except BaseException:
            self._stop_daemons()
            raise

    def log(self) -> str:
        """What CRI-O has said."""
        return self.root.path("/var/log/crio.log").read_text(errors="replace")

    def kill(self) -> None:
        """As when it crashes: conmon, and what runs under it, live on."""
        self._daemons.remove(self._crio)
        end(self._crio, "KILL")

    def restart(self) -> None:
        """After kill()."""
        with self.root.path("/var/log/crio.log").open("a") as log:
            self._crio = self.root.start(f"{PROGRAMS}/crio", stdout=log, stderr=log)
        self._daemons.append(self._crio)
        wait_for(self._answers, "answer of CRI-O", self.log)

    def boot(self) -> None:
        """After root.reboot(): the GPUs, the registry and CRI-O are started again."""
        for daemon in self._daemons:
            daemon.wait()
        self._daemons.clear()
        start_emulator(self.root, memory=self.gpu_memory)
        start_registry(self.root, self._daemons)
        self.restart()

    def _answers(self) -> bool:
        assert self._crio.poll() is None, self.log()[-4000:]
        done = self.root.run(f"{PROGRAMS}/crio", "status", "info", check=False)
        return done.returncode == 0

    def _load_images(self, program: Path) -> None:
        layer = make_archive(self.root, [program])
        for image, command in (
            (PAUSE_IMAGE, ["/bin/sleep", "1000000"]),
            (JOB_IMAGE, [f"/bin/{program.name}"]),
        ):
            self.root.path("/tmp/image.tar").write_bytes(oci_archive(layer, image, command))
            said = self.root.run("podman", "pull", "--quiet", "oci-archive:/tmp/image.tar").stdout
            self.root.run("podman", "tag", said.split()[-1], image)
        self.root.run("podman", "push", JOB_IMAGE)
        self.root.run("podman", "untag", JOB_IMAGE, JOB_IMAGE)

    def _stop_daemons(self) -> None:
        # CRI-O would wait for its containers, which go with this system.
        end_all(self.root, self._daemons, "KILL")

    def close(self) -> None:
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


class CrioWithCrun(CrioNode):
    """As CrioNode, with crun in place of runc."""

    oci_runtime = "crun"
