# SPDX-License-Identifier: Apache-2.0
"""Custom storage (CUDA 13.4): what its tests have in common."""

from __future__ import annotations

import os
import select
import subprocess
from pathlib import Path

from gpustasis.emulator import Emulator
from support.job import Job

DRIVER = "615.71.09"
MIB = 1 << 20
UNDEFINED = 0xDB  # what the emulator's VRAM holds after a Restore that nobody has written
RUNNING, LOCKED, CHECKPOINTED, FAILED, CHECKPOINTING, RESTORING = range(6)
SUCCESS, INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED = 0, 1, 2, 3
INVALID_CONTEXT, OPERATING_SYSTEM, ILLEGAL_STATE, NOT_SUPPORTED = 201, 304, 401, 801
CAPTURE_UNSUPPORTED = 900


class Caller:
    """A process of programs/custom_storage.c: caller("checkpoint", pid) -> its answer's numbers."""

    def __init__(self, program: Path, environ: dict[str, str], gpus: int = 2) -> None:
        self.process = subprocess.Popen(
            [program, str(gpus)],
            env=environ,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the caller has ended"
        return line.strip()

    def send(self, *words: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()

    def __call__(self, *words: object) -> tuple[int, ...]:
        self.send(*words)
        return self.answer()

    def answer(self) -> tuple[int, ...]:
        return tuple(map(int, self._line().split()))

    def has_answered(self) -> bool:
        assert self.process.stdout is not None
        return bool(select.select([self.process.stdout], [], [], 0)[0])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def begin(self, call: str, pid: int, *words: object) -> int:
        """Begin an operation, which must succeed, and return its number."""
        code, operation, _ = self(call, pid, *words)
        assert code == SUCCESS
        return operation


def used(gpus: Emulator) -> list[int]:
    return [gpu["used_bytes"] for gpu in gpus.status()["gpus"]]


def resident_bytes(pid: int) -> int:
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def save(caller: Caller, pid: int) -> int:
    """Checkpoint a locked process; return the operation whose copy the caller has."""
    operation = caller.begin("checkpoint", pid)
    assert caller("save", operation) == (SUCCESS,)
    assert caller("complete", operation) == (SUCCESS,)
    return operation


def goes_on(job: Job) -> None:
    rounds = job.output().count("ok")
    job.wait_for("ok", count=rounds + 3)


def bring(caller: Caller, pid: int, state: int) -> int:
    """Bring a running process into a state; return the operation that is open or was the last."""
    assert caller("lock", pid) == (SUCCESS,)
    if state == LOCKED:
        return -1
    if state == CHECKPOINTING:
        return caller.begin("checkpoint", pid)
    saved = save(caller, pid)
    return caller.begin("restore", pid) if state == RESTORING else saved
