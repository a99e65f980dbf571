# SPDX-License-Identifier: Apache-2.0
"""Custom storage: who dies, hangs or fails in an operation, and what is left of it then."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest

from gpustasis.emulator import Emulator
from support.custom_storage import (
    CAPTURE_UNSUPPORTED,
    CHECKPOINTED,
    CHECKPOINTING,
    FAILED,
    ILLEGAL_STATE,
    INVALID_VALUE,
    LOCKED,
    MIB,
    OPERATING_SYSTEM,
    OUT_OF_MEMORY,
    RESTORING,
    SUCCESS,
    UNDEFINED,
    Caller,
    bring,
    goes_on,
    used,
)
from support.driver_states import await_ends
from support.faults import await_hit
from support.job import Job


def test_a_caller_that_dies_in_a_checkpoint_has_ended_it(
    gpus: Emulator, callers: Callable[..., Caller], jobs: Callable[..., Job]
) -> None:
    job = jobs()
    caller, other = callers(), callers()
    bring(caller, job.pid, CHECKPOINTING)
    caller.kill()
    assert other("state", job.pid) == (SUCCESS, CHECKPOINTED)
    assert used(gpus) == [0, 0]
    loaded = other.begin("restore", job.pid)
    assert other("look", loaded, 0, 0) == (SUCCESS, UNDEFINED)


def test_a_caller_that_dies_in_a_restore_leaves_a_failed_process(
    gpus: Emulator, callers: Callable[..., Caller], jobs: Callable[..., Job]
) -> None:
    job = jobs()
    caller, other = callers(), callers()
    bring(caller, job.pid, RESTORING)
    caller.kill()
    assert other("state", job.pid) == (SUCCESS, FAILED)
    assert used(gpus) == [0, 0]
    for call in ("lock", "unlock", "hostcheckpoint", "hostrestore"):
        assert other(call, job.pid) == (ILLEGAL_STATE,)
    for call in ("checkpoint", "restore"):
        assert other(call, job.pid)[0] == ILLEGAL_STATE


@pytest.mark.parametrize("state", [CHECKPOINTING, RESTORING])
def test_a_target_that_dies_takes_nothing_of_the_caller(
    gpus: Emulator, callers: Callable[..., Caller], jobs: Callable[..., Job], state: int
) -> None:
    job, next_job = jobs(), jobs()
    caller = callers()
    operation = bring(caller, job.pid, state)
    job.signal(signal.SIGKILL)
    job.wait()
    caller("look", operation, 0, 0)  # an error, or what was there
    assert caller("complete", operation) == (OPERATING_SYSTEM,)
    assert caller("stale", operation, 0) == (INVALID_VALUE,)
    assert caller("complete", operation) == (INVALID_VALUE,)
    saved = bring(caller, next_job.pid, CHECKPOINTED)
    loaded = caller.begin("restore", next_job.pid)
    assert caller("load", loaded, saved) == (SUCCESS,)
    assert caller("complete", loaded) == (SUCCESS,)
    assert caller("unlock", next_job.pid) == (SUCCESS,)
    goes_on(next_job)
    await_ends(gpus)
    assert used(gpus) == [16 * MIB, 0]


def test_memory_that_was_given_back_can_be_somebody_elses(
    callers: Callable[..., Caller], jobs: Callable[..., Job]
) -> None:
    first = jobs(60)
    caller = callers()
    bring(caller, first.pid, CHECKPOINTED)
    second = jobs(80)  # 160 of 256 MiB: the first one's 120 do not fit any more
    assert caller("restore", first.pid) == (OUT_OF_MEMORY, -1, 0)
    assert caller("restore", first.pid) == (OPERATING_SYSTEM, -1, 0)
    assert caller("state", first.pid) == (SUCCESS, CHECKPOINTED)
    goes_on(second)


def test_a_capturing_stream_ends_an_operation_that_failed(
    callers: Callable[..., Caller], jobs: Callable[..., Job]
) -> None:
    job = jobs()
    caller = callers()
    operation = bring(caller, job.pid, CHECKPOINTING)
    assert caller("capture", operation, 0) == (SUCCESS,)
    assert caller("complete", operation) == (CAPTURE_UNSUPPORTED,)
    assert caller("complete", operation) == (INVALID_VALUE,)
    assert caller("state", job.pid) == (SUCCESS, CHECKPOINTED)


@pytest.mark.parametrize(
    ("call", "action", "code", "after"),
    [
        ("checkpoint", "error", OPERATING_SYSTEM, LOCKED),
        ("checkpoint", "oom", OUT_OF_MEMORY, LOCKED),
        ("checkpoint", "failed", OPERATING_SYSTEM, FAILED),
        ("checkpoint", "fail_after", OPERATING_SYSTEM, CHECKPOINTED),
        ("restore", "error", OPERATING_SYSTEM, CHECKPOINTED),
        ("restore", "oom", OUT_OF_MEMORY, CHECKPOINTED),
        ("restore", "fail_after", OPERATING_SYSTEM, FAILED),
        ("complete", "error", OPERATING_SYSTEM, CHECKPOINTED),
        ("complete", "oom", OUT_OF_MEMORY, CHECKPOINTED),
        ("complete", "failed", OPERATING_SYSTEM, FAILED),
        ("complete", "fail_after", OPERATING_SYSTEM, CHECKPOINTED),
    ],
)
def test_faults(
    gpus: Emulator,
    callers: Callable[..., Caller],
    jobs: Callable[..., Job],
    call: str,
    action: str,
    code: int,
    after: int,
) -> None:
    job = jobs()
    caller = callers()
    before = {"checkpoint": LOCKED, "restore": CHECKPOINTED, "complete": CHECKPOINTING}[call]
    operation = bring(caller, job.pid, before)
    gpus.add_fault(call, action)
    assert caller(call, operation if call == "complete" else job.pid)[0] == code
    assert caller("state", job.pid) == (SUCCESS, after)
    assert caller("complete", 0) == (INVALID_VALUE,)


@pytest.mark.parametrize("call", ["checkpoint", "restore", "complete"])
@pytest.mark.parametrize("action", ["die", "end_thread"])
def test_a_target_that_is_lost_midway(
    gpus: Emulator,
    callers: Callable[..., Caller],
    jobs: Callable[..., Job],
    call: str,
    action: str,
) -> None:
    job = jobs()
    caller = callers()
    before = {"checkpoint": LOCKED, "restore": CHECKPOINTED, "complete": CHECKPOINTING}[call]
    operation = bring(caller, job.pid, before)
    gpus.add_fault(call, action)
    assert caller(call, operation if call == "complete" else job.pid)[0] == OPERATING_SYSTEM


@pytest.mark.parametrize("call", ["checkpoint", "restore", "complete"])
@pytest.mark.parametrize("action", ["hang", "hang_half"])
def test_a_call_that_hangs_ends_with_the_target(
    gpus: Emulator,
    callers: Callable[..., Caller],
    jobs: Callable[..., Job],
    call: str,
    action: str,
) -> None:
    job = jobs()
    caller = callers()
    before = {"checkpoint": LOCKED, "restore": CHECKPOINTED, "complete": CHECKPOINTING}[call]
    operation = bring(caller, job.pid, before)
    gpus.add_fault(call, action)
    caller.send(call, operation if call == "complete" else job.pid)
    await_hit(gpus)  # a target that was killed before it is asked has no driver
    time.sleep(0.5)
    assert not caller.has_answered()
    job.signal(signal.SIGKILL)
    assert caller.answer()[0] == OPERATING_SYSTEM
