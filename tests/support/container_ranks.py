# SPDX-License-Identifier: Apache-2.0
"""Containers that are ranks of a job, in an EngineRoot with an agent; and what became of them."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpustasis.criu.plugin import plugin_directory, rank_script
from support.engine_gpu import SteadyContainer
from support.engine_policy import add_hook, remove_hook
from support.engine_root import EngineRoot

TIMEOUT_S = 90.0
POLL_S = 0.05
DEFAULT = "/etc/criu/default.conf"
LOG = "/tmp/gpustasis.log"
CONFIG = """
store = "/var/lib/gpustasis/{name}"
socket = "/run/gpustasis/{name}.sock"
http_socket = ""
jobs_look_limit = "{look}s"
"""


class Node:
    """CRIU's configuration names our action script, as an installation has it, and an agent runs.
    From start to close(). installed: our hook is there, and CRIU's configuration is as
    `gpustasis install` has made it."""

    def __init__(
        self,
        root: EngineRoot,
        name: str,
        look_s: int = 60,
        lines: str = "",
        *,
        installed: bool = False,
    ) -> None:
        self.root = root
        self.name = name
        self._config = f"/etc/gpustasis/{name}.toml"
        self._installed = installed
        if not installed:
            add_hook(root)
            root.write(DEFAULT, f"libdir {plugin_directory()}\naction-script {rank_script()}\n")
        root.write(self._config, CONFIG.format(name=name, look=look_s) + lines, 0o600)
        self.agent: subprocess.Popen[str] | None = None

    def start_agent(self) -> None:
        """Returns when it listens at all of its sockets."""
        with open(self.root.path(LOG), "a") as log:
            before = self._times_ready()
            self.agent = self.root.start(
                *("gpustasis", "agent", "run", "--config", self._config), stdout=log, stderr=log
            )
        self.wait_for(lambda: self._is_ready(before))

    def _is_ready(self, before: int) -> bool:
        assert self.agent is not None and self.agent.poll() is None, log_of_agent(self)
        return self._times_ready() > before

    def _times_ready(self) -> int:
        return self.root.path(LOG).read_text().count("ready at ")

    def kill_agent(self) -> None:
        """At once."""
        for pid in self.pids("agent", self._config):
            # One that it was just starting has ended with it, or has another name by now.
            self.root.run("kill", "-KILL", str(pid), check=False)
        if self.agent is not None:
            self.agent.wait(TIMEOUT_S)
            self.agent = None
        self.root.path("/run/gpustasis/ranks.sock").unlink(missing_ok=True)

    def pids(self, *words: str) -> list[int]:
        """As the root numbers them: processes with these words, or parts of them, in their command
        lines."""
        found = []
        for place in self.root.path("/proc").glob("[0-9]*/cmdline"):
            try:
                text = place.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if all(word in text for word in words):
                found.append(int(place.parent.name))
        return found

    def kill_parent(self, pid: int) -> None:
        """Of an action script: criu."""
        stat = self.root.path(f"/proc/{pid}/stat").read_text()
        self.root.run("kill", "-KILL", stat.rpartition(")")[2].split()[1])

    def wait_for(self, what: Callable[[], object]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not what():
            assert time.monotonic() < deadline, log_of_agent(self)
            time.sleep(POLL_S)

    def job(self, *words: str, store: str = "/run/gpustasis/jobs.sock") -> Any:
        """What `gpustasis job` says in JSON."""
        done = self.root.run("gpustasis", "job", *words, "--json", "--store", store)
        return json.loads(done.stdout)

    def close(self) -> None:
        print(log_of_agent(self))  # shown if the test has failed
        self.kill_agent()
        if not self._installed:
            self.root.write(DEFAULT, f"libdir {plugin_directory()}\n")
            remove_hook(self.root)


def rank_annotations(job: str, rank: int, world: int = 2) -> list[str]:
    words = {"job": job, "rank": rank, "world": world}
    return [
        word
        for name, value in words.items()
        for word in ("--annotation", f"io.gpustasis.{name}={value}")
    ]


class Asking(threading.Thread):
    """A command that an administrator has given, beside others."""

    def __init__(self, root: EngineRoot, *words: str) -> None:
        super().__init__(daemon=True)
        self._root, self._words = root, words
        self.done: subprocess.CompletedProcess[str] | None = None
        self.start()

    def run(self) -> None:
        self.done = self._root.run(*self._words, check=False, timeout_s=2 * TIMEOUT_S)

    def ended(self) -> subprocess.CompletedProcess[str]:
        self.join(3 * TIMEOUT_S)
        assert self.done is not None
        return self.done


def ask_all(
    containers: list[SteadyContainer], verb: str, *words: str
) -> list[subprocess.CompletedProcess[str]]:
    """podman container VERB of each, at the same time."""
    asked = [Asking(one.root, "podman", "container", verb, *words, one.name) for one in containers]
    return [one.ended() for one in asked]


def log_of_agent(node: Node) -> str:
    """Its end."""
    return node.root.path(LOG).read_text()[-8000:]


def log_path(container: SteadyContainer) -> Path:
    """Of criu's. Podman tells it while it has no checkpoint of the container under way."""
    return container.root.path(f"{Path(container.images()).parent}/dump.log")


