# SPDX-License-Identifier: Apache-2.0
"""The training program of demo/: start it, watch it, read what it computed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpustasis_bench.errors import DemoError
from gpustasis_bench.machine import Machine

OnStep = Callable[[int, int], None]

_STEP_LINE = re.compile(r"^step (\d+) of (\d+):", re.MULTILINE)
_TAIL = 4096  # bytes of the program's output in which its latest step is looked for
_POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program that trains and knows the options of demo/train: its first words."""

    argv: tuple[str, ...]

    def arguments(self, steps: int) -> list[str]:
        """Its command line without the files it writes."""
        return [*self.argv, "--steps", str(steps), "--report-every", str(max(1, steps // 200))]


def c_program(folder: Path, module: str, *, data_mib: int, pool_mib: int, hidden: int) -> Program:
    """demo/train as built in `folder`, with the kernels in the file `module` there."""
    argv = [str((folder / "train").absolute()), "--module", str((folder / module).absolute())]
    argv += ["--data-mib", str(data_mib), "--pool-mib", str(pool_mib), "--hidden", str(hidden)]
    return Program(argv=tuple(argv))


def main_program(folder: Path, machine: Machine) -> Program:
    """The training program as the demo runs it: 256 MiB on the emulator, 2 GiB on a GPU."""
    if machine.emulated:
        return c_program(folder, "train_kernels.so", data_mib=64, pool_mib=176, hidden=768)
    return c_program(folder, "train_kernels.ptx", data_mib=512, pool_mib=1280, hidden=2048)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a finished run computed, to the bit: the program's own JSON.

    raw: all of it. computed: the part that two runs must share.
    """

    raw: dict[str, Any]

    @property
    def computed(self) -> dict[str, Any]:
        keys = ("steps", "losses", "weights_sha256", "moments_sha256", "data_intact", "pool_zero")
        return {key: self.raw[key] for key in keys}

    @property
    def intact(self) -> bool:
        """The memory that training only reads, or never touches, is still what it was."""
        return self.raw["data_intact"] is True and self.raw["pool_zero"] is True


class Run:
    """One run of the program, in a folder of its own, from its start to its result.

    It is a session leader with no terminal, so criu can dump and restore it as it is. It may be
    killed by a dump and go on under the same pid after a restore.
    """

    def __init__(
        self, program: Program, folder: Path, steps: int, mark_step: int | None = None
    ) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._result = folder / "result.json"
        self._mark = folder / "mark"
        self._log = folder / "output.txt"
        argv = [*program.arguments(steps), "--result", str(self._result.absolute())]
        if mark_step is not None:
            argv += ["--mark-step", str(mark_step), "--mark-file", str(self._mark.absolute())]
        with self._log.open("wb") as output:
            try:
                self._process = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    cwd=folder,
                    start_new_session=True,
                )
            except OSError as exc:
                raise DemoError(f"cannot start {argv[0]}: {exc.strerror}") from exc
        self._reaped = False

    @property
    def folder(self) -> Path:
        """Where it runs; its output is output.txt there."""
        return self._folder

    @property
    def pid(self) -> int:
        """Its process id, also after a restore."""
        return self._process.pid

    def await_mark(self, on_step: OnStep | None = None) -> None:
        """Wait until the marked step is done; the program trains on. Raises DemoError if it
        ends."""
        while not self._mark.exists():
            self._tell(on_step)
            if self._process.poll() is not None:
                raise DemoError(f"the training program ended early: {self.said()}")
            time.sleep(_POLL_SECONDS)

    def await_killed(self) -> None:
        """Reap the process after a dump killed it: its pid must be free when it comes back.

        Raises DemoError if it had reached its end instead.
        """
        status = self._process.wait()
        self._reaped = True
        if self._result.exists() or status >= 0:
            raise DemoError(
                "the training program had finished before it was dumped; give it more --steps"
            )

    def await_result(self, on_step: OnStep | None = None) -> Result:
        """Wait for the run's end and return what it computed.

        After a restore the caller must be the subreaper that the process was handed to.
        Raises DemoError if it ended without a result.
        """
        while not self.has_ended():
            self._tell(on_step)
            time.sleep(_POLL_SECONDS)
        try:
            return Result(raw=json.loads(self._result.read_text(encoding="ascii")))
        except FileNotFoundError:
            raise DemoError(f"the training program ended without a result: {self.said()}") from None

    def expect_again(self) -> None:
        """It has ended with a result, and a restore is about to bring back a part of it: forget the
        result."""
        self._result.unlink()
        self._reaped = True

    def kill(self) -> None:
        """End the run, if it still runs."""
        if self._process.returncode is None:
            self._process.kill()
            self._process.wait()
        elif self._reaped and not self.has_ended():
            os.kill(self.pid, 9)
            os.waitpid(self.pid, 0)

    def has_ended(self) -> bool:
        """Whether it runs no more; after a restore the caller is its parent by adoption."""
        if not self._reaped:
            return self._process.poll() is not None
        try:  # restored: our child by adoption
            return os.waitpid(self.pid, os.WNOHANG)[0] != 0
        except ChildProcessError:
            return not Path(f"/proc/{self.pid}").exists()

    def said(self) -> str:
        """The end of what the program printed."""
        text = self._log.read_text(encoding="utf-8", errors="replace").strip()
        return text[-_TAIL:].splitlines()[-1] if text else "it said nothing"

    def _tell(self, on_step: OnStep | None) -> None:
        if on_step is None:
            return
        with self._log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL))
            found = _STEP_LINE.findall(log.read().decode("utf-8", "replace"))
        if found:
            on_step(int(found[-1][0]), int(found[-1][1]))
