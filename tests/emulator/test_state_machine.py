# SPDX-License-Identifier: Apache-2.0
"""Every call of the checkpoint API in every state: its result, and the state afterwards."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpustasis.emulator import Emulator
from support.job import Job

Call = Callable[..., tuple[int, int]]
PROGRAMS = Path(__file__).resolve().parent / "programs"
RUNNING, LOCKED, CHECKPOINTED, FAILED = range(4)
SUCCESS, INVALID_VALUE, NO_MEMORY, NOT_INITIALIZED = 0, 1, 2, 3
OPERATING_SYSTEM, ILLEGAL_STATE, NOT_READY, NOT_PERMITTED = 304, 401, 600, 800
WAY = {RUNNING: [], LOCKED: ["lock"], CHECKPOINTED: ["lock", "checkpoint"]}


def bring(caller: Call, pid: int, state: int) -> None:
    for call in WAY[state]:
        assert caller(call, pid)[0] == SUCCESS
    assert caller("state", pid) == (SUCCESS, state)


@pytest.mark.parametrize(
    ("state", "call", "code", "after"),
    [
        (RUNNING, "lock", SUCCESS, LOCKED),
        (RUNNING, "checkpoint", ILLEGAL_STATE, RUNNING),
        (RUNNING, "restore", ILLEGAL_STATE, RUNNING),
        (RUNNING, "unlock", ILLEGAL_STATE, RUNNING),
        (LOCKED, "lock", ILLEGAL_STATE, LOCKED),
        (LOCKED, "checkpoint", SUCCESS, CHECKPOINTED),
        (LOCKED, "restore", ILLEGAL_STATE, LOCKED),
        (LOCKED, "unlock", SUCCESS, RUNNING),
        (CHECKPOINTED, "lock", ILLEGAL_STATE, CHECKPOINTED),
        (CHECKPOINTED, "checkpoint", ILLEGAL_STATE, CHECKPOINTED),
        (CHECKPOINTED, "restore", SUCCESS, LOCKED),
        (CHECKPOINTED, "unlock", ILLEGAL_STATE, CHECKPOINTED),
    ],
)
def test_result_and_next_state(
    vectors: Callable[..., Job], caller: Call, state: int, call: str, code: int, after: int
) -> None:
    job = vectors()
    bring(caller, job.pid, state)
    words = ["init"] if call == "restore" else []
    assert caller(call, job.pid, *words)[0] == code
    assert caller("state", job.pid) == (SUCCESS, after)


def test_memory_is_the_same_after_many_cycles(vectors: Callable[..., Job], caller: Call) -> None:
    job = vectors(4)
    for _ in range(10):
        rounds = job.output().count("ok")
        bring(caller, job.pid, CHECKPOINTED)
        assert caller("restore", job.pid, "init")[0] == SUCCESS
        assert caller("unlock", job.pid)[0] == SUCCESS
        job.wait_for("ok", count=rounds + 2)


def test_calls_wait_and_do_not_fail_while_locked(vectors: Callable[..., Job], caller: Call) -> None:
    job = vectors()
    bring(caller, job.pid, LOCKED)
    rounds = job.output().count("ok")
    time.sleep(0.3)
    assert job.alive()
    assert job.output().count("ok") <= rounds + 1
    assert caller("unlock", job.pid)[0] == SUCCESS
    job.wait_for("ok", count=rounds + 3)


def test_failed_is_the_end(vectors: Callable[..., Job], caller: Call, emulator: Emulator) -> None:
    job = vectors()
    bring(caller, job.pid, LOCKED)
    emulator.add_fault("checkpoint", "failed", code=304)
    assert caller("checkpoint", job.pid)[0] == OPERATING_SYSTEM
    assert caller("state", job.pid) == (SUCCESS, FAILED)
    for call in ("lock", "checkpoint", "restore", "unlock"):
        words = ["init"] if call == "restore" else []
        assert caller(call, job.pid, *words)[0] == ILLEGAL_STATE


@pytest.mark.parametrize("call", ["lock", "checkpoint", "restore", "unlock"])
def test_reserved_bytes_must_be_zero(
    vectors: Callable[..., Job], caller: Call, emulator: Emulator, call: str
) -> None:
    emulator.set("persistence", "1")
    job = vectors()
    assert caller("reserved", job.pid, call)[0] == INVALID_VALUE
    assert caller("state", job.pid) == (SUCCESS, RUNNING)


def test_restore_is_for_callers_with_cuda_of_their_own(
    vectors: Callable[..., Job], caller: Call, emulator: Emulator
) -> None:
    job = vectors()
    bring(caller, job.pid, CHECKPOINTED)
    assert caller("restore", job.pid)[0] == NOT_PERMITTED
    assert caller("state", job.pid) == (SUCCESS, CHECKPOINTED)
    emulator.set("persistence", "1")
    assert caller("restore", job.pid)[0] == SUCCESS


def test_lock_with_a_deadline_gives_up(
    launch_cuda: Callable[..., Job], vectors: Callable[..., Job], caller: Call, emulator: Emulator
) -> None:
    emulator.set("lock_drain_ms", "60000")
    job = vectors()
    started = time.monotonic()
    assert caller("lock", job.pid, 100)[0] == NOT_READY
    assert time.monotonic() - started < 30
    emulator.set("lock_drain_ms", "100")
    assert caller("state", job.pid) == (SUCCESS, RUNNING)
    rounds = job.output().count("ok")
    job.wait_for("ok", count=rounds + 2)
    assert caller("lock", job.pid, 30_000)[0] == SUCCESS


def test_restore_without_memory_is_final(
    vectors: Callable[..., Job], caller: Call, emulator: Emulator
) -> None:
    first = vectors(60)
    bring(caller, first.pid, CHECKPOINTED)
    second = vectors(80)  # 160 of 256 MiB: the first one's 120 do not fit any more
    assert caller("restore", first.pid, "init")[0] == NO_MEMORY
    assert caller("restore", first.pid, "init")[0] == OPERATING_SYSTEM
    assert caller("unlock", first.pid)[0] == ILLEGAL_STATE
    assert caller("state", first.pid) == (SUCCESS, CHECKPOINTED)
    assert second.alive()


def test_a_process_can_checkpoint_itself(
    launch_cuda: Callable[..., Job], compile_cuda: Callable[..., Path]
) -> None:
    job = launch_cuda([compile_cuda(PROGRAMS / "self_checkpoint.c")])
    assert job.wait() == 0, job.output()
    assert job.output().endswith("done\n")


@pytest.mark.parametrize("swap", [False, True])
def test_every_gpu_is_put_where_it_belongs(
    launch_cuda: Callable[..., Job],
    compile_cuda: Callable[..., Path],
    caller: Call,
    emulator: Emulator,
    swap: bool,
) -> None:
    uuids = [gpu["uuid"].removeprefix("GPU-").replace("-", "") for gpu in emulator.status()["gpus"]]
    job = launch_cuda([compile_cuda(PROGRAMS / "two_gpus.c")])
    job.wait_for("ready")
    assert f"GPUs {uuids[0]} {uuids[1]}" in job.output()
    used = [gpu["used_bytes"] for gpu in emulator.status()["gpus"]]
    assert used == [8 << 20, 16 << 20]
    bring(caller, job.pid, CHECKPOINTED)
    pairs = [uuids[0], uuids[1], uuids[1], uuids[0]] if swap else []
    assert caller("restore", job.pid, "init", *pairs[:2])[0] == (INVALID_VALUE if swap else SUCCESS)
    if swap:
        foreign = "12" * 16
        assert caller("restore", job.pid, "init", *pairs, foreign, foreign)[0] == INVALID_VALUE
        assert caller("restore", job.pid, "init", *pairs)[0] == SUCCESS
    assert caller("unlock", job.pid)[0] == SUCCESS
    job.signal(signal.SIGUSR1)
    job.wait_for("intact")
    order = reversed(uuids) if swap else uuids
    assert job.output().splitlines()[-1] == f"GPUs {' '.join(order)} intact"
    used = [gpu["used_bytes"] for gpu in emulator.status()["gpus"]]
    assert used == ([16 << 20, 8 << 20] if swap else [8 << 20, 16 << 20])
