# SPDX-License-Identifier: Apache-2.0
"""Custom storage (CUDA 13.4): Checkpoint and Restore whose caller copies the GPU memory itself."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from gpustasis.emulator import Emulator
from support.custom_storage import (
    CHECKPOINTED,
    CHECKPOINTING,
    ILLEGAL_STATE,
    INVALID_CONTEXT,
    INVALID_VALUE,
    LOCKED,
    MIB,
    NOT_INITIALIZED,
    NOT_SUPPORTED,
    RESTORING,
    RUNNING,
    SUCCESS,
    UNDEFINED,
    Caller,
    bring,
    goes_on,
    resident_bytes,
    save,
    used,
)
from support.job import Job


def test_a_process_goes_on_with_what_the_caller_has_copied(
    gpus: Emulator, callers: Callable[..., Caller], jobs: Callable[..., Job]
) -> None:
    job = jobs(16)
    caller = callers()
    assert caller("lock", job.pid) == (SUCCESS,)
    before = resident_bytes(job.pid)
    code, saved, devices = caller("checkpoint", job.pid)
    assert (code, devices) == (SUCCESS, 1)
    assert caller("state", job.pid) == (SUCCESS, CHECKPOINTING)
    assert caller("entry", saved, 0) == (SUCCESS, 0, 32 * MIB, 0, 2, 32 * MIB)
    assert used(gpus) == [32 * MIB, 0]
    assert caller("save", saved) == (SUCCESS,)
    assert caller("complete", saved) == (SUCCESS,)
    assert caller("state", job.pid) == (SUCCESS, CHECKPOINTED)
    assert used(gpus) == [0, 0]
    assert resident_bytes(job.pid) - before < 2 * MIB
    assert caller("stale", saved, 0) == (INVALID_VALUE,)
    assert caller("complete", saved) == (INVALID_VALUE,)

    loaded = caller.begin("restore", job.pid)
    assert caller("state", job.pid) == (SUCCESS, RESTORING)
    assert used(gpus) == [32 * MIB, 0]
    for offset in (0, 12345678, 32 * MIB - 1):
        assert caller("look", loaded, 0, offset) == (SUCCESS, UNDEFINED)
    assert caller("load", loaded, saved) == (SUCCESS,)
    assert caller("complete", loaded) == (SUCCESS,)
    assert caller("state", job.pid) == (SUCCESS, LOCKED)
    assert caller("unlock", job.pid) == (SUCCESS,)
    goes_on(job)


def test_what_the_caller_does_not_write_is_wrong(
    callers: Callable[..., Caller], jobs: Callable[..., Job]
) -> None:
    job = jobs(pauses=True)  # who looks at once may end before the driver has answered
    caller = callers()
    assert caller("lock", job.pid) == (SUCCESS,)
    save(caller, job.pid)
    loaded = caller.begin("restore", job.pid)
    assert caller("complete", loaded) == (SUCCESS,)
    assert caller("unlock", job.pid) == (SUCCESS,)
    job.signal(signal.SIGUSR1)
    assert job.wait() == 1
    assert "is dbdbdbdb" in job.output()


@pytest.mark.parametrize("state", [CHECKPOINTING, RESTORING])
def test_an_open_operation_refuses_all_but_its_end(
    callers: Callable[..., Caller], jobs: Callable[..., Job], state: int
) -> None:
    job = jobs()
    caller = callers()
    operation = bring(caller, job.pid, state)
    other = callers()
    for one in (caller, other):
        for call in ("lock", "unlock", "hostcheckpoint", "hostrestore"):
            assert one(call, job.pid) == (ILLEGAL_STATE,)
        for call in ("checkpoint", "restore"):
            assert one(call, job.pid)[0] == ILLEGAL_STATE
        assert one("state", job.pid) == (SUCCESS, state)
    if state == RESTORING:
        assert caller("load", operation, 0) == (SUCCESS,)
    assert caller("complete", operation) == (SUCCESS,)
    after = CHECKPOINTED if state == CHECKPOINTING else LOCKED
    assert caller("state", job.pid) == (SUCCESS, after)


@pytest.mark.parametrize(
    ("state", "call", "code", "after"),
    [
        (RUNNING, "checkpoint", ILLEGAL_STATE, RUNNING),
        (RUNNING, "restore", ILLEGAL_STATE, RUNNING),
        (LOCKED, "checkpoint", SUCCESS, CHECKPOINTING),
        (LOCKED, "restore", ILLEGAL_STATE, LOCKED),
        (CHECKPOINTED, "lock", ILLEGAL_STATE, CHECKPOINTED),
        (CHECKPOINTED, "checkpoint", ILLEGAL_STATE, CHECKPOINTED),
        (CHECKPOINTED, "restore", SUCCESS, RESTORING),
        (CHECKPOINTED, "hostrestore", ILLEGAL_STATE, CHECKPOINTED),
        (CHECKPOINTED, "unlock", ILLEGAL_STATE, CHECKPOINTED),
    ],
)
def test_result_and_next_state(
    callers: Callable[..., Caller],
    jobs: Callable[..., Job],
    state: int,
    call: str,
    code: int,
    after: int,
) -> None:
    job = jobs()
    caller = callers()
    if state != RUNNING:
        bring(caller, job.pid, state)
    assert caller(call, job.pid)[0] == code
    assert caller("state", job.pid) == (SUCCESS, after)


def test_what_is_staged_in_the_process_is_not_restored_by_a_caller(
    callers: Callable[..., Caller], jobs: Callable[..., Job]
) -> None:
    job = jobs()
    caller = callers()
    assert caller("lock", job.pid) == (SUCCESS,)
    assert caller("hostcheckpoint", job.pid) == (SUCCESS,)
    assert caller("restore", job.pid) == (ILLEGAL_STATE, -1, 0)
    assert caller("state", job.pid) == (SUCCESS, CHECKPOINTED)
    assert caller("hostrestore", job.pid) == (SUCCESS,)
    assert caller("unlock", job.pid) == (SUCCESS,)
    goes_on(job)


def test_a_caller_needs_a_context_on_every_gpu_of_the_target(
    callers: Callable[..., Caller], two_gpus: Job
) -> None:
    none = callers(-1)
    locker, one, both = callers(), callers(1), callers(2)
    assert locker("lock", two_gpus.pid) == (SUCCESS,)
    assert none("checkpoint", two_gpus.pid) == (NOT_INITIALIZED, -1, 0)
    assert one("checkpoint", two_gpus.pid) == (INVALID_CONTEXT, -1, 0)
    assert one("state", two_gpus.pid) == (SUCCESS, LOCKED)
    saved = save(both, two_gpus.pid)
    assert one("restore", two_gpus.pid) == (INVALID_CONTEXT, -1, 0)
    assert one("state", two_gpus.pid) == (SUCCESS, CHECKPOINTED)
    loaded = both.begin("restore", two_gpus.pid)
    assert both("load", loaded, saved) == (SUCCESS,)
    assert both("complete", loaded) == (SUCCESS,)


def test_a_caller_without_a_context_may_not_even_restore(
    callers: Callable[..., Caller], jobs: Callable[..., Job], gpus: Emulator
) -> None:
    gpus.set("persistence", "1")
    job = jobs()
    saved = bring(callers(), job.pid, CHECKPOINTED)
    assert saved == 0
    assert callers(-1)("restore", job.pid) == (NOT_INITIALIZED, -1, 0)


def test_a_caller_cannot_take_itself(callers: Callable[..., Caller]) -> None:
    caller = callers()
    for call in ("checkpoint", "restore"):
        assert caller(call, caller.process.pid) == (NOT_SUPPORTED, -1, 0)
    assert caller("state", caller.process.pid) == (SUCCESS, RUNNING)


def test_a_process_that_holds_memory_of_another_is_not_checkpointed(
    callers: Callable[..., Caller], jobs: Callable[..., Job]
) -> None:
    job = jobs()
    caller, other = callers(), callers()
    operation = bring(caller, job.pid, CHECKPOINTING)
    assert other("lock", caller.process.pid) == (SUCCESS,)
    assert other("hostcheckpoint", caller.process.pid) == (NOT_SUPPORTED,)
    assert other("checkpoint", caller.process.pid)[0] == NOT_SUPPORTED
    assert other("unlock", caller.process.pid) == (SUCCESS,)
    assert caller("complete", operation) == (SUCCESS,)


def test_a_process_that_was_dumped_by_criu_is_restored_from_custom_storage(
    callers: Callable[..., Caller],
    jobs: Callable[..., Job],
    stock: Callable[..., subprocess.CompletedProcess[str]],
    images: Path,
) -> None:
    job = jobs()
    caller = callers()
    saved = bring(caller, job.pid, CHECKPOINTED)
    dumped = stock("dump", "-t", job.pid, "-D", images, "--ext-unix-sk", "--file-locks")
    assert dumped.returncode == 0, dumped.stdout + dumped.stderr
    job.wait()
    restored = stock("restore", "-d", "-D", images, "--ext-unix-sk", "--file-locks")
    assert restored.returncode == 0, restored.stdout + restored.stderr
    assert caller("state", job.pid) == (SUCCESS, CHECKPOINTED)
    assert caller("hostrestore", job.pid) == (ILLEGAL_STATE,)
    loaded = caller.begin("restore", job.pid)
    assert caller("load", loaded, saved) == (SUCCESS,)
    assert caller("complete", loaded) == (SUCCESS,)
    assert caller("unlock", job.pid) == (SUCCESS,)
    goes_on(job)


def test_a_process_without_memory_has_no_entries(callers: Callable[..., Caller]) -> None:
    caller, target = callers(), callers(0)
    pid = target.process.pid
    assert caller("lock", pid) == (SUCCESS,)
    for call, after in (("checkpoint", CHECKPOINTED), ("restore", LOCKED)):
        code, operation, devices = caller(call, pid)
        assert (code, devices) == (SUCCESS, 0)
        assert caller("complete", operation) == (SUCCESS,)
        assert caller("state", pid) == (SUCCESS, after)
    assert caller("unlock", pid) == (SUCCESS,)
    assert target("state", pid) == (SUCCESS, RUNNING)


def test_filling_can_be_left_out(
    callers: Callable[..., Caller], jobs: Callable[..., Job], gpus: Emulator
) -> None:
    gpus.set("undefined", "0")
    job = jobs()
    caller = callers()
    loaded = bring(caller, job.pid, RESTORING)
    assert caller("look", loaded, 0, 8 * MIB) == (SUCCESS, 0)
    assert caller("load", loaded, 0) == (SUCCESS,)
    assert caller("complete", loaded) == (SUCCESS,)
    assert caller("unlock", job.pid) == (SUCCESS,)
    goes_on(job)
