# SPDX-License-Identifier: Apache-2.0
"""What became of a checkpoint that was at work when the agent was killed.

criu is not the agent's to take along: it goes on, and ends the dump, or was killed too, and then
the plugin has let the job run on. So the new agent waits for that criu, looks, and says.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from gpustasis import process
from gpustasis._core import ImageReader, MemoryKind, image_name
from gpustasis.agent import containers, criu_alone
from gpustasis.agent.config import Config
from gpustasis.agent.left_logs import dump_has_begun
from gpustasis.agent.operations import Operation, State
from gpustasis.agent.subjects import held, tree_pids
from gpustasis.agent.work import CRIU, driver_state, needs_recovery, require_whole
from gpustasis.criu.statistics import find_statistics
from gpustasis.errors import AgentError, CheckpointError, ImageError
from gpustasis.image.arena import stored_directory
from gpustasis.image.checkpoint import find_manifest
from gpustasis.image.store import read_entry
from gpustasis.recovery import GUARDIAN_COMM, WORKER_COMM, Outcome
from gpustasis.task import (
    PROC,
    boot_id,
    comm_of,
    find_users,
    has_driver_thread,
    read_task,
)

log = logging.getLogger(__name__)

_POLL_S = 0.2
PATIENCE_S = 600.0
_RECOVER_S = 600.0  # for all processes of one operation
_LEAST_S = 120.0  # for one that was begun: if it is killed, memory may be put back in part only


def settle(operation: Operation, config: Config, stopped: Callable[[], bool]) -> None:
    """Wait until nobody is at work on it any more, and set its state and what there is to say. A
    container that was left paused runs on.

    stopped: asked again and again whether to give up.
    """
    if operation.state is State.QUEUED:
        operation.state, operation.ended = State.CANCELLED, time.time()
        operation.error = "the agent ended before it began"
        return
    operation.error = "the agent ended while it was at work"
    place = Path(operation.place) if operation.place else None
    if operation.subject.engine or place is None:
        if operation.subject.engine:
            operation.note = _container(operation, config)
        operation.state, operation.ended = State.INTERRUPTED, time.time()
        return
    deadline = time.monotonic() + PATIENCE_S
    while place.is_dir() and _users(place):
        if stopped() or time.monotonic() > deadline:
            operation.note = f"criu is still at work in {place}"
            return  # the next agent looks again
        time.sleep(_POLL_S)
    job = _job(operation, place, stopped)
    if job is None:
        operation.note = (
            f"it was not looked whether {operation.subject} runs: the agent was stopped"
        )
        return  # as above
    why_not = _why_not_done(operation, config, place)
    if why_not:
        operation.state, operation.note = State.INTERRUPTED, f"{why_not}; {job}"
    else:
        operation.state = State.DONE
        operation.error = ""
        operation.note = f"the agent ended while it was at work; the checkpoint is whole; {job}"
    operation.ended = time.time()


def _why_not_done(operation: Operation, config: Config, place: Path) -> str:
    """Why what is in `place` does not count as the checkpoint that was asked for; "": it does."""
    if read_entry(place).incomplete and (why_not := criu_alone.why_not_whole(place)):
        return why_not
    if not operation.stop and not _is_same(operation):
        # The agent would have looked at once. Now whatever had its pid may be what was dumped.
        return f"{operation.subject} has ended: whether {place} is of it cannot be told"
    if operation.stop and _is_same(operation):
        return f"{operation.subject} was not ended: criu got no answer whether it may"
    target = config.target(operation.target)
    if operation.target and target is None:
        return f"the configuration has no target {operation.target} any more"
    if target is not None and target.verify:
        try:
            require_whole(place, keep=operation.stop)
        except (CheckpointError, ImageError, OSError) as exc:
            return str(exc)
    return ""


def _is_same(operation: Operation) -> bool:
    """Whether the process that was meant is still there."""
    if operation.boot != boot_id().hex():
        return False
    try:
        with held(operation.subject.pid, operation.subject.start_time):
            return True
    except AgentError:
        return False


def _container(operation: Operation, config: Config) -> str:
    """What became of the container, which is resumed if it needs that."""
    subject = operation.subject
    try:
        if containers.resume(operation, config):
            return f"{subject} was left paused, and runs on"
    except (CheckpointError, OSError) as exc:
        return f"{subject} may stand still: {exc}"
    return f"ask {subject.engine} what became of it"


def _users(place: Path) -> list[int]:
    """Those that are still at work there. What a killed criu has left behind is ended: it
    would hold the directory for as long as the node runs."""
    found: list[int] = []
    with suppress(OSError):
        found = find_users(place, *CRIU, WORKER_COMM, GUARDIAN_COMM)
    return [pid for pid in found if not _end_left_over(pid, place)]


def _end_left_over(pid: int, place: Path) -> bool:
    """End it if it is a child of a criu that dumped and was killed, which led their process group:
    criu forks some that only stop, or sleep, until it has looked at them (its vdso, what the kernel
    can). Whether it was one."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        group, comm = os.getpgid(pid), comm_of(pid)
        words = (PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
        if comm not in CRIU or b"dump" not in words or group == pid or _is_alive(group):
            return False
        log.warning("process %d, which a killed criu has left in %s, is ended", pid, place)
        signal.pidfd_send_signal(fd, signal.SIGKILL)
    except OSError:  # it has ended
        return False
    finally:
        os.close(fd)
    return True


def _is_alive(pid: int) -> bool:
    try:
        read_task(pid)
    except CheckpointError:
        return False
    return True


def _job(operation: Operation, place: Path, stopped: Callable[[], bool]) -> str | None:
    """What became of the process and all below it, which are brought back if they need that. None:
    the agent is to stop, and not all were looked at."""
    subject = operation.subject
    if operation.boot != boot_id().hex():
        return f"{subject} has ended: the node was started anew"
    deadline = time.monotonic() + _RECOVER_S
    said = []
    try:
        has_ended = _has_ended(place)
        ran = operation.running if _has_begun(operation, place) else []
        with held(subject.pid, subject.start_time):
            for pid in tree_pids(subject.pid):
                if stopped():
                    return None
                said.append(_bring_back(pid, place, ran, has_ended, deadline))
            return "; ".join(filter(None, said)) or f"{subject} runs"
    except AgentError as exc:
        return str(exc)
    except (CheckpointError, ImageError, OSError) as exc:
        return f"it cannot be told whether {subject} runs: {exc}"


def _has_ended(place: Path) -> bool:
    """Whether the dump has come to its end, with all tasks as it has found them: its statistics
    are written last."""
    try:
        statistics = find_statistics(place, "dump")
    except CheckpointError as exc:
        log.warning("%s: %s", place, exc)
        return False
    return statistics is not None and statistics.succeeded and not read_entry(place).incomplete


def _has_begun(operation: Operation, place: Path) -> bool:
    """Whether criu was at work on that dump: before, the plugin has locked nobody, and whoever is
    locked was locked by somebody else. What the plugin writes is in `place`, where the agent puts
    nothing; but of a packed checkpoint that is nothing at first."""
    with suppress(OSError):
        if any(place.iterdir()):
            return True
    return dump_has_begun(operation.subject.pid, operation.began)


def _bring_back(
    pid: int, place: Path, running: Collection[tuple[int, int]], has_ended: bool, deadline: float
) -> str:
    """What is to be said of one process, which is brought back if the dump into `place` has left it
    locked or checkpointed; "": it runs, uses no GPU, or has ended. running: pid and start time of
    those that ran when criu began."""
    try:
        if not (needs_recovery(pid) or has_driver_thread(pid)):
            return ""
        is_recorded = needs_recovery(pid)
        state = _state(pid, may_fail=is_recorded and not has_ended)
        if state == "running" and (has_ended or not is_recorded):
            return ""
        # Another program may have locked it, before the dump or since: a dump leaves that so.
        is_stored = not is_recorded and not has_ended and _is_stored(pid, place)
        ran = (pid, read_task(pid).start_time) in running
        if has_ended or not (is_recorded or is_stored or ran):
            return (
                f"process {pid} is {state}, and nothing says that this dump has left it so: it "
                f"stays so; if no other program holds it, run `gpustasis recover {pid}`"
            )
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return (
                f"process {pid} may be locked: the {_RECOVER_S:g} s for this operation are over; "
                f"run `gpustasis recover {pid}`"
            )
        named = ["-D", str(place)] if is_stored else []
        argv = [sys.executable, "-m", "gpustasis", "recover", str(pid), *named]
        ended = process.run(argv, timeout_s=max(left_s, _LEAST_S), shielded=True)
    except (CheckpointError, OSError) as exc:
        return f"it cannot be told whether process {pid} runs: {exc}" if _is_alive(pid) else ""
    if Outcome.RUNS.value in ended.output or not _is_alive(pid):
        return ""
    return ended.output.strip()[-500:] or f"recover of {pid} ended with {ended.ending}"


def _state(pid: int, *, may_fail: bool) -> str:
    """What the driver says. Raises CheckpointError if it does not tell, or a dump is under way.
    may_fail: "unknown" then: who recovers the process asks again."""
    try:
        return driver_state(pid)
    except CheckpointError:
        if not may_fail:
            raise
        return "unknown"


def _is_stored(pid: int, place: Path) -> bool:
    """Whether the dump into `place` says of this very process in which state it has found it."""
    try:
        task = read_task(pid)
        stored = stored_directory(place)
        manifest = find_manifest(stored)
        for entry in () if manifest is None else manifest.tasks:
            if entry.pid == task.inner_pid and entry.kind == MemoryKind.GPU and entry.externalized:
                info = ImageReader.open(stored / image_name(task.inner_pid)).info
                return (info.boot_id, info.start_time) == (boot_id(), task.start_time)
    except (CheckpointError, OSError, ValueError, NotImplementedError) as exc:
        log.warning("whether process %d is in %s cannot be told: %s", pid, place, exc)
    return False
