# SPDX-License-Identifier: Apache-2.0
"""gpu_memory = "direct", and signals that come while the only copy of GPU memory is on its way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from campaigns.rig import Programs, Rig, await_line, log_path
from gpustasis.criu.find import Criu
from gpustasis.driver import ProcessState
from support.broken_dumps import break_off
from support.direct_memory import await_state, handed_over, slow_copies, slow_down, tasks, worker_of
from support.faults import await_hit

TIMEOUT_S = 60.0


@pytest.fixture
def slow_rig(newest_criu: Criu, programs: Programs, tmp_path: Path) -> Iterator[Rig]:
    with slow_copies(newest_criu, programs, tmp_path) as rig:
        yield rig


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_who_asks_the_worker_to_end_loses_nothing(slow_rig: Rig, number: int) -> None:
    """As whoever stops the service does that criu runs in."""
    rig = slow_rig
    slow_down(rig, "d2h")
    with rig.job(mib=64) as job:
        with handed_over(rig, job, "--leave-running") as (criu, images, worker):
            os.kill(worker, number)
            assert criu.wait(TIMEOUT_S) == 0, log_path(images, "dump").read_text(errors="replace")
        assert tasks(images)[0]["gpu_memory"] == "direct"
        job.run_on()


def test_who_interrupts_recover_loses_nothing(slow_rig: Rig) -> None:
    rig = slow_rig
    with rig.job(mib=64) as job:
        images = rig.images()
        break_off(rig, job, images)
        slow_down(rig, "h2d")
        words = [sys.executable, "-m", "gpustasis", "recover", str(job.pid), "-D", str(images)]
        with subprocess.Popen(words, env=dict(rig.environ)) as recovering:
            await_state(rig, job.pid, ProcessState.RESTORING)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                recovering.send_signal(number)
                time.sleep(0.1)
            assert recovering.wait(TIMEOUT_S) == 0
        job.run_on()


def test_a_task_that_is_stopped_in_the_driver_s_call_loses_nothing(slow_rig: Rig) -> None:
    """Its restore thread takes the signal, and the call returns only when the task is let go: the
    memory is the worker's then, which must live."""
    rig = slow_rig
    rig.emulator.add_fault("checkpoint", "delay", delay_ms=8000)
    with rig.job(mib=32) as job:
        images = rig.images()
        log = log_path(images, "dump")
        criu = rig.start(rig.dump_words(job, images, ["--leave-running"]))
        await_hit(rig.emulator)
        time.sleep(0.3)
        worker = worker_of(images)
        os.kill(job.pid, signal.SIGSTOP)
        await_line(criu, log, "stopped with signal")
        time.sleep(0.5)
        assert criu.poll() is None
        assert worker_of(images) == worker
        os.kill(job.pid, signal.SIGCONT)
        assert criu.wait(TIMEOUT_S) != 0
        assert "is lost" not in log.read_text(errors="replace")
        rig.settle(images)
        job.run_on()


def test_a_task_that_is_stopped_in_the_driver_s_restore_loses_nothing(slow_rig: Rig) -> None:
    """criu does not wait for it, and lets the tree go; the worker, which is handed the memory when
    the task is let go, puts it back."""
    rig = slow_rig
    rig.emulator.add_fault("restore", "delay", delay_ms=8000)
    with rig.job(mib=32) as job:
        images = rig.images()
        log = log_path(images, "dump")
        criu = rig.start(rig.dump_words(job, images, ["--leave-running"]))
        await_hit(rig.emulator)
        time.sleep(0.3)
        worker = worker_of(images)
        os.kill(job.pid, signal.SIGSTOP)
        await_line(criu, log, "stopped with signal")
        criu.wait(TIMEOUT_S)
        assert worker_of(images) == worker
        os.kill(job.pid, signal.SIGCONT)
        assert "is lost" not in log.read_text(errors="replace")
        rig.settle(images)
        assert "runs on" in (images / "gpustasis-undo.log").read_text()
        job.run_on()
