# SPDX-License-Identifier: Apache-2.0
"""Processes to look at: the demo's training program, run so that it goes on until it is told not
to."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gpustasis.errors import CheckpointError

START_SECONDS = 120.0  # 8 GPUs without persistence mode take 3 s to initialise; be generous
ENDLESS_STEPS = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The training program and its kernels, as a file the machine's driver loads.

    path: the executable. module: PTX for a GPU, a shared object for the emulator.
    """

    path: Path
    module: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How much the target holds on the GPU, in MiB, and how wide its layers are."""

    data_mib: int
    pool_mib: int
    hidden: int


SMALL = Load(data_mib=4, pool_mib=4, hidden=32)
MAIN = Load(data_mib=64, pool_mib=128, hidden=256)


class TargetError(CheckpointError):
    """The target program did not start, or ended by itself."""

    exit_code = 11


@contextmanager
def running_target(
    program: Program, load: Load, cgroup_procs: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Start the program, wait until it trains, and kill it at the end.

    cgroup_procs: the cgroup.procs file that it puts itself into before it starts.
    Raises TargetError if it ends, or has not begun to train after START_SECONDS.
    """
    with tempfile.TemporaryDirectory(prefix="gpustasis-target-") as folder:
        mark, log = Path(folder, "mark"), Path(folder, "log")
        arguments = [str(program.path), "--module", str(program.module)]
        arguments += ["--steps", str(ENDLESS_STEPS), "--report-every", str(ENDLESS_STEPS)]
        arguments += ["--data-mib", str(load.data_mib), "--pool-mib", str(load.pool_mib)]
        arguments += ["--hidden", str(load.hidden), "--mark-step", "1", "--mark-file", str(mark)]
        if cgroup_procs is not None:
            join = 'echo $$ >"$0" && exec "$@"'
            arguments = ["/bin/sh", "-c", join, str(cgroup_procs), *arguments]
        with log.open("wb") as output:
            process = subprocess.Popen(
                arguments, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
        try:
            _wait_for_mark(process, mark, log)
            yield process
        finally:
            process.kill()
            process.wait()


def _wait_for_mark(process: subprocess.Popen[bytes], mark: Path, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not mark.exists():
        if process.poll() is not None:
            said = log.read_text(encoding="utf-8", errors="replace").strip()
            raise TargetError(f"the target ended with status {process.returncode}: {said}")
        if time.monotonic() > deadline:
            raise TargetError(f"the target did not start to train within {START_SECONDS:g} s")
        time.sleep(0.02)


def find_dead_pid() -> int:
    """Return the id of a process that has just ended and been reaped."""
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(pid, 0)
    return pid
