# SPDX-License-Identifier: Apache-2.0
"""The driver fails in dumps with gpu_memory = "direct": each call, also that which ends a transfer,
in each way that the emulator knows.

Whatever it does: what was reported as dumped comes back exact, all of it. In a dump that failed,
all run on; only the process that the driver failed may be lost, of those faults alone with which
the driver loses it. Then criu says so, and it makes no step."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

from campaigns import driver_faults
from campaigns.direct_dump import DIRECT, RESTORING, Watch, log_of
from campaigns.driver_faults import REASON_OF_STATE, Fault
from campaigns.rig import CRIU_TIMEOUT_S, Jobs, Rig, criu_errors
from campaigns.steady_job import SteadyJob, is_alive, process_state
from campaigns.tally import Tally
from gpustasis.criu.plugin import Setting
from gpustasis.image.verification import verify_directory
from support.arena import statistics

SHAPE = {"mib": 16, "children": 1, "plain_children": 1}
DUMP_CALLS = ("checkpoint", "complete", "get_state", "lock")
BACK_CALLS = ("complete", "restore", "unlock")
_CONFIG: dict[str, Setting] = {**DIRECT, "driver_timeout_ms": 1000, "lock_timeout_ms": 500}
_HANGING = ("hang", "hang_half")
_GONE = ("die", "failed", "end_thread", "close")  # the process, or the way to it
# The driver has done it and does not say so: the memory that it has handed over is in nobody's
# hands then.
_UNTOLD = ("fail_after", "nonsense", "wrong", "twice")
_LOSING = (
    *((call, action) for call in ("checkpoint", "restore") for action in _UNTOLD),
    # After it nobody can say what the GPUs hold: the driver gives the process up.
    *(("complete", action) for action in ("error", "lie", *_UNTOLD)),
    # From then on each call is taken to have had the answer of the one before it.
    *((call, "twice") for call in ("get_state", "lock", "unlock")),
    ("restore", "oom"),  # final, as with staging
)
_BEFORE = ("get_state", "lock")  # where the process has its memory still, whatever its state
_STANDS_S = 0.3
_USED_EACH = 5  # of the checkpoints of jobs that run on, one in so many is restored
_TRIES = 5  # dumps for one fault that may come too late
_EVERY = ("die", "failed", "end_thread", "close", "nonsense", "wrong", "twice")


def dump_faults(codes: tuple[int, ...], slow: bool) -> Iterator[Fault]:
    """slow: also those that meet a deadline of the plugin's."""
    for call in DUMP_CALLS:
        for code in codes:
            yield Fault(call, "error", code)
        for action in (*_EVERY, *(("hang",) if slow else ())):
            yield Fault(call, action)
    for state in REASON_OF_STATE:
        yield Fault("get_state", "state", state)
    for call in ("lock", "checkpoint", "complete"):
        yield Fault(call, "lie")
        yield Fault(call, "fail_after", 999)
    yield Fault("checkpoint", "oom")
    if slow:
        yield Fault("checkpoint", "hang_half")


def back_faults(codes: tuple[int, ...], slow: bool) -> Iterator[Fault]:
    """As dump_faults, of the way back of a job that runs on."""
    for call in BACK_CALLS:
        for code in codes:
            yield Fault(call, "error", code)
        for action in (*_EVERY, "lie", *(("hang",) if slow else ())):
            yield Fault(call, action)
        yield Fault(call, "fail_after", 999)
    yield Fault("restore", "oom")
    if slow:
        yield Fault("restore", "hang_half")


def restore_faults(codes: tuple[int, ...], slow: bool) -> Iterator[Fault]:
    """As dump_faults, of a restore: what driver_faults has, and the end of a transfer."""
    yield from driver_faults.restore_faults(codes, slow)
    for code in codes:
        yield Fault("complete", "error", code)
    actions = (*_GONE, "nonsense", "wrong", "lie", *(("hang",) if slow else ()))
    for action in actions:
        yield Fault("complete", action)
    yield Fault("complete", "fail_after", 999)


