# SPDX-License-Identifier: Apache-2.0
"""Faults and delays that the emulator is told to have."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from gpustasis.emulator import Emulator
from gpustasis.errors import EmulatorError
from support.faults import await_hit
from support.job import Job, ended

Call = Callable[..., tuple[int, int]]
PROGRAMS = Path(__file__).resolve().parent / "programs"
TIMEOUT_S = 30.0
SUCCESS, NO_MEMORY, OPERATING_SYSTEM = 0, 2, 304
RUNNING, LOCKED, CHECKPOINTED = range(3)
CYCLE = ["lock", "checkpoint", "restore", "unlock"]
BEFORE = {"lock": RUNNING, "checkpoint": LOCKED, "restore": CHECKPOINTED, "unlock": LOCKED}
AFTER = {"lock": LOCKED, "checkpoint": CHECKPOINTED, "restore": LOCKED, "unlock": RUNNING}


def advance(caller: Call, pid: int, before: str) -> None:
    """Bring a running process to where `before` may be called."""
    for call in {"lock": [], "checkpoint": ["lock"], "restore": ["lock", "checkpoint"]}.get(
        before, ["lock"]
    ):
        assert caller(call, pid)[0] == SUCCESS


def words(call: str) -> list[str]:
    return ["init"] if call == "restore" else []


def await_caller(pid: int) -> None:
    """Until checkpoint_call has asked, and waits for the answer: nothing else of it is a poll."""
    deadline = time.monotonic() + TIMEOUT_S
    while Path(f"/proc/{pid}/syscall").read_text().split()[0] != "7":  # poll
        assert time.monotonic() < deadline, "it does not ask"
        time.sleep(0.001)


def await_answer(pid: int, tid: int) -> None:
    """Until an answer of the target lies there that nobody has taken."""
    name = Path(f"/proc/{pid}/task/{tid}/comm").read_text()
    replies = int(name[4:], 16) & 0x3FFFFF
    pipe = os.open(f"/proc/{pid}/fd/{replies}", os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert select.select([pipe], [], [], TIMEOUT_S)[0], "it does not answer"
    finally:
        os.close(pipe)


@contextmanager
def held(job: Job) -> Iterator[None]:
    """It answers nobody meanwhile."""
    job.signal(signal.SIGSTOP)
    job.await_stopped()
    try:
        yield
    finally:
        job.signal(signal.SIGCONT)


def ask_and_die(argv: list[str], environ: dict[str, str], job: Job, emulator: Emulator) -> None:
    """A caller that cannot take its answer, and dies once the target does what it has asked for."""
    with ended(subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE)) as dying:
        with held(job):
            await_caller(dying.pid)
            dying.send_signal(signal.SIGSTOP)
            seen = os.waitid(os.P_PID, dying.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            assert seen is not None and seen.si_code == os.CLD_STOPPED
        await_hit(emulator)
        dying.kill()


@pytest.mark.parametrize("call", CYCLE)
def test_error_leaves_the_state_and_the_next_try_succeeds(
    vectors: Callable[..., Job], caller: Call, emulator: Emulator, call: str
) -> None:
    job = vectors()
    advance(caller, job.pid, call)
    emulator.add_fault(call, "error", code=801, count=2)
    for _ in range(2):
        assert caller(call, job.pid, *words(call))[0] == 801
        assert caller("state", job.pid) == (SUCCESS, BEFORE[call])
    assert caller(call, job.pid, *words(call))[0] == SUCCESS
    assert caller("state", job.pid) == (SUCCESS, AFTER[call])


@pytest.mark.parametrize("call", CYCLE)
def test_fail_after_has_done_it(
    vectors: Callable[..., Job], caller: Call, emulator: Emulator, call: str
) -> None:
    job = vectors()
    advance(caller, job.pid, call)
    emulator.add_fault(call, "fail_after", code=304)
    assert caller(call, job.pid, *words(call))[0] == OPERATING_SYSTEM
    assert caller("state", job.pid) == (SUCCESS, AFTER[call])


def test_get_state_can_fail(vectors: Callable[..., Job], caller: Call, emulator: Emulator) -> None:
    job = vectors()
    emulator.add_fault("get_state", "error", code=304)
    assert caller("state", job.pid)[0] == OPERATING_SYSTEM
    assert caller("state", job.pid) == (SUCCESS, RUNNING)


def test_out_of_memory_at_checkpoint_loses_nothing(
    vectors: Callable[..., Job], caller: Call, emulator: Emulator
) -> None:
    job = vectors()
    assert caller("lock", job.pid)[0] == SUCCESS
    emulator.add_fault("checkpoint", "oom")
    assert caller("checkpoint", job.pid)[0] == NO_MEMORY
    assert caller("state", job.pid) == (SUCCESS, LOCKED)
    rounds = job.output().count("ok")
    assert caller("unlock", job.pid)[0] == SUCCESS
    job.wait_for("ok", count=rounds + 2)


def test_out_of_memory_at_restore_is_final(
    vectors: Callable[..., Job], caller: Call, emulator: Emulator
) -> None:
    job = vectors()
    advance(caller, job.pid, "restore")
    emulator.add_fault("restore", "oom")
    assert caller("restore", job.pid, "init")[0] == NO_MEMORY
    assert caller("restore", job.pid, "init")[0] == OPERATING_SYSTEM


@pytest.mark.parametrize("call", CYCLE)
@pytest.mark.parametrize(("code", "end"), [(0, 1), (11, -signal.SIGSEGV)])
def test_target_that_dies_is_an_error_of_the_system(
    vectors: Callable[..., Job], caller: Call, emulator: Emulator, call: str, code: int, end: int
) -> None:
    job = vectors()
    advance(caller, job.pid, call)
    emulator.add_fault(call, "die", code=code)
    assert caller(call, job.pid, *words(call))[0] == OPERATING_SYSTEM
    assert job.wait() == end


@pytest.mark.parametrize("call", ["state", *CYCLE])
def test_hang_ends_only_with_the_process(
    vectors: Callable[..., Job],
    caller: Call,
    checkpoint_call: Path,
    emulator: Emulator,
    emulator_environ: dict[str, str],
    call: str,
) -> None:
    job = vectors()
    advance(caller, job.pid, call if call != "state" else "lock")
    emulator.add_fault("get_state" if call == "state" else call, "hang")
    argv = [str(checkpoint_call), call, str(job.pid), *words(call)]
    with ended(subprocess.Popen(argv, env=emulator_environ, stdout=subprocess.PIPE)) as hanging:
        await_hit(emulator)
        time.sleep(0.3)  # it has its answer by then, if there is one
        assert hanging.poll() is None
    again = [str(checkpoint_call), "state", str(job.pid)]
    with ended(subprocess.Popen(again, env=emulator_environ, stdout=subprocess.PIPE)) as hanging:
        await_caller(hanging.pid)
        time.sleep(0.5)
        assert hanging.poll() is None, "another caller has ended it"
        job.signal(signal.SIGKILL)
        out, _ = hanging.communicate(timeout=TIMEOUT_S)
        assert int(out.split()[0]) == OPERATING_SYSTEM


def test_dead_callers_reply_is_not_taken_for_ones_own(
    vectors: Callable[..., Job],
    caller: Call,
    checkpoint_call: Path,
    emulator: Emulator,
    emulator_environ: dict[str, str],
) -> None:
    job = vectors()
    _, tid = caller("tid", job.pid)
    emulator.add_fault("lock", "delay", delay_ms=2000)
    ask_and_die([str(checkpoint_call), "lock", str(job.pid)], emulator_environ, job, emulator)
    await_answer(job.pid, tid)  # the target has locked, and answered nobody
    assert caller("checkpoint", job.pid)[0] == SUCCESS
    assert caller("state", job.pid) == (SUCCESS, CHECKPOINTED)


def test_caller_killed_while_it_waits_for_the_lock_leaves_the_target_running(
    launch_cuda: Callable[..., Job],
    vectors: Callable[..., Job],
    caller: Call,
    checkpoint_call: Path,
    emulator: Emulator,
    emulator_environ: dict[str, str],
) -> None:
    emulator.set("lock_drain_ms", "1000")
    job = vectors()

    def ask(call: str) -> subprocess.Popen[bytes]:
        argv = [str(checkpoint_call), call, str(job.pid)]
        return subprocess.Popen(argv, env=emulator_environ, stdout=subprocess.PIPE)

    with ExitStack() as stack:
        with held(job):  # the next one has asked before the GPU's work is done
            with ended(ask("lock")) as dying:
                await_caller(dying.pid)
            asking = stack.enter_context(ended(ask("state")))
            await_caller(asking.pid)
            begin = time.monotonic()
        out, _ = asking.communicate(timeout=TIMEOUT_S)
    assert out.split() == [b"0", b"0"], "SUCCESS, RUNNING"
    assert time.monotonic() - begin >= 1, "it was answered while the GPU still worked"
    rounds = job.output().count("ok")
    job.wait_for("ok", count=rounds + 2)


def test_desynchronised_driver_hands_out_old_replies(
    vectors: Callable[..., Job],
    caller: Call,
    checkpoint_call: Path,
    emulator: Emulator,
    emulator_environ: dict[str, str],
) -> None:
    emulator.set("desync", "1")
    job = vectors()
    _, tid = caller("tid", job.pid)
    emulator.add_fault("checkpoint", "delay", delay_ms=2000)
    ask_and_die([str(checkpoint_call), "checkpoint", str(job.pid)], emulator_environ, job, emulator)
    await_answer(job.pid, tid)
    assert caller("lock", job.pid)[0] == 401  # the dead caller's: it was not locked


def test_fault_of_one_process_spares_others(
    vectors: Callable[..., Job], caller: Call, emulator: Emulator
) -> None:
    one, other = vectors(), vectors()
    emulator.add_fault("any", "error", code=304, count=0, pid=one.pid)
    assert caller("lock", other.pid)[0] == SUCCESS
    assert caller("lock", one.pid)[0] == OPERATING_SYSTEM
    assert caller("state", one.pid)[0] == OPERATING_SYSTEM
    emulator.clear_faults()
    assert caller("lock", one.pid)[0] == SUCCESS


def test_init_can_fail(
    launch_cuda: Callable[..., Job], vectors: Callable[..., Job], emulator: Emulator
) -> None:
    emulator.add_fault("init", "error", code=803)
    with pytest.raises(AssertionError, match=r"cuInit\(0\): 803"):
        vectors()


@pytest.mark.parametrize(("action", "end"), [("die", 1), ("oom", 1)])
def test_init_can_end_otherwise(
    launch_cuda: Callable[..., Job],
    compile_cuda: Callable[..., Path],
    emulator: Emulator,
    action: str,
    end: int,
) -> None:
    emulator.add_fault("init", action)
    job = launch_cuda([compile_cuda(PROGRAMS / "plain_vectors.c"), "1", "1", "1"])
    assert job.wait() == end
    assert ("cuInit(0): 2" in job.output()) is (action == "oom")


def test_init_can_hang(
    launch_cuda: Callable[..., Job], compile_cuda: Callable[..., Path], emulator: Emulator
) -> None:
    emulator.add_fault("init", "hang")
    job = launch_cuda([compile_cuda(PROGRAMS / "plain_vectors.c"), "1", "1", "1"])
    time.sleep(0.3)
    assert job.alive()
    assert job.output() == ""


def test_times_can_be_set(vectors: Callable[..., Job], caller: Call, emulator: Emulator) -> None:
    job = vectors(50)  # 100 MiB
    emulator.set("d2h_ms_per_gib", "5000")
    emulator.set("h2d_ms_per_gib", "3000")
    assert caller("lock", job.pid)[0] == SUCCESS
    started = time.monotonic()
    assert caller("checkpoint", job.pid)[0] == SUCCESS
    assert 0.48 <= time.monotonic() - started < 30  # with the start of a process
    started = time.monotonic()
    assert caller("restore", job.pid, "init")[0] == SUCCESS
    assert 0.29 <= time.monotonic() - started < 30


@pytest.mark.parametrize(
    ("operation", "action", "says"),
    [
        ("nothing", "error", "no such operation: nothing"),
        ("lock", "nothing", "no such action: nothing"),
        ("lock", "delay", "a delay needs delay_ms"),
    ],
)
def test_bad_fault_is_refused(emulator: Emulator, operation: str, action: str, says: str) -> None:
    with pytest.raises(EmulatorError, match=says):
        emulator.add_fault(operation, action)
    assert emulator.status()["faults"] == []
