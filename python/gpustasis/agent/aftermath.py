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
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from gpustasis import process
from gpustasis.agent import containers
from gpustasis.agent.config import Config
from gpustasis.agent.operations import Operation, State
from gpustasis.agent.subjects import held, tree_pids
from gpustasis.agent.work import CRIU, needs_recovery, require_whole
from gpustasis.errors import AgentError, CheckpointError, ImageError
from gpustasis.image.store import read_entry
from gpustasis.recovery import GUARDIAN_COMM, WORKER_COMM, Outcome
from gpustasis.task import PROC, boot_id, comm_of, find_users, has_driver_thread, read_task

log = logging.getLogger(__name__)

_POLL_S = 0.2
PATIENCE_S = 600.0
_RECOVER_S = 120.0


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
    job = _job(operation)
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
    if read_entry(place).incomplete:
        return "there is no whole checkpoint"
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


def _job(operation: Operation) -> str:
    """What became of the process and all below it, which are brought back if they need that."""
    subject = operation.subject
    if operation.boot != boot_id().hex():
        return f"{subject} has ended: the node was started anew"
    try:
        with held(subject.pid, subject.start_time):
            said = [text for text in map(_recover, tree_pids(subject.pid)) if text]
            return "; ".join(said) or f"{subject} runs"
    except AgentError as exc:
        return str(exc)
    except (CheckpointError, ImageError, OSError) as exc:
        return f"it cannot be told whether {subject} runs: {exc}"


def _recover(pid: int) -> str:
    """What `gpustasis recover` says of one process; "": it runs, uses no GPU, or has ended."""
    try:
        # Where all were killed at once a task may be locked, and no record say so.
        if not (needs_recovery(pid) or has_driver_thread(pid)):
            return ""
        argv = [sys.executable, "-m", "gpustasis", "recover", str(pid)]
        ended = process.run(argv, timeout_s=_RECOVER_S, shielded=True)
    except (CheckpointError, OSError) as exc:
        return f"it cannot be told whether process {pid} runs: {exc}" if _is_alive(pid) else ""
    if Outcome.RUNS.value in ended.output or not _is_alive(pid):
        return ""
    return ended.output.strip()[-500:] or f"recover of {pid} ended with {ended.ending}"