def run(rig: Rig, faults: Iterable[Fault], random: Random, *, back: bool = False) -> Tally:
    """One dump for each fault, which meets the root of the tree or, drawn by `random`, its CUDA
    child. rig: direct_dump.slow_direct's. back: of dumps that leave the job running; the fault
    meets their way back."""
    tally = Tally()
    rig.emulator.clear_faults()  # those that make a dump slow
    with Jobs(lambda: _start(rig)) as jobs:
        for fault in faults:
            late = _is_late(fault, back)
            # Of a root that dies the others end, too.
            lasts = (
                fault.action in (*_GONE, *_HANGING) or (fault.operation, fault.action) in _LOSING
            )
            for _ in range(_TRIES if late else 1):
                job = jobs.get()
                target = job.pids[1] if lasts else random.choice(job.pids[:2])
                outcome = ""
                try:
                    used, left = tally.counts[_USED], tally.counts[_RUNS_ON]
                    is_used = back and used * _USED_EACH <= used + left
                    outcome = _try(rig, job, fault, target, back, is_used)
                    tally.counts[outcome] += 1
                    if outcome not in (_RUNS_ON, _USED, _RESTORED, _TOO_LATE):
                        jobs.drop()
                except AssertionError as failure:
                    what = "on the way back" if back else "dump"
                    tally.failures.append(f"{what}, {fault}, pid {target}: {failure}")
                    jobs.drop()
                finally:
                    rig.emulator.clear_faults()
                    rig.emulator.set("desync", "0")
                if outcome != _TOO_LATE:
                    tally.counts["trials"] += 1
                    break
            else:
                tally.failures.append(f"{fault}: comes too late in {_TRIES} dumps")
    return tally


def _is_late(fault: Fault, back: bool) -> bool:
    """It is put there while the dump is on its way back: that of the checkpoint is the first."""
    return back and fault.operation == "complete"


_TOO_LATE = "too late"
_RUNS_ON = "job runs on"
_USED = "job runs on, and is restored exactly from what was dumped"
_RESTORED = "dumped, and restored exactly"


def _start(rig: Rig) -> SteadyJob:
    log = rig.images().with_suffix(".job")
    return SteadyJob(rig.programs.job, log, rig.environ, **SHAPE)


def _add(rig: Rig, fault: Fault, pid: int) -> None:
    if (
        fault.action == "twice"
    ):  # what comes twice is taken for the next answer, as the real driver's is said to be
        rig.emulator.set("desync", "1")
    rig.emulator.add_fault(fault.operation, fault.action, code=fault.code, pid=pid)


def _dump(
    rig: Rig, job: SteadyJob, images: Path, fault: Fault, target: int, back: bool
) -> tuple[int, bool, bytes, bool]:
    """criu's exit status, whether the fault was met, and the output of the job while it stood, if
    it was seen to stand."""
    late = _is_late(fault, back)
    if not late:
        _add(rig, fault, target)
    words = rig.dump_words(job, images, ["--leave-running"] if back else [])
    criu = rig.start(words, _CONFIG)
    output, stood = b"", False
    if back:
        with Watch(rig, images, job.pids[:2]) as watch:
            while criu.poll() is None and watch.phase() not in ("finish", RESTORING):
                time.sleep(0.001)
            output, stood = job.log.read_bytes(), criu.poll() is None
            while late and criu.poll() is None and watch.phase() != RESTORING:
                time.sleep(0.001)
        if late:
            _add(rig, fault, target)
    status = criu.wait(CRIU_TIMEOUT_S)
    is_met = not rig.emulator.status()["faults"]  # which takes it away
    rig.emulator.clear_faults()
    rig.emulator.set("desync", "0")
    if status == 0:
        kinds = [task["gpu_memory"] for task in statistics(images)["tasks"]]
        assert kinds == ["direct", "direct"], f"GPU memory was dumped otherwise: {kinds}"
    return status, is_met, output, stood


