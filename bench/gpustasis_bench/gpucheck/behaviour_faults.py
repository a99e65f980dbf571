# SPDX-License-Identifier: Apache-2.0
"""How the driver's calls behave when something is wrong: a busy GPU, a caller or a target that is
killed in the middle, a target that is stopped."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from gpustasis_bench.gpucheck.caller import Caller
from gpustasis_bench.gpucheck.cuda_process import (
    CHECKPOINT,
    LOCK,
    RESTORE,
    UNLOCK,
    Call,
    CudaTarget,
    Found,
    Lab,
    counters,
    gpu_bytes_used,
)
from gpustasis_bench.gpucheck.target import TargetError

_GIB = 4
_KERNEL_GIB = 1 / 4
_AFTER_SECONDS = 0.3  # how long a call goes on until somebody is killed
_FREED_SECONDS = 5.0
_AFTER_LOCK_SECONDS = 0.1
_QUIET_SECONDS = 1.5  # a target that did not change for so long is left to itself
_SPARE_SECONDS = 1.0  # what goes on after a kernel has gone on by then
_SETTLING_SECONDS = 15.0
_LOCK_MS = 500
_SILENCE_SECONDS = 2.0


def rounds_in(target: CudaTarget, seconds: float) -> int:
    """How many rounds of its work it does in that time."""
    before = target.rounds
    time.sleep(seconds)
    return target.rounds - before


def long_kernel(lab: Lab, found: Found, save: Callable[[], None]) -> None:
    """Lock a target whose GPU works for seconds at a time, with a limit and without one."""
    caller, target = lab.caller(), lab.target(_KERNEL_GIB, "kernel")
    target.wait_for_round(lab.left)
    found["Lock, 500 ms"] = lab.call(caller, LOCK, target, lock_timeout_ms=_LOCK_MS)
    found["state_after_limit"] = lab.state(caller, target)
    found["goes_on_after_limit"] = _goes_on(lab, target)
    save()
    found[LOCK] = lab.call(caller, LOCK, target)
    found["state_locked"] = lab.state(caller, target)
    found[UNLOCK] = lab.call(caller, UNLOCK, target)
    found["goes_on"] = _goes_on(lab, target)
    found["memory"] = lab.verify(target)


def _goes_on(lab: Lab, target: CudaTarget) -> float:
    """Seconds until its next round. Raises TargetError if there is none."""
    begin = time.monotonic()
    target.wait_for_round(min(lab.left, 3 * (lab.kernel_seconds + _SPARE_SECONDS)))
    return round(time.monotonic() - begin, 3)


def caller_killed(lab: Lab, found: Found, save: Callable[[], None]) -> None:
    """Kill who calls Checkpoint, Restore and Lock, and see what becomes of the target."""
    target = lab.target(_GIB)
    _lock(lab, lab.caller(), target)
    found[CHECKPOINT] = _kill_caller(lab, CHECKPOINT, target)
    save()
    caller = lab.caller()
    _lock(lab, caller, target)
    found["Checkpoint, for Restore"] = lab.call(caller, CHECKPOINT, target)
    found[RESTORE] = _kill_caller(lab, RESTORE, target)
    target.kill()
    save()
    found[LOCK] = _kill_caller(lab, LOCK, lab.target(_KERNEL_GIB, "kernel"))


def _lock(lab: Lab, caller: Caller, target: CudaTarget) -> None:
    answer = lab.call(caller, LOCK, target)
    if answer["result"] != 0:
        raise TargetError(f"Lock before the experiment: {answer['name']}")


def _kill_caller(lab: Lab, name: str, target: CudaTarget) -> Found:
    """Kill who makes the call, watch the target until it is quiet, and bring it back. Lock is
    called when a kernel has just begun, and waits for it."""
    dying, other = lab.caller(), lab.caller()
    quiet = _QUIET_SECONDS
    if name == LOCK:
        quiet = lab.kernel_seconds + _SPARE_SECONDS
        target.wait_for_round(lab.left)
    call = Call(lab, dying, name, target)
    if name == LOCK:
        time.sleep(_AFTER_LOCK_SECONDS)
    else:
        lab.pause_within_call(_AFTER_SECONDS)
    found: Found = {"killed": call.kill_caller(), "call": call.wait(lab.left)}
    found["states"] = _watch(lab, other, target, quiet)
    found["brought_back"] = lab.bring_back(other, target)
    found["memory"] = lab.verify(target)
    again = lab.caller()
    found["locks_again"] = [lab.call(again, call, target) for call in (LOCK, UNLOCK)]
    return found


def _watch(lab: Lab, caller: Caller, target: CudaTarget, quiet: float) -> list[Found]:
    """What GetState answers, until that and the target's anonymous memory, in steps of 16 MiB, are
    the same for `quiet` seconds: one entry for each change, "at" so many seconds, with the longest
    that an answer took."""
    begin = time.monotonic()
    entries: list[Found] = []
    same_since = begin
    while time.monotonic() - begin < _SETTLING_SECONDS:
        answer = lab.call(caller, "GetState", target, 10.0)
        seen = (answer["name"], answer.get("value"), counters(target.pid)["RssAnon"] >> 24 << 24)
        took = answer.get("seconds")
        if not entries or seen != tuple(entries[-1]["seen"]):
            same_since = time.monotonic()
            at = round(same_since - begin, 3)
            entries.append({"at": at, "seen": list(seen), "longest_seconds": took})
        elif took is not None:
            entries[-1]["longest_seconds"] = max(took, entries[-1]["longest_seconds"] or 0.0)
        if answer["result"] is None:
            caller = lab.caller()
        if time.monotonic() - same_since > quiet:
            break
        time.sleep(0.05)
    return entries


def target_killed(lab: Lab, found: Found, save: Callable[[], None]) -> None:
    """Kill the target within Checkpoint: what the call answers, and whether GPU memory comes
    back."""
    found["gpu_bytes_before"] = gpu_bytes_used()
    caller, target = lab.caller(), lab.target(_GIB)
    found["gpu_bytes_with_target"] = gpu_bytes_used()
    _lock(lab, caller, target)
    call = Call(lab, caller, CHECKPOINT, target)
    lab.pause_within_call(_AFTER_SECONDS)
    begin = time.monotonic()
    target.kill()
    found["reaped_after_seconds"] = round(time.monotonic() - begin, 3)
    found["status"] = target.process.returncode
    found["call"] = call.wait(lab.left)
    # The driver gives it back on its own time.
    taken = found["gpu_bytes_with_target"] - found["gpu_bytes_before"]
    begin = time.monotonic()
    while True:
        found["gpu_bytes_after"] = gpu_bytes_used()
        found["looked_for_seconds"] = round(time.monotonic() - begin, 3)
        left = found["gpu_bytes_after"] - found["gpu_bytes_before"]
        if left < taken / 10 or found["looked_for_seconds"] > _FREED_SECONDS:
            break
        time.sleep(0.05)
    save()
    found["GetState"] = lab.call(lab.caller(), "GetState", target, 10.0)
    other = lab.target(_KERNEL_GIB)
    found["another target"] = lab.round_trip(lab.caller(), other)


def stopped_target(lab: Lab, found: Found, save: Callable[[], None]) -> None:
    """Ask a target that is stopped, and again once it runs."""
    target = lab.target(_KERNEL_GIB)
    target.process.send_signal(signal.SIGSTOP)
    try:
        found["stopped"] = lab.call(lab.caller(), "GetState", target, _SILENCE_SECONDS)
        found["Lock while stopped"] = lab.call(
            lab.caller(), LOCK, target, _SILENCE_SECONDS, lock_timeout_ms=_LOCK_MS
        )
    finally:
        os.kill(target.pid, signal.SIGCONT)
    caller = lab.caller()
    found["running"] = lab.call(caller, "GetState", target, _SILENCE_SECONDS)
    found["state_later"] = [lab.state(lab.caller(), target) for _ in range(3)]
    found["brought_back"] = lab.bring_back(lab.caller(), target)
    found["round trip"] = lab.round_trip(lab.caller(), target)
