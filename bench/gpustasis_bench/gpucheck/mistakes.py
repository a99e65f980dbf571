# SPDX-License-Identifier: Apache-2.0
"""Which error answers which mistake: wrong pid, wrong state, bad arguments, a target that cannot
run.

Each mistake is made on a process that is thrown away afterwards.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from gpustasis.errors import CheckpointError, DriverError
from gpustasis_bench.gpucheck.caller import Caller, NoAnswer
from gpustasis_bench.gpucheck.driver_calls import QUERIES, TRANSITIONS, Answer
from gpustasis_bench.gpucheck.ptrace_stop import ptrace_stopped
from gpustasis_bench.gpucheck.target import SMALL, Program, find_dead_pid, running_target

NO_ANSWER = "no answer"

_DEADLINE_SECONDS = 30.0  # the targets are small: seconds are plenty
_STOPPED_SECONDS = 3.0
_LOCK_MS = 2000
_RESERVED = (48, 1)  # this byte is reserved in every structure and every version of cuda.h so far

# The calls that lead from running to each state, and those that are wrong in it.
_PATHS: dict[str, tuple[str, ...]] = {
    "running": (),
    "locked": ("Lock",),
    "checkpointed": ("Lock", "Checkpoint"),
}
_WRONG: dict[str, tuple[str, ...]] = {
    "running": ("Checkpoint", "Restore", "Unlock"),
    "locked": ("Lock", "Restore"),
    "checkpointed": ("Lock", "Checkpoint", "Unlock"),
}

Outcomes = dict[str, dict[str, Any]]


def provoke_mistakes(program: Program) -> Outcomes:
    """Return, for each mistake and call, the driver's answer: {"result", "name", "state_after", …}.

    A call that hangs or kills its caller has the name NO_ANSWER; a mistake that could not be made
    has one entry, "not made", whose name says why.
    """
    outcomes: Outcomes = {}
    for name, make in _mistakes(program):
        try:
            outcomes[name] = make()
        except (CheckpointError, OSError) as exc:
            # One mistake that cannot be made must not cost the answers to the others.
            outcomes[name] = {"not made": {"result": None, "name": str(exc)}}
    return outcomes


def _mistakes(program: Program) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    yield "dead pid", lambda: _call_all(find_dead_pid())
    yield "process without CUDA", _process_without_cuda
    for state in _PATHS:
        yield f"wrong call while {state}", partial(_wrong_calls, program, state)
    yield "reserved byte set", partial(_reserved_bytes, program)
    yield "caller without cuInit", partial(_restore_without_init, program)
    yield "target in a ptrace stop", partial(_stopped_target, program)
    yield "thread id for a pid", partial(_thread_id, program)


def _process_without_cuda() -> dict[str, Any]:
    with _sleeping() as pid:
        return _call_all(pid)


@contextmanager
def _sleeping() -> Iterator[int]:
    with subprocess.Popen(["/bin/sleep", "1000"]) as process:
        try:
            yield process.pid
        finally:
            process.kill()


def _attempt(caller: Caller, name: str, pid: int, **options: Any) -> dict[str, Any]:
    if name == "Lock":
        options.setdefault("lock_timeout_ms", _LOCK_MS)
    options.setdefault("deadline_seconds", _DEADLINE_SECONDS)
    try:
        return dict(caller.call(name, pid, **options))
    except NoAnswer as exc:
        return {"result": None, "name": NO_ANSWER, "reason": str(exc)}


def _state(caller: Caller, pid: int) -> int | str | None:
    try:
        answer: Answer = caller.call("GetState", pid, deadline_seconds=_DEADLINE_SECONDS)
    except NoAnswer:
        return NO_ANSWER
    return answer["value"] if answer["result"] == 0 else answer["name"]


def _call_all(pid: int) -> dict[str, Any]:
    outcomes = {}
    for name in (*QUERIES, *TRANSITIONS):
        with Caller() as caller:
            caller.init()
            outcomes[name] = _attempt(caller, name, pid)
    return outcomes


def _walk(caller: Caller, pid: int, state: str) -> None:
    for name in _PATHS[state]:
        answer = caller.call(name, pid)
        if answer["result"] != 0:
            raise DriverError(f"{name} on the way to '{state}' answered {answer['name']}")


def _wrong_calls(program: Program, state: str) -> dict[str, Any]:
    outcomes = {}
    for name in _WRONG[state]:  # a target each: after a mistake, little may be taken for granted
        with running_target(program, SMALL) as target, Caller() as caller:
            caller.init()
            _walk(caller, target.pid, state)
            outcomes[name] = _attempt(caller, name, target.pid)
            if outcomes[name]["result"] is not None:
                outcomes[name]["state_after"] = _state(caller, target.pid)
    return outcomes


def _reserved_bytes(program: Program) -> dict[str, Any]:
    before = {"Lock": "running", "Checkpoint": "locked", "Restore": "checkpointed"}
    outcomes = {}
    for name in TRANSITIONS:
        with running_target(program, SMALL) as target, Caller() as caller:
            caller.init()
            _walk(caller, target.pid, before.get(name, "locked"))
            outcomes[name] = _attempt(caller, name, target.pid, reserved=_RESERVED)
            if outcomes[name]["result"] is not None:
                outcomes[name]["state_after"] = _state(caller, target.pid)
    return outcomes


def _restore_without_init(program: Program) -> dict[str, Any]:
    with running_target(program, SMALL) as target, Caller() as caller:
        _walk(caller, target.pid, "checkpointed")
        outcome = _attempt(caller, "Restore", target.pid)
        if outcome["result"] is not None:
            outcome["state_after"] = _state(caller, target.pid)
    return {"Restore": outcome}


def _stopped_target(program: Program) -> dict[str, Any]:
    outcomes = {}
    with running_target(program, SMALL) as target:
        with ptrace_stopped(target.pid):
            for name in (*QUERIES, "Lock"):
                with Caller() as caller:
                    caller.load()  # its start is no part of the time that the driver has
                    outcomes[name] = _attempt(
                        caller, name, target.pid, deadline_seconds=_STOPPED_SECONDS
                    )
        # The abandoned requests may still be answered: does the channel survive that?
        with Caller() as caller:
            caller.load()
            outcomes["GetState once it runs again"] = _attempt(
                caller, "GetState", target.pid, deadline_seconds=_STOPPED_SECONDS
            )
    return outcomes


def _thread_id(program: Program) -> dict[str, Any]:
    with running_target(program, SMALL) as target, Caller() as caller:
        answer = caller.call("GetRestoreThreadId", target.pid)
        tid = answer["value"]
        if tid is None:
            return {"GetRestoreThreadId": dict(answer)}
        return {"GetState": _attempt(caller, "GetState", tid)}