def _try(rig: Rig, job: SteadyJob, fault: Fault, target: int, back: bool, is_used: bool) -> str:
    """is_used: if the job runs on, and criu says that it has dumped, that is restored."""
    images, threads = rig.images(), job.threads()
    status, is_met, output, stood = _dump(rig, job, images, fault, target, back)
    if not is_met:
        assert status == 0, f"the fault was not met: {criu_errors(images, 'dump')}"
        assert _is_late(fault, back), "the fault was not met, and criu has dumped"
        rig.settle(images)
        _require_whole(images, status)
        job.run_on()
        return _TOO_LATE
    if status == 0 and not back:
        return _restore(rig, job, images)
    log = log_of(images)
    reasons = [line for line in log.splitlines() if "Error (gpustasis): cuda_plugin: " in line]
    is_told = any(re.search(rf"\b{target}\b", line) for line in reasons)
    # A task that has died is a reason of criu's own to fail.
    of_criu = fault.action == "die" and "Dump core (pid: " in log
    assert status == 0 or is_told or of_criu, (
        f"criu ended with {status}, and no reason: {criu_errors(images, 'dump')}"
    )
    job.run_on(without=[target])
    if fault.action in _HANGING:
        can_run = fault.operation in (*_BEFORE, "unlock")  # it is not locked yet, or no longer
        steps = job.steps()[target]
        time.sleep(_STANDS_S)
        assert can_run or job.steps()[target] == steps, "its driver hangs, and it makes steps"
        with suppress(ProcessLookupError):
            os.kill(target, signal.SIGKILL)
        rig.settle(images)  # a worker waits for a driver that hangs until the process is gone
        assert can_run or job.steps()[target] == steps, "it was killed, and has made steps"
        _require_whole(images, status)
        job.run_on(without=[target])
        return "lost with a driver that hangs, the others run on"
    rig.settle(images)
    _require_whole(images, status)
    if not is_alive(target) or process_state(target) == "Z":
        assert fault.action == "die", "it has ended"
        return "killed by the driver, the others run on"
    said = _recover(rig, target, images)
    if not said:
        job.run_on()
        if fault.action not in _GONE:
            assert job.threads() == threads, "its threads have changed"
        if not is_used or status != 0 or not stood:
            return _RUNS_ON
        _restore_back(rig, job, images, output)
        return _USED
    can_lose = fault.action in _GONE or (fault.operation, fault.action) in _LOSING
    assert can_lose, f"not brought back: {said}"
    assert is_told, f"criu does not say that {target} is left: {criu_errors(images, 'dump')}"
    if fault.operation not in _BEFORE and ("the memory is lost" in said or "state FAILED" in said):
        steps = job.steps()[target]
        time.sleep(_STANDS_S)
        assert job.steps()[target] == steps, "it lacks memory, and makes steps"
    job.run_on(without=[target])
    if back:  # it has dumped all before: out of that the job comes back
        whole = (images / "inventory.img").exists()
        assert whole, f"lost, and not all was dumped before: {criu_errors(images, 'dump')}"
        _restore_back(rig, job, images, output)
        return "lost by the driver on the way back, which is told; restored from the checkpoint"
    return "lost by the driver, which is told; the others run on"


def _require_whole(images: Path, status: int) -> None:
    """Of what is reported as dumped every byte is right."""
    problems = verify_directory(images).problems if status == 0 else []
    assert not problems, f"reported as dumped, and is not whole: {problems[0]}"


def _restore_back(rig: Rig, job: SteadyJob, images: Path, output: bytes) -> None:
    """A job that was to run on comes back from its checkpoint. output: of then."""
    job.end()
    job.log.write_bytes(output)  # CRIU restores a file only at the size that it had
    restored = rig.restore(images)
    assert restored.status == 0, f"not restored from the checkpoint: {restored.errors}"
    job.run_on()


def _recover(rig: Rig, pid: int, images: Path) -> str:
    """`gpustasis recover`; what was wrong, "" if nothing was."""
    recovered = subprocess.run(
        [sys.executable, "-m", "gpustasis", "recover", str(pid), "-D", str(images)],
        env=dict(rig.environ),
        capture_output=True,
        text=True,
        timeout=CRIU_TIMEOUT_S,
        check=False,
    )
    said = " ".join(recovered.stderr.split()) or "it gives no reason"
    return "" if recovered.returncode == 0 else said


def _restore(rig: Rig, job: SteadyJob, images: Path) -> str:
    job.wait()
    rig.settle(images)
    restored = rig.restore(images)
    assert restored.status == 0, f"reported as dumped, and not restored: {restored.errors}"
    job.run_on()
    return _RESTORED
