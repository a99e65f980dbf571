# SPDX-License-Identifier: Apache-2.0
"""The agent checkpoints Podman's containers, by name and by the clock, for real."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from support.engine_gpu import Steady, start_podman
from support.engine_root import EngineRoot
from support.json_output import check_document

CONFIG = """
store = "/mnt/shared/agent"
podman = "{url}"
memory_reserve = "0"
disk_reserve = "0"
http_socket = ""
jobs_socket = ""

[[target]]
name = "job"
container = "podman:agent-job"
interval = "1s"
keep_last = 2
"""
TIMEOUT_S = 60.0


def ask(root: EngineRoot, *words: str, check: bool = True) -> dict[str, Any]:
    said = root.run("gpustasis", "agent", *words, "--json", check=check).stdout
    return check_document(said, f"agent {words[0]}")


def serve_agent(root: EngineRoot) -> None:
    """Returns when it listens: its socket is there before that, and after one that was killed."""
    log = root.path("/tmp/gpustasis.log")

    def times_ready() -> int:
        said = log.read_text() if log.exists() else ""
        return said.count("ready at /run/gpustasis/agent.sock")

    before, deadline = times_ready(), time.monotonic() + TIMEOUT_S
    root.serve("gpustasis", "agent", "run")
    while times_ready() == before:
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


@pytest.mark.parametrize("runtime", ["crun"])
def test_a_container(steady: Steady, engines: EngineRoot, shared: Path, runtime: str) -> None:
    url = start_podman(engines, runtime)
    engines.write("/etc/gpustasis/agent.toml", CONFIG.format(url=url), 0o600)
    container = steady("agent-job", runtime, "--log-driver=none", mib=8)
    serve_agent(engines)
    found = ask(engines, "checkpoint", "podman:agent-job")["operation"]
    assert found["state"] == "done", found
    figures = found["figures"]
    assert figures["gpu_bytes"] >= 8 << 20 and figures["emulated"]
    assert figures["downtime_s"] > 0
    container.wait_for_writes()

    none = ask(engines, "checkpoint", "podman:nobody", check=False)
    assert "podman container nobody: no container" in none["operation"]["error"]

    deadline = time.monotonic() + TIMEOUT_S
    done: list[dict[str, Any]] = []
    while len(done) < 3:
        assert time.monotonic() < deadline, engines.path("/tmp/gpustasis.log").read_text()
        time.sleep(0.2)
        operations = ask(engines, "status")["operations"]
        done = [one for one in operations if one["target"] == "job" and one["state"] == "done"]
    engines.path("/etc/gpustasis/agent.toml").unlink()
    last = ask(engines, "checkpoint", "podman:agent-job", "--stop")["operation"]
    assert last["state"] == "done", last
    assert container.state() == "exited"
    archives = sorted((shared / "agent/targets/job").glob("*.tar"))
    assert 1 <= len(archives) <= 2, archives
    said = engines.run("gpustasis", "verify", "--json", last["place"]).stdout
    assert json.loads(said)["problems"] == []
    engines.run("podman", "rm", "--force", container.name)
    engines.run("gpustasis", "podman", "--url", url, "restore", "--import", last["place"])
    container.wait_for_writes()
