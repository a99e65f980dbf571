# SPDX-License-Identifier: Apache-2.0
"""A process that the driver holds is seen by campaigns that ask for it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping

import pytest

from support import driver_states
from support.driver_states import driver_of, not_running
from support.job import Job


def test_who_is_held_by_the_driver(
    gpu_generations: Callable[..., Job],
    emulator_environ: Mapping[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = gpu_generations()
    pids = [job.pid, os.getpid()]  # which uses no CUDA
    driver = driver_of(emulator_environ)
    monkeypatch.setattr(driver_states, "_ANSWER_S", 60)
    assert not_running(driver, pids) == {}
    driver.lock(job.pid, 30_000)
    assert not_running(driver, pids) == {job.pid: "LOCKED"}
    driver.unlock(job.pid)
    assert not_running(driver, pids) == {}
    monkeypatch.setattr(driver_states, "_ANSWER_S", 0.2)
    job.signal(signal.SIGSTOP)
    job.await_stopped()
    assert "no answer within" in not_running(driver, pids)[job.pid]
    job.signal(signal.SIGCONT)
    job.end()
    assert not_running(driver, pids) == {}
