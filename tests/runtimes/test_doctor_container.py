# SPDX-License-Identifier: Apache-2.0
"""`gpustasis doctor --container`: what hinders a checkpoint is brought about in a real
container."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.engine_gpu import Steady
from support.engine_image import IMAGE
from support.engine_root import EngineRoot

PROGRAMS = Path(__file__).resolve().parent.parent / "programs"
WAIT = ["/bin/sh", "-c", "mkfifo /tmp/f; exec 3<>/tmp/f; read x <&3"]
HOOK = """#!{python}
import json, os, sys
bundle = json.load(sys.stdin)["bundle"]
root = json.load(open(bundle + "/config.json"))["root"]["path"]
open(os.path.join(root, "data/late"), "w").close()
os.execvp("mount", ["mount", "--bind", "/etc/hostname", os.path.join(root, "data/late")])
"""
Findings = dict[str, list[dict[str, Any]]]


def doctor(root: EngineRoot, name: str, **environ: str) -> tuple[int, Findings]:
    done = root.run(
        "gpustasis", "doctor", "--json", "--container", name, check=False, environ=environ
    )
    found: Findings = {}
    for item in json.loads(done.stdout)["findings"] if done.stdout else []:
        found.setdefault(item["name"], []).append(item)
    return done.returncode, found


def until(root: EngineRoot, name: str, holds: Callable[[Findings], bool]) -> Findings:
    """Look again until the container's program has got so far."""
    deadline = time.monotonic() + 60
    while not holds(found := doctor(root, name)[1]):
        assert time.monotonic() < deadline, found
        time.sleep(0.2)
    return found


def problem(found: Findings, name: str) -> str:
    texts = [item["text"] for item in found[name] if item["status"] == "problem"]
    assert len(texts) == 1, found[name]
    return str(texts[0])


@pytest.fixture
def idle(engines: EngineRoot) -> Iterator[Callable[..., str]]:
    """idle(*words) -> name: a container that waits, made with these words for `podman run`."""
    names: list[str] = []

    def run(*words: str, command: list[str] = WAIT) -> str:
        names.append(f"idle-{len(names)}")
        engines.run(
            *["podman", "--runtime", "runc", "run", "--detach", "--name", names[-1]],
            *["--network", "none", *words, IMAGE, *command],
        )
        return names[-1]

    yield run
    for name in names:
        engines.run("podman", "rm", "--force", "--time", "0", name)


@pytest.mark.parametrize("runtime", ["runc", "crun"])
def test_a_gpu_container_that_can_be_checkpointed(
    engines: EngineRoot, steady: Steady, runtime: str
) -> None:
    container = steady(f"fine-{runtime}", runtime, mib=8, children=1)
    for name in (container.name, container.id()[:12]):
        status, found = doctor(engines, name)
        assert [item["status"] for items in found.values() for item in items] == ["ok"] * len(
            [item for items in found.values() for item in items]
        ), found
        assert status == 0
    assert len(found["driver state"]) == 2
    assert "2 processes" in found["container"][0]["text"]


def test_one_that_is_not_there(engines: EngineRoot) -> None:
    for name, said in (("no-such", "neither Podman"), ("0123456789ab", "no process is in")):
        done = engines.run("gpustasis", "doctor", "--container", name, check=False)
        assert done.returncode == 3
        assert said in done.stderr


def test_a_podman_that_warns_is_understood(engines: EngineRoot, steady: Steady) -> None:
    container = steady("warned", "runc", mib=4)
    # The real one, with a warning before its answer: which one Podman has depends on the host.
    place = "/usr/local/bin/podman"
    engines.write(
        place, '#!/bin/sh\necho "level=warning msg=a-warning" >&2\nexec /usr/bin/podman "$@"\n'
    )
    engines.path(place).chmod(0o755)
    try:
        warned = engines.run("podman", "container", "inspect", container.name)
        assert "a-warning" in warned.stderr
        status, found = doctor(engines, container.name)
    finally:
        engines.path(place).unlink()
    assert status == 0
    assert container.name in found["container"][0]["text"]


