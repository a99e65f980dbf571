# SPDX-License-Identifier: Apache-2.0
"""Podman checkpoints and restores one container three times in a row, in place and by archives,
with streams under way and registered memory: each restore goes on exactly where its checkpoint was
made, with every byte as the job has it written down."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpustasis.policy import STORE_DIRECTORY
from support.engine_gpu import Steady, SteadyContainer, write_config
from support.engine_policy import add_hook, remove_hook
from support.engine_root import EngineRoot
from support.kernels import compile_kernels

PROGRAMS = Path(__file__).resolve().parent.parent / "programs"
ROUNDS = 3
MIB = 1 << 20
BIND = ("--volume", "/mnt/shared:/data")
SHAPE: dict[str, int | str] = {
    "mib": 16,
    "children": 1,
    "pinned_kib": 256,
    "registered_kib": 256,
    "streams": 2,
    "module": "/data/steady_kernels.so",
}
parents = pytest.mark.parametrize("parents", ["with-parents", "without-parents"])
runtimes = pytest.mark.parametrize("runtime", ["runc", "crun"])


@pytest.fixture(autouse=True)
def small_chunks(engines: EngineRoot) -> Iterator[None]:
    """More of them stay the same from one checkpoint to the next."""
    add_hook(engines)
    write_config(engines, "chunk_size = 4096")
    yield
    write_config(engines)
    remove_hook(engines)
    shutil.rmtree(engines.path(STORE_DIRECTORY), ignore_errors=True)
    assert not engines.path(STORE_DIRECTORY).exists()


@pytest.fixture(scope="module", autouse=True)
def kernels(shared: Path) -> Path:
    return compile_kernels(PROGRAMS / "steady_kernels.cu", shared)


@pytest.fixture
def container(steady: Steady) -> Callable[[str, str], SteadyContainer]:
    def start(parents: str, runtime: str) -> SteadyContainer:
        words = list(BIND)
        if parents == "with-parents":
            words += ["--annotation", "io.gpustasis.incremental=true"]
        return steady(f"rounds-{parents}-{runtime}", runtime, *words, **SHAPE)

    return start


def require_dumped(found: dict[str, Any], turn: int, parents: str) -> None:
    """That the plugin stored two tasks, on top of the last checkpoint if that was asked for."""
    assert found["result"] == "ok"
    tasks = found["tasks"]
    assert len(tasks) == 2 and all(task["externalized"] for task in tasks)
    assert all(task["staged_bytes"] >= 8 * MIB for task in tasks)
    if parents == "with-parents" and turn > 1:
        assert found["parent"]["chain_length"] == turn - 1
        assert all(task["ref"]["chunks"] > 0 for task in tasks)
    else:
        assert found["parent"] is None
        assert all(task["ref"]["chunks"] == 0 for task in tasks)


def account(root: EngineRoot, images: str, stage: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        (root.path(images) / f"gpustasis-{stage}.json").read_text(encoding="utf-8")
    )
    return found


def require_every_step_once(numbers: dict[int, list[int]]) -> None:
    assert len(numbers) == 2
    for pid, found in numbers.items():
        assert found == list(range(len(found))), f"process {pid} made steps {found}"


@runtimes
@parents
def test_three_rounds_in_place(
    container: Callable[[str, str], SteadyContainer], runtime: str, parents: str
) -> None:
    job = container(parents, runtime)
    for turn in range(1, ROUNDS + 1):
        job.root.run("podman", "container", "checkpoint", "--keep", job.name)
        assert job.state() == "exited"
        require_dumped(account(job.root, job.images(), "dump"), turn, parents)
        job.root.run("podman", "container", "restore", "--keep", job.name)
        assert account(job.root, job.images(), "restore")["result"] == "ok"
        job.run_on(2)
        require_every_step_once(job.step_numbers())


@runtimes
@parents
def test_three_rounds_by_archives(
    container: Callable[[str, str], SteadyContainer],
    shared: Path,
    runtime: str,
    parents: str,
) -> None:
    """Podman removes the container each time and makes it again from the archive, its log as well.
    The store that later checkpoints build on is by its id, which stays."""
    job = container(parents, runtime)
    root = job.root
    archive = f"/mnt/shared/{job.name}.tar"
    try:
        for turn in range(1, ROUNDS + 1):
            root.run("podman", "container", "checkpoint", "--keep", "--export", archive, job.name)
            require_dumped(account(root, job.images(), "dump"), turn, parents)
            next_step = {pid: numbers[-1] + 1 for pid, numbers in job.step_numbers().items()}
            root.run("podman", "rm", job.name)
            root.run(
                *["podman", "--runtime", runtime, "container", "restore", "--keep"],
                *["--import", archive],
            )
            job.run_on(2)
            numbers = job.step_numbers()
            assert numbers.keys() == next_step.keys()
            for pid, found in numbers.items():
                assert len(set(found)) == len(found), f"process {pid} made a step twice: {found}"
                assert next_step[pid] in found, f"process {pid} goes on elsewhere: {found}"
    finally:
        (shared / f"{job.name}.tar").unlink(missing_ok=True)
