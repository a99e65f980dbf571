# SPDX-License-Identifier: Apache-2.0
"""Emulated GPUs, our plugin and containers that use them, in an EngineRoot."""

from __future__ import annotations

import re
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpustasis.criu.plugin import plugin_directory
from gpustasis.emulator import find_directory
from support.container_logs import whole_lines
from support.engine_image import IMAGE
from support.engine_root import EngineRoot

DEVICE = "gpustasis.io/gpu=all"
DRIVER = "580.95.05"
TIMEOUT_S = 60.0
POLL_S = 0.1
_STEP = re.compile(r"(\d+) step (\d+) ok")
_EMULATOR = "gpustasis driver emulator:"


def add_gpus(root: EngineRoot, gpus: int = 2, memory: str = "512MiB") -> None:
    """Start an emulator with that many GPUs in `root`, and tell its CRIU and its engines of it."""
    for program in ("runc", "crun", "default"):
        root.write(f"/etc/criu/{program}.conf", f"libdir {plugin_directory()}\n")
    write_config(root)
    start_emulator(root, gpus, memory)
    root.run("gpustasis", "emulator", "cdi", "--output", "/etc/cdi/gpustasis-emulator.json")


def start_emulator(root: EngineRoot, gpus: int = 2, memory: str = "512MiB") -> None:
    """The GPUs themselves, at each start of the system."""
    root.run(
        *["gpustasis", "emulator", "start", "--gpus", str(gpus), "--memory", memory],
        *["--driver", DRIVER, "--rates", "0"],
    )


def install(root: EngineRoot) -> None:
    """Run `gpustasis install` in `root`, in place of what add_gpus wrote by hand."""
    for program in ("runc", "crun", "default"):
        root.path(f"/etc/criu/{program}.conf").unlink()
    root.run("gpustasis", "install")


def write_config(root: EngineRoot, *lines: str) -> None:
    """The plugin's configuration: the emulator's libraries, and `lines`."""
    libraries = find_directory()
    text = [
        f'driver = "{libraries}/libcuda.so.1"',
        f'nvml = "{libraries}/libnvidia-ml.so.1"',
        *lines,
    ]
    root.write("/etc/gpustasis/config.toml", "".join(line + "\n" for line in text))


def start_podman(root: EngineRoot, runtime: str) -> str:
    """Start Podman's service, with that runtime as its default, if it does not run; its URL."""
    place = f"/run/podman/{runtime}.sock"
    if not root.path(place).exists():
        root.path(place).parent.mkdir(exist_ok=True)
        root.serve(
            "podman", "--runtime", runtime, "system", "service", "--time=0", f"unix://{place}"
        )
        deadline = time.monotonic() + TIMEOUT_S
        while not _listens(root.path(place)):
            assert time.monotonic() < deadline, root.path("/tmp/podman.log").read_text()
            time.sleep(POLL_S)
    return f"unix://{place}"


def _listens(place: Path) -> bool:
    """The name of a socket is there before anybody can connect to it."""
    with socket.socket(socket.AF_UNIX) as asking:
        try:
            asking.connect(str(place))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
    return True


@dataclass(frozen=True)
class SteadyContainer:
    """A Podman container that runs tests/programs/steady_job.c, which proves its memory itself:
    it compares every byte with a copy of its own at each step, and says so."""

    root: EngineRoot
    name: str

    @classmethod
    def run(
        cls, root: EngineRoot, name: str, runtime: str, *words: str, **job: int | str
    ) -> SteadyContainer:
        """Start one. words: for `podman run`; job: options of the program, `mib=4`."""
        options = [
            word
            for key, value in job.items()
            for word in (f"--{key.replace('_', '-')}", str(value))
        ]
        root.run(
            *["podman", "--runtime", runtime, "run", "--detach", "--name", name],
            *["--network", "none", "--device", DEVICE, *words, IMAGE],
            *["/bin/steady_job", *options],
        )
        container = cls(root, name)
        if "--log-driver=none" in words:
            container.wait_for_writes()
        else:
            container.run_on(1 + int(job.get("children", 0)))
        return container

    def output(self) -> str:
        return "".join(self._logs())

    def _logs(self) -> tuple[str, str]:
        """What it has written to stdout, and to stderr."""
        done = self.root.run("podman", "logs", self.name)
        return done.stdout, done.stderr

    def wait_for_writes(self, bytes_: int = 100) -> None:
        """For one without a log: wait until its first process has said that much more. It would
        have ended if a byte of its memory had been wrong."""
        before = self._written()
        deadline = time.monotonic() + TIMEOUT_S
        while self._written() < before + bytes_:
            assert time.monotonic() < deadline, f"{self.name} does not run on"
            time.sleep(POLL_S)

    def _written(self) -> int:
        words = ("podman", "container", "inspect", "--format", "{{.State.Pid}}", self.name)
        pid = self.root.run(*words).stdout.strip()
        assert pid != "0", f"{self.name} has ended"
        counters = self.root.path(f"/proc/{pid}/io").read_text()
        return int(re.findall(r"^wchar: (\d+)$", counters, re.MULTILINE)[0])

    def steps(self) -> Counter[int]:
        """Steps said to be right, by process. Fails if the job has said anything else."""
        return Counter({pid: len(numbers) for pid, numbers in self.step_numbers().items()})

    def step_numbers(self) -> dict[int, list[int]]:
        """The numbers of those steps, in the order in which they were said."""
        found: dict[int, list[int]] = {}
        for line in (line for text in self._logs() for line in whole_lines(text)):
            if line.startswith(_EMULATOR) or not line:
                continue
            step = _STEP.fullmatch(line)
            assert step is not None, f"{self.name} says {line!r}"
            found.setdefault(int(step[1]), []).append(int(step[2]))
        return found

    def run_on(self, processes: int = 1, steps: int = 3) -> None:
        """Wait until that many processes have each made more steps, all of them right."""
        before = self.steps()
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            now = self.steps()
            if len([pid for pid in now if now[pid] >= before[pid] + steps]) >= processes:
                return
            assert self.state() == "running", f"{self.name} is {self.state()}:\n{self.output()}"
            assert time.monotonic() < deadline, f"{self.name} does not run on:\n{self.output()}"
            time.sleep(POLL_S)

    def state(self) -> str:
        """As Podman has it: "running" or "exited", say."""
        words = ("podman", "container", "inspect", "--format", "{{.State.Status}}", self.name)
        return self.root.run(*words).stdout.strip()

    def id(self) -> str:
        words = ("podman", "container", "inspect", "--format", "{{.Id}}", self.name)
        return self.root.run(*words).stdout.strip()

    def images(self) -> str:
        """The directory, in the root, of its last checkpoint's images."""
        storage = "/var/lib/containers/storage/overlay-containers"
        return f"{storage}/{self.id()}/userdata/checkpoint"

    def remove(self) -> None:
        self.root.run("podman", "rm", "--force", "--time", "0", "--ignore", self.name)


Steady = Callable[..., SteadyContainer]  # SteadyContainer.run in some root
