# SPDX-License-Identifier: Apache-2.0
"""The CUDA processes among a rank's tasks, and the driver's lock on them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from functools import partial

from gpustasis.answering import ANSWER_S, TimedOutError, answer_within
from gpustasis.criu.plugin import driver_libraries
from gpustasis.driver import Driver, ProcessState
from gpustasis.errors import CheckpointError, JobError
from gpustasis.streaming.tree import Tree
from gpustasis.task import has_driver_thread, misleading_thread


def cuda_processes(pids: Iterable[int]) -> list[int]:
    """Those that the driver has a thread in. Raises JobError if one of them would mislead it."""
    using = _using(pids)
    for pid in using:
        if misled := misleading_thread(pid):
            raise JobError(f"{misled}; the driver is not asked about it")
    return using


def _using(pids: Iterable[int]) -> list[int]:
    found = []
    for pid in pids:
        with suppress(CheckpointError):  # it has ended
            if has_driver_thread(pid):
                found.append(pid)
    return found


def load_driver() -> Driver:
    """As the plugin would. Raises DriverError."""
    return Driver(driver_libraries(os.environ)[0])


def state_of(driver: Driver, pid: int) -> ProcessState:
    """Of a process that may be stopped, as by SIGSTOP: then the driver does not answer. Raises
    DriverError, TimedOutError among them."""
    return answer_within(ANSWER_S, f"GetState on process {pid}", partial(driver.get_state, pid))


def lock_cuda(driver: Driver, pid: int, timeout_ms: int) -> None:
    """Raises DriverError; TimedOutError if the process may be stopped: then it is unlocked as soon
    as it goes on, and the driver has locked it."""
    given_up = threading.Event()

    def lock() -> None:
        driver.lock(pid, timeout_ms)
        if given_up.is_set():
            driver.unlock(pid)

    try:
        answer_within(timeout_ms / 1000 + ANSWER_S, f"Lock on process {pid}", lock)
    except TimedOutError:
        given_up.set()
        raise


def unlock_cuda(pids: Iterable[int]) -> list[str]:
    """Unlock those that are locked; what is wrong with the others."""
    using = {pid: misleading_thread(pid) for pid in _using(pids)}
    wrong = [f"{misled}; the driver is not asked about it" for misled in using.values() if misled]
    asked = [pid for pid, misled in using.items() if not misled]
    try:
        driver = load_driver() if asked else None
    except CheckpointError as exc:
        return [*wrong, str(exc)]
    for pid in asked:
        assert driver is not None
        try:
            state = state_of(driver, pid)
            if state is ProcessState.LOCKED:
                what = f"Unlock on process {pid}"
                answer_within(ANSWER_S, what, partial(driver.unlock, pid))
            elif state is not ProcessState.RUNNING:
                wrong.append(f"process {pid} is {state.name.lower()}")
        except Exception as exc:  # noqa: BLE001 - the others are unlocked all the same
            wrong.append(str(exc))
    return wrong


def unlock_tree(root: int) -> list[str]:
    """unlock_cuda of a process and all below it. Raises CheckpointError if it has ended."""
    tree = Tree(root)
    try:
        return unlock_cuda(tree.pids)
    finally:
        tree.close()


def require_unlocked(name: str, root: int) -> None:
    """No other program is at work on the CUDA processes of this root and below, or has left them
    so. name: of the rank. Raises JobError, DriverError."""
    tree = Tree(root)
    try:
        using = cuda_processes(tree.pids)
        driver = load_driver() if using else None
        for one in using:
            assert driver is not None
            state = state_of(driver, one)
            if state is not ProcessState.RUNNING:
                raise JobError(f"{name}: process {one} is {state.name.lower()} already")
    finally:
        tree.close()
