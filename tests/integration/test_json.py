# SPDX-License-Identifier: Apache-2.0
"""--json of every command is as the shipped schema says, with real CRIU and the emulator."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import jsonschema
import pytest

from gpustasis.cli import COMMANDS
from gpustasis.criu.find import Criu
from support.job import Job
from support.json_output import check_document, schema

Gpustasis = Callable[..., CompletedProcess[str]]
Generations = Callable[..., Job]

HERE = Path(__file__).resolve()
# Commands that need an engine or keys, and the tests that check what they print.
ELSEWHERE = {
    "peer copy": "python/test_peers.py",
    "peer discard": "python/test_peers.py",
    "peer fetch": "python/test_peers.py",
    "peer list": "python/test_peers.py",
    "peer serve": "python/test_peers.py",
    "plan": "planning/test_command.py",
    "agent cancel": "agent/test_checkpoint.py",
    "agent checkpoint": "agent/test_checkpoint.py",
    "agent run": "agent/test_daemon.py",
    "agent status": "agent/test_checkpoint.py",
    "arena clean": "python/test_arena_commands.py",
    "arena create": "python/test_arena_commands.py",
    "arena discard": "python/test_arena_commands.py",
    "arena list": "python/test_arena_commands.py",
    "drain": "integration/test_ram_tier.py",
    "wait": "python/test_arena_commands.py",
    "podman checkpoint": "runtimes/test_podman_service.py",
    "podman restore": "runtimes/test_podman_service.py",
    "build-image": "runtimes/test_archives.py",
    "containerd base-spec": "install/test_cli.py",
    "containerd checkpoint": "containerd/test_checkpoint.py",
    "containerd list": "containerd/test_checkpoint.py",
    "containerd resume": "containerd/test_checkpoint.py",
    "crio checkpoint": "containerd/test_checkpoint.py",
    "crio list": "containerd/test_checkpoint.py",
    "crio resume": "containerd/test_checkpoint.py",
    "job checkpoint": "jobs/test_ranks.py",
    "job fence": "jobs/test_recovery.py",
    "job give-up": "jobs/test_recovery.py",
    "job list": "jobs/test_ranks.py",
    "job prune": "jobs/test_rank_restores.py",
    "job recoveries": "jobs/test_recovery.py",
    "job replay": "jobs/test_recovery.py",
    "job restore": "jobs/test_ranks.py",
    "job run": "jobs/test_ranks.py",
    "job show": "jobs/test_rank_restores.py",
    "job verify": "jobs/test_rank_restores.py",
    "kubelet checkpoint": "kubernetes/test_checkpoint.py",
    "kubelet list": "python/test_kubelet_archives.py",
    "migrate": "integration/test_streams.py",
    "preempt": "preemption/test_just_in_time.py",
    "rewrap": "python/test_sealed_keys.py",
    "seal": "python/test_seal.py",
    "sign": "python/test_sign.py",
    "unseal": "python/test_seal.py",
}


def commands_of_schema() -> set[str]:
    return {name for name in schema()["properties"]["command"]["enum"] if name}


def test_the_schema_has_every_command() -> None:
    assert {name.split()[0] for name in commands_of_schema()} == set(COMMANDS)


def test_every_command_is_checked() -> None:
    """Here, or in the tests that ELSEWHERE names."""
    text = HERE.read_text()
    here = {name for name in commands_of_schema() if f', "{name}")' in text}
    assert here | set(ELSEWHERE) == commands_of_schema()
    for command, place in ELSEWHERE.items():
        words = ", ".join(f'"{word}"' for word in command.split())
        found = (HERE.parents[1] / place).read_text()
        assert f'"{command}")' in found or f" run({words}, " in found, (command, place)


@pytest.mark.parametrize(
    "document",
    [
        {"version": 2, "command": "plugin-dir", "directory": "/"},
        {"version": 1, "command": "plugin-dir"},
        {"version": 1, "command": "plugin-dir", "directory": 3},
        {"version": 1, "command": "no-such", "directory": "/"},
        {"version": 1, "command": "", "directory": "/"},
        {"version": 1, "command": "verify", "error": {"code": 10, "name": "ImageError"}},
        {"version": 1, "command": "verify", "error": {"code": 0, "name": "", "message": ""}},
    ],
)
def test_the_schema_refuses(document: dict[str, Any]) -> None:
    with pytest.raises((jsonschema.ValidationError, AssertionError)):
        check_document(json.dumps(document), str(document["command"]))


@pytest.mark.one_criu
def test_a_job_s_life(
    criu: Criu, gpustasis: Gpustasis, gpu_generations: Generations, tmp_path: Path
) -> None:
    job = gpu_generations()
    program = ("--json", "--criu", str(criu.root or criu.program))
    store = tmp_path / "store"
    one, two = store / "one", store / "two"
    words = ("checkpoint", str(job.pid), *program, "-D")
    found = check_document(gpustasis(*words, one, "--leave-running").stdout, "checkpoint")
    assert found["statistics"]["tasks"][0]["pid"] == found["pid"] == job.pid
    assert found["directory"] == str(one)
    job.signal(signal.SIGUSR1)
    job.wait_for("intact 0\n")
    check_document(gpustasis(*words, two, "--parent", one).stdout, "checkpoint")
    job.wait()
    again = gpustasis(*words, two)
    assert again.returncode == 3
    assert check_document(again.stdout, "checkpoint")["error"]["code"] == 3

    assert check_document(gpustasis("inspect", two, "--json").stdout, "inspect")["parent"]
    assert check_document(gpustasis("verify", two, "--json").stdout, "verify")["images"] == 1
    assert check_document(gpustasis("diff", one, two, "--json").stdout, "diff")["tasks"]
    listed = check_document(gpustasis("list", store, "--json").stdout, "list")["entries"]
    assert [(one["name"], one["complete"]) for one in listed] == [("one", True), ("two", True)]
    assert listed[1]["parent_id"] == listed[0]["checkpoint_id"]
    out = tmp_path / "flat"
    check_document(gpustasis("flatten", two, "-o", out, "--json").stdout, "flatten")
    words = ("prune", store, "--keep-last", "1", "--dry-run", "--json")
    assert len(check_document(gpustasis(*words).stdout, "prune")["entries"]) == 2

    pidfile = tmp_path / "pid"
    done = gpustasis("restore", "-D", two, *program, "--pidfile", pidfile)
    found = check_document(done.stdout, "restore")
    assert found["pid"] == job.pid == int(pidfile.read_text())
    words = ("recover", str(job.pid), "-D", two, "--json")
    assert check_document(gpustasis(*words).stdout, "recover")["outcome"] == "runs"
    words = ("watch", str(os.getpid()), "--count", "2", "--interval", "0.01", "--json")
    lines = gpustasis(*words).stdout.splitlines()
    assert ["look" in check_document(line, "watch") for line in lines] == [True, True, False]
    job.signal(signal.SIGTERM)
    assert job.wait() == 0


def test_a_host(gpustasis: Gpustasis, tmp_path: Path) -> None:
    check_document(gpustasis("doctor", "--json").stdout, "doctor")
    check_document(gpustasis("plugin-dir", "--json").stdout, "plugin-dir")
    words = ("--root", tmp_path, "--json")
    found = check_document(gpustasis("install", *words).stdout, "install")
    assert {change["action"] for change in found["changes"]} <= {"create", "skip"}
    assert check_document(gpustasis("uninstall", *words).stdout, "uninstall")["changes"]
    assert list(tmp_path.iterdir()) == []


def test_the_emulator(tmp_path: Path) -> None:
    environ = os.environ | {"GPUSTASIS_EMULATOR": str(tmp_path / "socket")}

    def call(*words: str) -> str:
        argv = [sys.executable, "-m", "gpustasis", "emulator", *words]
        return subprocess.run(
            argv, env=environ, capture_output=True, text=True, check=False, timeout=60
        ).stdout

    try:
        assert check_document(call("start", "--json"), "emulator start")["started"]
        check_document(call("status", "--json"), "emulator status")
        check_document(call("env", "--json"), "emulator env")
        check_document(call("cdi", "--json"), "emulator cdi")
        check_document(call("set", "delay_ms", "1", "--json"), "emulator set")
        words = ("fault", "add", "lock", "error", "--json")
        check_document(call(*words), "emulator fault add")
        found = check_document(call("fault", "list", "--json"), "emulator fault list")
        assert len(found["faults"]) == 1
        check_document(call("fault", "clear", "--json"), "emulator fault clear")
        failed = check_document(call("run", "--json", "/no/such"), "emulator run")
        assert failed["error"]["code"] == 15
        assert call("run", "--", "echo", "--json") == "--json\n"
        assert call("run", "echo", "--json") == "--json\n"
    finally:
        check_document(call("stop", "--json"), "emulator stop")
