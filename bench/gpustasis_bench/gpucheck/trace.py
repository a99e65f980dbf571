# SPDX-License-Identifier: Apache-2.0
"""Take a trace: what a CUDA process holds and answers before, between and after the driver's
calls."""

from __future__ import annotations

import platform
import time
from datetime import UTC, datetime
from typing import Any

from gpustasis.errors import DriverError
from gpustasis_bench.gpucheck.caller import Caller
from gpustasis_bench.gpucheck.cgroup import MemoryCgroup, NoCgroup, memory_cgroup
from gpustasis_bench.gpucheck.driver_calls import TRANSITIONS, Answer
from gpustasis_bench.gpucheck.mistakes import provoke_mistakes
from gpustasis_bench.gpucheck.observe import observe
from gpustasis_bench.gpucheck.target import MAIN, Program, running_target

SCHEMA = 1  # raised when a key changes its meaning or goes; new keys do not raise it

Trace = dict[str, Any]

_LINGER_SECONDS = 1.0  # how long after Checkpoint a thread must live to count as outliving it
_STATE_AFTER = {"Lock": "locked", "Checkpoint": "checkpointed", "Restore": "restored"}


def fill_trace(trace: Trace, program: Program, *, emulated: bool) -> None:
    """Run the whole probe, seconds long, and put what it sees into the empty `trace`.

    That becomes a JSON-ready object: "schema", where and when it was taken, "caller" (what a
    calling process holds before and after cuInit), "stages" (what the target holds, by state),
    "calls" (each call of the round trip with its result and seconds), "cgroup", "mistakes" (error
    codes), and at last "complete". What was seen before an error stays in it. Raises DriverError if
    a call of the plain round trip fails, NoAnswer if one hangs.
    """
    trace["schema"] = SCHEMA
    trace["date"] = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    trace["emulator"] = emulated
    trace["kernel"] = platform.release()
    trace["complete"] = False
    _trace_caller(trace)
    trace["backend"] = "emulator" if emulated else trace["gpu"]
    _trace_round_trip(trace, program)
    trace["mistakes"] = provoke_mistakes(program)
    trace["complete"] = True


def _trace_caller(trace: Trace) -> None:
    with Caller() as other:
        trace["driver"] = other.driver_version()
        trace["persistence_mode"] = other.persistence_mode()  # Restore depends on it
    with Caller() as caller:
        stages: dict[str, Any] = {}
        trace["caller"] = {"stages": stages}
        trace["driver_api"] = caller.load()["version"]
        stages["loaded"] = observe(caller.pid)
        answer = caller.init()
        if answer["result"] != 0:
            raise DriverError(f"cuInit: {answer['name']}")
        trace["gpu"] = answer["device"]
        stages["initialized"] = observe(caller.pid)
        trace["caller"]["init_seconds"] = answer["seconds"]


def _trace_round_trip(trace: Trace, program: Program) -> None:
    try:
        with memory_cgroup() as group:
            _trace_in_cgroup(trace, program, group)
    except NoCgroup as exc:
        _trace_in_cgroup(trace, program, None)
        trace["cgroup"] = {"not_possible": str(exc)}


def _trace_in_cgroup(trace: Trace, program: Program, group: MemoryCgroup | None) -> None:
    procs = group.procs if group else None
    with running_target(program, MAIN, procs) as target, Caller() as caller:
        pid = target.pid
        stages: dict[str, Any] = {"running": observe(pid)}
        calls: list[dict[str, Any]] = []
        trace |= {"stages": stages, "calls": calls}
        _record(calls, caller, "GetRestoreThreadId", pid)
        trace["restore_thread"] = calls[-1]["value"]
        trace["gpu_bytes"] = (MAIN.data_mib + MAIN.pool_mib) << 20  # at least: weights come on top
        charged = {"running": group.used_bytes() if group else 0}
        for name in TRANSITIONS:
            if name == "Restore":
                caller.init()  # a caller that has not is one of the mistakes
            _record(calls, caller, name, pid)
            stage = _STATE_AFTER.get(name, "unlocked")
            stages[stage] = observe(pid)
            charged[stage] = group.used_bytes() if group else 0
            _record(calls, caller, "GetState", pid)
            if name == "Checkpoint":
                time.sleep(_LINGER_SECONDS)
                stages["checkpointed_later"] = observe(pid)
        trace["cgroup"] = {"charged_bytes": charged}


def _record(calls: list[dict[str, Any]], caller: Caller, name: str, pid: int) -> None:
    answer: Answer = caller.call(name, pid)
    calls.append({"call": name, **answer})
    if answer["result"] != 0:
        raise DriverError(f"{name} on a target in its right state: {answer['name']}")