def log_of(container: SteadyContainer) -> str:
    """criu's, of the last dump that failed or not."""
    return log_path(container).read_text(errors="replace")


def root_of(container: SteadyContainer) -> str:
    words = ("podman", "inspect", "--format", "{{.State.Pid}}", container.name)
    return container.root.run(*words).stdout.strip()


def tables(engines: EngineRoot, pid: str) -> str:
    """Of nftables, in the network namespace of a process."""
    return engines.run("nsenter", f"--net=/proc/{pid}/ns/net", "nft", "list", "tables").stdout


class Hold:
    """Another action script, of an administrator's: it keeps criu at this action of one container,
    before ours is run, for as long as it is asked to."""

    def __init__(self, node: Node, container: SteadyContainer, action: str = "post-dump") -> None:
        self._node = node
        self._place = f"/run/hold-{container.name}"
        text = (
            "#!/bin/sh\n"
            f'[ "$CRTOOLS_SCRIPT_ACTION" = {action} ] || exit 0\n'
            f"grep -q {container.id()} /proc/$CRTOOLS_INIT_PID/cgroup || exit 0\n"
            f"echo $PPID >{self._place}.criu\n"
            f"touch {self._place}.reached\n"
            f"while [ -e {self._place} ]; do sleep 0.1; done\n"
        )
        node.root.write(f"{self._place}.sh", text, 0o755)
        node.root.write(self._place, "")
        default = node.root.path(DEFAULT)
        # criu runs the last one first.
        default.write_text(f"{default.read_text()}action-script {self._place}.sh\n")

    def is_reached(self) -> bool:
        return self._node.root.path(f"{self._place}.reached").exists()

    def kill_criu(self) -> None:
        """That has come there. The script outlives it, and is released."""
        criu = self._node.root.path(f"{self._place}.criu").read_text().strip()
        self._node.root.run("kill", "-KILL", criu)
        self.release()

    def release(self) -> None:
        self._node.root.path(self._place).unlink(missing_ok=True)


class EtcdIn:
    """An etcd-server of this machine's, in a root."""

    def __init__(self, root: EngineRoot, program: Path, data: str) -> None:
        self._root, self._data = root, data
        place = root.path("/opt/etcd")
        if not place.exists():
            place.parent.mkdir(exist_ok=True)
            shutil.copy(program, place)
        self.url = "http://127.0.0.1:23790"
        self._process: subprocess.Popen[str] | None = None
        self.start()

    def start(self) -> None:
        """Again, and until it answers."""
        peer = "http://127.0.0.1:23800"
        with open(self._root.path("/tmp/etcd.log"), "a") as log:
            self._process = self._root.start(
                *("/opt/etcd", "--data-dir", self._data, "--listen-client-urls", self.url),
                *("--advertise-client-urls", self.url, "--listen-peer-urls", peer),
                *("--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"),
                stdout=log,
                stderr=log,
            )
        words = ("gpustasis", "job", "list", "--store", self.url)
        deadline = time.monotonic() + TIMEOUT_S
        while self._root.run(*words, check=False).returncode != 0:
            said = self._root.path("/tmp/etcd.log").read_text()[-4000:]
            assert self._process.poll() is None and time.monotonic() < deadline, said
            time.sleep(POLL_S)

    def kill(self) -> None:
        """At once."""
        if self._process is not None:
            self._root.run("pkill", "-KILL", "-x", "etcd", check=False)
            self._process.wait(TIMEOUT_S)
            self._process = None
