# SPDX-License-Identifier: Apache-2.0
"""Podman, unchanged, with runc and with crun, checkpoints containers that use GPUs. The job in them
compares every byte of its memory, and would say if one were wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.engine_gpu import Steady, SteadyContainer, write_config
from support.engine_root import EngineRoot

MIB = 1 << 20
RUNTIMES = ["runc", "crun"]


def dumped(container: SteadyContainer) -> dict[str, Any]:
    """The plugin's account of the last dump, which is still in Podman's storage."""
    path = container.root.path(container.images()) / "gpustasis-dump.json"
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_in_place(steady: Steady, runtime: str) -> None:
    """Several CUDA processes, one without CUDA, and a directory of the host."""
    container = steady(
        f"place-{runtime}",
        runtime,
        *["--volume", "/mnt/shared:/data"],
        mib=8,
        pinned_kib=256,
        children=2,
        plain_children=1,
    )
    root = container.root
    root.run("podman", "container", "checkpoint", container.name)
    assert container.state() == "exited"
    tasks = dumped(container)["tasks"]
    assert len(tasks) == 3 and all(task["externalized"] for task in tasks)
    assert all(task["staged_bytes"] >= 8 * MIB for task in tasks)
    root.run("podman", "container", "restore", container.name)
    container.run_on(4)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_left_running_again_and_again(steady: Steady, runtime: str) -> None:
    container = steady(f"leave-{runtime}", runtime, mib=8)
    root = container.root
    for _ in range(2):
        root.run("podman", "container", "checkpoint", "--leave-running", container.name)
        assert container.state() == "running"
        container.run_on()
    root.run("podman", "container", "checkpoint", container.name)
    root.run("podman", "container", "restore", container.name)
    container.run_on()


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_export_and_import_elsewhere(
    steady: Steady, elsewhere: EngineRoot, shared: Path, runtime: str
) -> None:
    bind = ("--volume", "/mnt/shared:/data")
    container = steady(f"export-{runtime}", runtime, *bind, mib=8, children=1)
    archive = f"/mnt/shared/{runtime}.tar.zst"
    container.root.run("podman", "container", "checkpoint", "--export", archive, container.name)
    container.remove()
    there = SteadyContainer(elsewhere, container.name)
    try:
        elsewhere.run("podman", "--runtime", runtime, "container", "restore", "--import", archive)
        there.run_on(2)
    finally:
        there.remove()
        (shared / f"{runtime}.tar.zst").unlink()


def test_ways_of_storing_may_change(steady: Steady) -> None:
    """Podman uses one image directory again and again: what an earlier dump left there is not taken
    for a later one's."""
    container = steady("change", "runc", mib=8, children=1)
    root = container.root
    try:
        root.run("podman", "container", "checkpoint", "--leave-running", container.name)
        write_config(root, "externalize = false")
        root.run("podman", "container", "checkpoint", container.name)
        root.run("podman", "container", "restore", container.name)
        container.run_on(2)
    finally:
        write_config(root)
