# SPDX-License-Identifier: Apache-2.0
"""The driver fails: each call of a dump and of a restore, in each way that the emulator knows.

A dump must fail with a sentence that names call, process and CUresult, and leave the job running
and exact. Where the driver has given one process up, hangs in it, has died with it or no longer
answers, that may be impossible for this one: the others of its tree must run on and be exact, and
what hangs is left alone until it is killed. A restore must fail, say why, and leave nothing alive.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from random import Random

from campaigns import damage
from campaigns.rig import Jobs, Rig, Run
from campaigns.steady_job import SteadyJob, process_state, restore_thread
from campaigns.tally import Tally
from gpustasis.criu.plugin import Setting

CODES = (1, 2, 3, 201, 304, 401, 600, 800, 801, 803, 999)  # those that users have met, and unknown
_CALLS = {
    "init": "cuInit",
    "get_state": "cuCheckpointProcessGetState",
    "lock": "cuCheckpointProcessLock",
    "checkpoint": "cuCheckpointProcessCheckpoint",
    "restore": "cuCheckpointProcessRestore",
    "unlock": "cuCheckpointProcessUnlock",
}
DUMP_CALLS = ("get_state", "lock", "checkpoint")
UNDO_CALLS = ("restore", "unlock")  # those of a dump that leaves the job running
RESTORE_CALLS = ("get_state", "restore", "unlock")
# The driver has unlocked the job and then fails or answers noise: its state says so, and counts.
_DONE_ALL_THE_SAME = ("fail_after", "nonsense", "wrong")
# What has no answer meets the deadline; what has one must not, on a machine that is busy.
_SHORT = {"driver_timeout_ms": 3000, "lock_timeout_ms": 3000}
_LONG = {"driver_timeout_ms": 30_000, "lock_timeout_ms": 30_000}
_SILENT = ("hang", "hang_half", "end_thread", "close")


@dataclass(frozen=True, slots=True)
class Fault:
    operation: str
    action: str
    code: int | None = None
    delay_ms: int = 0

    def __str__(self) -> str:
        return f"{self.operation} {self.action}" + ("" if self.code is None else f" {self.code}")


# What a process does not come back from by itself, or not always.
LASTING = ("die", "failed", "hang", "hang_half", "end_thread", "close")
STATE_FAILED = 3
REASON_OF_STATE = {
    STATE_FAILED: "the driver has given the process up (state FAILED)",
    4: "is being checkpointed or restored by somebody else",
    5: "is being checkpointed or restored by somebody else",
    6: "is in driver state 6, which this version does not know",
    255: "is in driver state 255, which this version does not know",
}
_REASON_OF_LIE = {
    "lock": "the driver says it locked the process, and that it is not",
    "checkpoint": "the driver says it checkpointed the process, and that it is not",
    "restore": f"{_CALLS['unlock']} for pid",  # refused: it is not the time for that yet
    "unlock": "the driver says it unlocked the process, and that it is not",
}
_BLOCKED_S = 10.0
_GARBLED = ("nonsense", "wrong")  # replies


def dump_faults(codes: tuple[int, ...], slow: bool) -> Iterator[Fault]:
    """slow: also those that meet a deadline of the plugin's that no setting shortens."""
    for operation in DUMP_CALLS:
        for code in codes:
            yield Fault(operation, "error", code)
        if slow:
            yield Fault(operation, "hang")
        for action in ("die", "failed", "end_thread", "close", *_GARBLED):
            yield Fault(operation, action)
    for state in REASON_OF_STATE:
        yield Fault("get_state", "state", state)
    for operation in ("lock", "checkpoint"):
        yield Fault(operation, "lie")
    yield Fault("checkpoint", "hang_half")
    for operation in ("lock", "checkpoint"):
        yield Fault(operation, "fail_after", 999)
    yield Fault("checkpoint", "oom")


def restore_faults(codes: tuple[int, ...], slow: bool) -> Iterator[Fault]:
    """As dump_faults."""
    for operation in RESTORE_CALLS:
        for code in codes:
            yield Fault(operation, "error", code)
        if slow or operation == "restore":
            yield Fault(operation, "hang")
        for action in ("die", "failed", "end_thread", "close", *_GARBLED):
            yield Fault(operation, action)
    for state in REASON_OF_STATE:
        yield Fault("get_state", "state", state)
    for operation in ("restore", "unlock"):
        yield Fault(operation, "lie")
    yield Fault("restore", "hang_half")
    yield Fault("restore", "oom")
    yield Fault("restore", "fail_after", 999)


def run_dumps(
    rig: Rig, codes: tuple[int, ...] = CODES, *, slow: bool = True, random: Random | None = None
) -> Tally:
    """One dump for each fault, in the root of the tree or, drawn by `random`, in its CUDA child."""
    random = random or Random(0)
    tally = Tally()
    with Jobs(lambda: _start(rig)) as jobs:
        for fault in dump_faults(codes, slow):
            tally.counts["trials"] += 1
            job = jobs.get()
            # A child that is lost leaves the others alive, whose parent dies takes them along.
            target = job.pids[1] if fault.action in LASTING else random.choice(job.pids[:2])
            try:
                if _try_dump(rig, job, fault, target):
                    tally.counts["dump failed, job runs on"] += 1
                else:
                    tally.counts["dump failed, driver lost one process, the others run on"] += 1
                    jobs.drop()
            except AssertionError as failure:
                tally.failures.append(f"dump, {fault}: {failure}")
                jobs.drop()
            finally:
                rig.emulator.clear_faults()
    return tally


def run_restores(rig: Rig, codes: tuple[int, ...] = CODES, *, slow: bool = True) -> Tally:
    """One restore for each fault, of one checkpoint; then one without."""
    return refuse_restores(rig, restore_faults(codes, slow))