def test_a_paused_one_is_not_waited_for(engines: EngineRoot, steady: Steady) -> None:
    container = steady("paused", "runc", mib=4)
    engines.run("podman", "pause", container.name)
    status, found = doctor(engines, container.name)
    engines.run("podman", "unpause", container.name)
    assert status == 0
    assert "it is paused" in found["container"][0]["text"]
    assert "stands still" in found["driver state"][0]["text"]


def test_a_process_that_a_tool_left_locked(engines: EngineRoot, steady: Steady) -> None:
    container = steady("locked", "runc", mib=4)
    pid = engines.run("podman", "inspect", "--format", "{{.State.Pid}}", container.name).stdout
    python = (
        "from gpustasis.driver import Driver; from gpustasis.criu.plugin import driver_libraries"
    )
    code = f"{python}; d = Driver(driver_libraries()[0]); d.init(); d.%s"
    engines.run(sys.executable, "-c", code % f"lock({pid.strip()}, 5000)")
    status, found = doctor(engines, container.name)
    engines.run(sys.executable, "-c", code % f"unlock({pid.strip()})")
    assert status == 20
    assert "is locked: a dump or a tool has left it so" in problem(found, "driver state")


def test_a_mount_by_a_hook(engines: EngineRoot, idle: Callable[..., str]) -> None:
    """As NVIDIA's legacy hook does it. CRIU fails with it."""
    engines.write("/opt/late-mount", HOOK.format(python="/usr/bin/env python3"), mode=0o755)
    hook = {
        "version": "1.0.0",
        "hook": {"path": "/opt/late-mount"},
        "when": {"annotations": {"^test.late-mount$": "yes"}},
        "stages": ["createContainer"],
    }
    engines.write("/usr/share/containers/oci/hooks.d/late.json", json.dumps(hook))
    name = idle("--annotation", "test.late-mount=yes")
    status, found = doctor(engines, name)
    assert status == 20
    said = problem(found, "mounts")
    assert said.startswith("/data/late (")
    assert "is in no config.json" in said
    assert engines.run("podman", "container", "checkpoint", name, check=False).returncode != 0


def test_io_uring(engines: EngineRoot, idle: Callable[..., str]) -> None:
    name = idle(
        *["--security-opt", "seccomp=unconfined", "--volume", "/mnt/shared:/data"],
        command=["/data/undumpable", "ring"],
    )
    found = until(engines, name, lambda f: "open files" in f)
    said = problem(found, "open files")
    assert "uses io_uring, which" in said or "uses perf events, which" in said
    assert engines.run("podman", "container", "checkpoint", name, check=False).returncode != 0


@pytest.fixture(autouse=True)
def undumpable(shared: Path, compile_c: Callable[..., Path]) -> None:
    """tests/programs/undumpable.c as /mnt/shared/undumpable."""
    if not (shared / "undumpable").exists():
        program = compile_c(PROGRAMS / "undumpable.c", "-static")
        shutil.copy(program, shared / "undumpable")


def test_a_process_with_gpu_files_that_it_has_not_inherited(
    engines: EngineRoot, idle: Callable[..., str]
) -> None:
    engines.run("sh", "-c", "[ -e /dev/nvidia0 ] || mknod -m 666 /dev/nvidia0 c 1 3")
    script = "exec 5<>/dev/nvidia0; mkfifo /tmp/f; exec 3<>/tmp/f; read x <&3"
    name = idle("--device", "/dev/nvidia0", command=["/bin/sh", "-c", script])
    found = until(engines, name, lambda f: any(item["remedy"] for item in f["GPU processes"]))
    assert "has a GPU's files open and does not use CUDA" in problem(found, "GPU processes")


def test_too_little_memory_to_stage(engines: EngineRoot, steady: Steady) -> None:
    container = steady("small", "runc", "--memory", "96m", mib=32)
    status, found = doctor(engines, container.name)
    assert status == 20
    assert "may not fit" in problem(found, "memory")
