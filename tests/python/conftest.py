# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests of recover, and of copies on a neighbour.

driver_calls  driver_calls(job, "lock", "checkpoint", ...): as another tool would call the driver
driver_state  driver_state(job) -> "CHECKPOINTED": what the driver says of it
abandon       abandon(job, images, with_worker=True): a dump whose criu dies, all memory dropped;
              with_guardians=False: who puts the memory back is left; drops=False: none was dropped
nodes         two nodes on this host, by their configurations
keeper        the copies of the one that keeps them, while it takes more
cri_path      of a runtime's socket
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from gpustasis.peers.copies import Copies
from gpustasis.recovery import GUARDIAN_COMM, WORKER_COMM
from gpustasis.runtimes import cri_containers
from gpustasis.runtimes.instance import wait
from gpustasis.task import find_users
from support.checkpoint import Checkpointer
from support.criu_roots import preferred_criu
from support.job import TIMEOUT_S, Job
from support.peers import Nodes, make_nodes, serving

DriverCalls = Callable[..., None]
Abandon = Callable[..., None]

# argv: pid, then methods of Driver: as another tool would call them.
CALLER = """
import sys
from gpustasis.driver import Driver
driver, pid = Driver(), int(sys.argv[1])
driver.init()
for name in sys.argv[2:]:
    getattr(driver, name)(pid, *([5000] if name == "lock" else []))
"""


@pytest.fixture
def driver_calls(emulator_environ: dict[str, str]) -> DriverCalls:
    """Make calls of the driver on a job: driver_calls(job, "lock", "checkpoint", ...)."""

    def call(job: Job, *names: str) -> None:
        argv = [sys.executable, "-c", CALLER, str(job.pid), *names]
        subprocess.run(argv, env=emulator_environ, check=True, timeout=60, capture_output=True)

    return call


@pytest.fixture
def driver_state(emulator_environ: dict[str, str]) -> Callable[[Job], str]:
    """The driver's state of a job, by its name."""
    code = (
        "import sys; from gpustasis.driver import Driver; "
        "print(Driver().get_state(int(sys.argv[1])).name)"
    )

    def ask(job: Job) -> str:
        argv = [sys.executable, "-c", code, str(job.pid)]
        ended = subprocess.run(
            argv, env=emulator_environ, check=True, timeout=60, capture_output=True, text=True
        )
        return ended.stdout.strip()

    return ask


@pytest.fixture
def abandon(emulator_environ: dict[str, str], tmp_path: Path) -> Abandon:
    """abandon(job, images, with_worker=True): begin a dump and kill criu, and the worker that would
    undo it, when all GPU memory is in the image and out of the task. One CRIU will do here."""
    checkpointer = Checkpointer(preferred_criu(), emulator_environ)
    reached = tmp_path / "reached"
    script = tmp_path / "script"
    script.write_text(
        '#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" = post-dump ] || exit 0\n'
        f"touch {reached}\nexec sleep 60\n"
    )
    script.chmod(0o755)

    config = tmp_path / "found-locked.toml"

    def begin_and_kill(
        job: Job,
        images: Path,
        *,
        with_worker: bool = True,
        with_guardians: bool = True,
        drops: bool = True,
    ) -> None:
        config.write_text(f'found_locked = "dump"\nexternalize = {str(drops).lower()}\n')
        argv, environ = checkpointer.dump_command(
            job, images, "--action-script", str(script), config=config
        )
        with subprocess.Popen(
            argv, env=environ, stdin=subprocess.DEVNULL, start_new_session=True
        ) as criu:
            deadline = time.monotonic() + TIMEOUT_S
            while not reached.exists():
                assert criu.poll() is None, (images / "dump.log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.01)
            names = [WORKER_COMM, GUARDIAN_COMM] if with_guardians else [WORKER_COMM]
            workers = find_users(images, *names)
            assert workers, "the plugin has no worker: what is tested here cannot come about"
            if not with_worker:
                workers.clear()
            with ExitStack() as held:
                ends = [os.pidfd_open(worker) for worker in workers]
                for end in ends:
                    held.callback(os.close, end)
                for worker in workers:
                    os.kill(worker, signal.SIGKILL)
                os.killpg(criu.pid, signal.SIGKILL)
                for end in ends:  # killed is not yet ended: until then it has the directory open
                    assert wait(TIMEOUT_S, end), "a worker does not die"
        reached.unlink()

    return begin_and_kill


@pytest.fixture
def nodes(tmp_path: Path, arena: Path) -> Nodes:
    arena.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return make_nodes(tmp_path / "certificates", arena.parent / "peers")


@pytest.fixture
def keeper(nodes: Nodes) -> Iterator[Copies]:
    with serving(nodes.keeper) as server:
        yield server.copies


@pytest.fixture
def cri_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """pytest's own directories may be too long for one."""
    directory = Path("/run") / f"gpustasis-test-{os.getpid()}"
    directory.mkdir(mode=0o700)
    monkeypatch.setattr(cri_containers, "LOCKS", directory / "run/locks")
    yield directory / "cri.sock"
    shutil.rmtree(directory)
