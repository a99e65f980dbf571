# SPDX-License-Identifier: Apache-2.0
"""What a container runtime does around a job, without one: an id, a cgroup, the OCI hook."""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpustasis.policy import POLICY_DIRECTORY, STORE_DIRECTORY

HOOK_TIMEOUT_S = 60
_REMOVAL_S = 30.0
# How the installed launcher starts it: no site-packages but the package's own, no user's settings.
_LAUNCHER = """import sys
sys.path.append({path!r})
from gpustasis.oci_hook import main
sys.exit(main())
"""


def hook_words(*arguments: str) -> list[str]:
    """How the hook is run."""
    import gpustasis

    place = str(Path(gpustasis.__file__).resolve().parent.parent)
    return [sys.executable, "-I", "-S", "-c", _LAUNCHER.format(path=place), *arguments]


@dataclass(frozen=True, slots=True)
class Container:
    """An id as engines make them, and the places that belong to it."""

    container_id: str = field(default_factory=lambda: secrets.token_hex(32))

    @property
    def policy(self) -> Path:
        return Path(POLICY_DIRECTORY) / f"{self.container_id}.toml"

    @property
    def mark(self) -> Path:
        return Path(POLICY_DIRECTORY) / f"{self.container_id}.checkpointed"

    @property
    def refusal(self) -> Path:
        return Path(POLICY_DIRECTORY) / f"{self.container_id}.refused"

    @property
    def store(self) -> Path:
        return Path(STORE_DIRECTORY) / self.container_id

    def state(self, status: str, pid: int, annotations: Mapping[str, str]) -> dict[str, Any]:
        """As runc 1.3 and crun 1.28 give it to hooks."""
        known: dict[str, Any] = {
            "ociVersion": "1.2.0",
            "id": self.container_id,
            "status": status,
            "bundle": "/run/bundle",
            "annotations": dict(annotations),
        }
        return known | ({"pid": pid} if pid else {})

    def create(self, pid: int, **annotations: str) -> subprocess.CompletedProcess[str]:
        """Run the hook as at createRuntime; `threads` stands for io.gpustasis.threads."""
        ours = {f"io.gpustasis.{name}": text for name, text in annotations.items()}
        return run_hook(self.state("creating", pid, {"org.example": "x"} | ours))

    def stop(self) -> subprocess.CompletedProcess[str]:
        """Run the hook as at poststop."""
        return run_hook(self.state("stopped", 0, {}))


def run_hook(state: object, *arguments: str) -> subprocess.CompletedProcess[str]:
    """With `state` as JSON on stdin, or as it is if it is text."""
    return subprocess.run(
        hook_words(*arguments),
        input=state if isinstance(state, str) else json.dumps(state),
        capture_output=True,
        text=True,
        env={},
        timeout=HOOK_TIMEOUT_S,
        check=False,
    )


@contextmanager
def container() -> Iterator[Container]:
    """Everything that is made for it is removed at the end. Not the directory of all stores: others
    may be about to make theirs in it, or to put it back."""
    made = Container()
    try:
        yield made
    finally:
        made.policy.unlink(missing_ok=True)
        made.mark.unlink(missing_ok=True)
        made.refusal.unlink(missing_ok=True)
        shutil.rmtree(made.store, ignore_errors=True)


@contextmanager
def cgroup(container_id: str) -> Iterator[Path]:
    """A cgroup named as Podman names a container's; its file cgroup.procs takes processes, which
    must have ended at the end."""
    folder = _hierarchy() / f"libpod-{container_id}.scope"
    folder.mkdir()
    try:
        yield folder
    finally:
        deadline = time.monotonic() + _REMOVAL_S
        while folder.exists():
            with suppress(OSError):  # busy: the kernel is not done with its last process
                folder.rmdir()
            assert time.monotonic() < deadline, f"{folder} stays in use"
            time.sleep(0.01)


def _hierarchy() -> Path:
    """Where this process is in the first hierarchy that takes a new cgroup with a process in it."""
    tried = []
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        left, _, right = line.partition(" - ")
        place, kind = Path(left.split()[4]), right.split()[0]
        if kind == "cgroup2" or (kind == "cgroup" and "freezer" in right.split()[-1].split(",")):
            probe = place / f"gpustasis-probe-{secrets.token_hex(8)}"
            with suppress(OSError):
                probe.mkdir()
                probe.rmdir()
                return place
            tried.append(str(place))
    raise AssertionError(f"no cgroup can be made here; tried {tried}")


@contextmanager
def process_in(made: Container) -> Iterator[int]:
    """The pid of a process in the container's cgroup."""
    with cgroup(made.container_id) as folder, subprocess.Popen(["/bin/sleep", "600"]) as process:
        (folder / "cgroup.procs").write_text(str(process.pid))
        yield process.pid
        process.kill()
