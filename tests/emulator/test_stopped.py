# SPDX-License-Identifier: Apache-2.0
"""The restore thread works alone: all other threads stopped, wherever they were."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

from support.job import Job

PROGRAMS = Path(__file__).resolve().parent / "programs"
CYCLES = 25


def test_checkpoint_and_restore_with_all_other_threads_stopped(
    launch_cuda: Callable[..., Job],
    compile_cuda: Callable[..., Path],
    emulator_environ: dict[str, str],
) -> None:
    job = launch_cuda([compile_cuda(PROGRAMS / "busy_threads.c", "-pthread"), "6"])
    job.wait_for("round 1\n")
    calls = compile_cuda(PROGRAMS / "stopped_calls.c")
    ended = subprocess.run(
        [calls, str(job.pid), str(CYCLES)],
        env=emulator_environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ended.stdout == "done\n"
    rounds = job.output().count("round ")
    job.wait_for("round ", count=rounds + 2)
    assert "WRONG" not in job.output()