def refuse_restores(rig: Rig, faults: Iterable[Fault]) -> Tally:
    """The same of these faults."""
    tally = Tally()
    checkpoint = damage.take(rig, mib=2, children=1)
    for fault in faults:
        _add(rig, fault)
        tally.counts["trials"] += 1
        try:
            outcome = damage.expect_refusal(
                rig, checkpoint.job, checkpoint.images, _timeouts(fault)
            )
            tally.counts[outcome] += 1
        except AssertionError as failure:
            tally.failures.append(f"restore, {fault}: {failure}")
            checkpoint.job.end()
        finally:
            rig.emulator.clear_faults()
    restored = rig.restore(checkpoint.images)
    assert restored.status == 0, restored.errors
    checkpoint.job.run_on()
    checkpoint.job.end()
    return tally


def run_undos(rig: Rig, codes: tuple[int, ...] = CODES) -> Tally:
    """One dump that leaves the job running for each fault that meets its way back, once."""
    tally = Tally()
    faults = [Fault(call, "error", code) for call in UNDO_CALLS for code in codes]
    faults += [Fault(call, "fail_after", 999) for call in UNDO_CALLS]
    faults += [Fault(call, action) for call in UNDO_CALLS for action in ("lie", *_GARBLED)]
    with Jobs(lambda: _start(rig)) as jobs:
        for turn, fault in enumerate(faults):
            tally.counts["trials"] += 1
            job = jobs.get()
            try:
                tally.counts[_try_undo(rig, job, fault, job.pids[turn % 2])] += 1
            except AssertionError as failure:
                tally.failures.append(f"undo, {fault}: {failure}")
                jobs.drop()
            finally:
                rig.emulator.clear_faults()
    return tally


def _try_undo(rig: Rig, job: SteadyJob, fault: Fault, target: int) -> str:
    threads = job.threads()
    images = rig.images()
    _add(rig, fault, target)
    dumped = rig.dump(job, images, "--leave-running", config=_timeouts(fault))
    job.run_on()
    rig.settle(images)
    assert job.threads() == threads
    if "is left as it is" not in dumped.log:
        done = fault.operation == "unlock" and fault.action in _DONE_ALL_THE_SAME
        assert done, "the fault was not met, or not seen"
        return "job runs on at once"
    _require_reason(dumped, fault, target)
    assert "brought back" in (images / "gpustasis-undo.log").read_text()
    return "job was brought back by the worker"


def _start(rig: Rig) -> SteadyJob:
    log = rig.images().with_suffix(".job")
    return SteadyJob(rig.programs.job, log, rig.environ, mib=2, children=1, plain_children=1)


def _timeouts(fault: Fault) -> Mapping[str, Setting]:
    return _SHORT if fault.action in _SILENT else _LONG


def _add(rig: Rig, fault: Fault, pid: int = 0) -> None:
    rig.emulator.add_fault(
        fault.operation, fault.action, code=fault.code, delay_ms=fault.delay_ms, pid=pid
    )


def _try_dump(rig: Rig, job: SteadyJob, fault: Fault, target: int) -> bool:
    """Whether the whole job runs on, which it must unless the fault was a lasting one of
    `target`."""
    threads = job.threads()
    images = rig.images()
    _add(rig, fault, target)
    dumped = rig.dump(job, images, config=_timeouts(fault))
    assert dumped.status != 0, "criu says it dumped"
    rig.emulator.clear_faults()
    _require_reason(dumped, fault, target)
    assert "t" not in {process_state(pid) for pid in job.pids}, "a task is left traced"
    if fault.action in LASTING:
        job.run_on(without=[target])
        if fault.action in ("hang", "hang_half"):
            _require_still_hanging(job, target)
        with suppress(ProcessLookupError):
            os.kill(target, signal.SIGKILL)
        rig.settle(images)  # a worker waits for a driver that hangs until the process is gone
        job.run_on(without=[target])
        return False
    job.run_on()
    rig.settle(images)
    assert job.threads() == threads
    return True


def _require_still_hanging(job: SteadyJob, pid: int) -> None:
    """Its restore thread does nothing but wait, whoever has asked it something meanwhile."""
    deadline = time.monotonic() + _BLOCKED_S
    while process_state(pid) != "S":  # it may not have come to its next call of the driver
        assert time.monotonic() < deadline, f"pid {pid} is in state {process_state(pid)}"
        time.sleep(0.01)
    thread = restore_thread(pid)
    assert thread is not None, "it has no restore thread"
    # The emulator's hang wakes once a second: the kernel says "0" of a thread that runs.
    while (place := (thread / "wchan").read_text()) == "0" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert place != "0", "the kernel does not say where threads wait"
    assert "poll" not in place, "the hang has ended by itself"
    assert pid in job.alive_pids()


def _require_reason(dumped: Run, fault: Fault, target: int) -> None:
    reasons = [
        line for line in dumped.log.splitlines() if "Error (gpustasis): cuda_plugin: " in line
    ]
    assert reasons, f"no reason in the log: {dumped.errors}"
    of_target = [line for line in reasons if re.search(rf"\b{target}\b", line)]
    assert of_target, f"no pid {target} in {reasons}"
    text = "\n".join(of_target)
    if fault.action == "state" and fault.code is not None:
        assert REASON_OF_STATE[fault.code] in text, f"no state in {text}"
    elif fault.action == "lie":
        assert _REASON_OF_LIE[fault.operation] in text, f"no lie in {text}"
    elif fault.action != "die":
        assert _CALLS[fault.operation] in text, f"no call in {text}"
    if fault.action in ("error", "fail_after"):
        assert re.search(rf"\b{fault.code}\b", text), f"no CUresult in {text}"
