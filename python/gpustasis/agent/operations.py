# SPDX-License-Identifier: Apache-2.0
"""What the agent was asked for and what became of it, on the disk: one JSON file for each, written
before it begins, so that an agent that starts anew knows what the one before it was at."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from gpustasis.agent.subjects import CONTAINERS, Subject
from gpustasis.errors import AgentError
from gpustasis.files import open_own_directory, open_regular, replace_file
from gpustasis.image.arena import Tier
from gpustasis.task import boot_id

log = logging.getLogger(__name__)

KEPT = 1000  # of those of one user that have ended
INTERVAL = "interval"  # the origin of what nobody has asked for
GONE = "gone"
_MAX_BYTES = 1 << 16
_MAX_ERROR = 4096  # bytes in JSON
_ID = re.compile(r"[0-9a-f]{16}")


class State(StrEnum):
    """How far it has come. REFUSED: it was not begun. INTERRUPTED: the agent ended in it."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    REFUSED = "refused"
    CANCELLED = "cancelled"
    INTERRUPTED = "interrupted"

    @property
    def is_over(self) -> bool:
        return self not in (State.QUEUED, State.RUNNING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of a checkpoint. duration_s: from its begin to its end; downtime_s: what of that the job
    stood; None: not known. size_bytes: memory that it holds; stored_bytes: what it takes on the
    disk. gpu_bytes: memory of GPUs. verified: it was read again, and is right. tier: "local": it is
    in memory, and is still to be drained; "durable": it is on the disk; GONE: it was in memory, and
    is lost or was given up."""

    duration_s: float
    downtime_s: float | None
    size_bytes: int
    stored_bytes: int
    gpu_bytes: int
    incremental: bool
    emulated: bool
    verified: bool
    tier: str = Tier.DURABLE.value


@dataclass(slots=True, kw_only=True)
class Operation:
    """One checkpoint. uid: of who asked for it. target: its name in the configuration; "": none.
    stop: the job ends with it. origin: "request" or "interval". place: the checkpoint, a directory
    or an archive. note: what became of the job after a failure. Times: seconds since 1970; 0: not
    yet. boot: what the node was started as when it was asked for: pids are of that time. to_resume:
    the id of the container that its engine pauses for it, and that nobody had paused before.
    running: pid and start time of the CUDA processes that ran when its dump began."""

    subject: Subject
    uid: int
    target: str = ""
    stop: bool = False
    origin: str = "request"
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    state: State = State.QUEUED
    asked: float = field(default_factory=time.time)
    began: float = 0.0
    ended: float = 0.0
    place: str = ""
    error: str = ""
    note: str = ""
    figures: Figures | None = None
    cancel: bool = False
    boot: str = field(default_factory=lambda: boot_id().hex())
    to_resume: str = ""
    running: list[tuple[int, int]] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """For clients."""
        found = asdict(self)
        found["error"], found["note"] = _cut(self.error), _cut(self.note)
        for private in ("boot", "to_resume", "running"):
            del found[private]
        return found

    def as_record(self) -> dict[str, Any]:
        """For the disk."""
        private = {"boot": self.boot, "to_resume": self.to_resume, "running": self.running}
        return self.as_json() | private


def _cut(text: str) -> str:
    """As much of it as takes _MAX_ERROR bytes in JSON."""
    while (size := len(json.dumps(text))) > _MAX_ERROR:
        text = text[: min(len(text) - 1, len(text) * _MAX_ERROR // size)]
    return text


def from_json(raw: Mapping[str, Any]) -> Operation:
    """Raises ValueError, KeyError or TypeError."""
    subject = Subject(
        engine=str(raw["subject"]["engine"]),
        name=str(raw["subject"]["name"]),
        pid=int(raw["subject"]["pid"]),
        start_time=int(raw["subject"]["start_time"]),
    )
    if subject.engine not in ("", *CONTAINERS) or not _ID.fullmatch(raw["id"]):
        raise ValueError("it is no operation")
    figures = raw["figures"]
    return Operation(
        subject=subject,
        uid=int(raw["uid"]),
        target=str(raw["target"]),
        stop=bool(raw["stop"]),
        origin=str(raw["origin"]),
        id=str(raw["id"]),
        state=State(raw["state"]),
        asked=float(raw["asked"]),
        began=float(raw["began"]),
        ended=float(raw["ended"]),
        place=str(raw["place"]),
        error=str(raw["error"]),
        note=str(raw["note"]),
        boot=str(raw.get("boot", "")),
        to_resume=str(raw.get("to_resume", "")),
        running=[(int(pid), int(start)) for pid, start in raw.get("running", [])],
        figures=None if figures is None else Figures(**figures),
    )


class Journal:
    """The files of the operations, in a directory that only this user can change."""

    def __init__(self, directory: Path) -> None:
        """Raises AgentError."""
        self._directory = directory
        try:
            self._fd = open_own_directory(str(directory), 2, 0o700)
        except OSError as exc:
            raise AgentError(
                f"cannot use {exc.filename or directory}: {exc.strerror or exc}"
            ) from exc
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            os.close(self._fd)
            raise AgentError(f"{directory} is locked: another agent uses this store") from exc
        except OSError as exc:  # as where the file system has no locks
            log.warning("%s cannot be locked, against a second agent: %s", directory, exc.strerror)

    def close(self) -> None:
        os.close(self._fd)

    def load(self) -> list[Operation]:
        """All, oldest first; what is damaged is named in the log and left out."""
        found = []
        for name in os.listdir(self._fd):
            if not name.endswith(".json"):
                continue
            try:
                with open_regular(self._directory / name) as file:
                    raw = json.loads(file.read(_MAX_BYTES))
                found.append(from_json(raw))
            except (OSError, ValueError, KeyError, TypeError, RecursionError) as exc:
                log.warning("%s is left out: %r", self._directory / name, exc)
        return sorted(found, key=lambda one: one.asked)

    def write(self, operation: Operation) -> None:
        """Raises AgentError: then it must not begin."""
        data = json.dumps(operation.as_record()).encode()
        try:
            replace_file(self._fd, f"{operation.id}.json", data, 0o600)
        except OSError as exc:
            raise AgentError(
                f"cannot write down operation {operation.id} in {self._directory}: {exc.strerror}"
            ) from exc

    def forget(self, operation: Operation) -> None:
        """One that has ended."""
        with suppress(OSError):
            os.unlink(f"{operation.id}.json", dir_fd=self._fd)
