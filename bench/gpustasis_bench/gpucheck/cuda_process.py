# SPDX-License-Identifier: Apache-2.0
"""Run CUDA targets and callers for one experiment: with a deadline, and none outlives it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from gpustasis import nvml
from gpustasis.errors import CheckpointError
from gpustasis_bench.gpucheck.caller import Caller, NoAnswer
from gpustasis_bench.gpucheck.cuda_target import EXTRA, PIECE
from gpustasis_bench.gpucheck.target import TargetError

LOCK, CHECKPOINT, RESTORE, UNLOCK = "Lock", "Checkpoint", "Restore", "Unlock"
ROUND_TRIP = (LOCK, CHECKPOINT, RESTORE, UNLOCK)
RUNNING, LOCKED, CHECKPOINTED = 0, 1, 2  # CUprocessState

_WAY_BACK: dict[object, tuple[str, ...]] = {LOCKED: (UNLOCK,), CHECKPOINTED: (RESTORE, UNLOCK)}
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
_EMULATED_GIB = 4 << 20
_KERNEL_SECONDS = 3.0
_VERIFY_SECONDS = 20.0
_COUNTED = (
    *("VmSize", "RssAnon", "faults", "cpu_seconds"),
    *("mappings", "uvm_mappings", "threads", "descriptors"),
)
_POLL_SECONDS = 0.02
_REAP_SECONDS = 5.0  # a process may be in the driver, and there it cannot die

Found = dict[str, Any]


class OverDeadline(CheckpointError):
    """The experiment's time is up."""

    exit_code = 11


class CudaTarget:
    """A running `cuda_target`. folder: its own, which is there already."""

    def __init__(
        self, folder: Path, kind: str, options: Sequence[str], env: Mapping[str, str]
    ) -> None:
        self._folder = folder
        self._log = folder / "log"
        module = "gpustasis_bench.gpucheck.cuda_target"
        arguments = [sys.executable, "-m", module, kind, *options, "--folder", str(folder)]
        with self._log.open("wb") as output:
            self.process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | env,
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    @property
    def rounds(self) -> int:
        """How many rounds of its work it has done."""
        return int((self._folder / "counter").read_text(encoding="ascii"))

    def wait_until_works(self, seconds: float) -> None:
        """Raises TargetError if it ends, with what it said, or does not work in that time."""
        self._wait_for(self._folder / "mark", seconds, "work")

    def wait_for_round(self, seconds: float) -> None:
        """Return as soon as a round begins. Raises TargetError after that time."""
        before, end = self.rounds, time.monotonic() + seconds
        while self.rounds == before:
            if time.monotonic() > end:
                raise TargetError(f"no round of the target's work in {seconds:g} s")
            time.sleep(_POLL_SECONDS)

    def verify(self, seconds: float) -> str:
        """Its verdict on its memory, or why there is none."""
        verdict = self._folder / "verdict"
        try:
            if self.process.poll() is None:
                verdict.unlink(missing_ok=True)
                self.process.send_signal(signal.SIGUSR1)
            self._wait_for(verdict, seconds, "look at its memory")
        except TargetError as exc:
            return str(exc)
        return verdict.read_text(encoding="utf-8")

    def kill(self) -> None:
        """End it; one that cannot die is left."""
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_REAP_SECONDS)

    def _wait_for(self, path: Path, seconds: float, what: str) -> None:
        end = time.monotonic() + seconds
        while not path.exists():
            if self.process.poll() is not None:
                said = self._log.read_text(encoding="utf-8", errors="replace").strip()
                ending = f"the target ended with status {self.process.returncode}"
                raise TargetError(f"{ending}: {said.rpartition(chr(10))[2]}")
            if time.monotonic() > end:
                raise TargetError(f"the target did not {what} within {seconds:.0f} s")
            time.sleep(_POLL_SECONDS)


class Call:
    """A call that is made in a thread. What it answered is in `answer` once it is over."""

    def __init__(self, lab: Lab, caller: Caller, name: str, target: CudaTarget) -> None:
        self.answer: Found = {}
        self._caller = caller
        self._begin = time.monotonic()
        self._thread = threading.Thread(target=self._make, args=(lab, name, target), daemon=True)
        self._thread.start()

    def _make(self, lab: Lab, name: str, target: CudaTarget) -> None:
        self.answer = {"result": None, "name": "the thread failed"}
        try:
            self.answer = lab.call(self._caller, name, target)
        except OverDeadline as exc:
            self.answer = {"result": None, "name": str(exc)}
        self.answer["seconds_until_known"] = round(time.monotonic() - self._begin, 3)

    def kill_caller(self) -> bool:
        """Kill the calling process. False: it had its answer before."""
        if not self._thread.is_alive():
            return False
        os.kill(self._caller.pid, signal.SIGKILL)
        return True

    def wait(self, seconds: float) -> Found:
        """What it answered; raises OverDeadline if it has not."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise OverDeadline(f"a call in a thread was not over after {seconds:.0f} s")
        return self.answer


class Lab:
    """Where an experiment's processes live.

    emulated: sizes are 1/256 of what is asked for. module: what a driver without PTX loads in place
    of the long kernel's. kernel_seconds: how long that kernel takes.
    """

    def __init__(self, *, emulated: bool, seconds: float, module: Path | None = None) -> None:
        self.emulated = emulated
        self.kernel_seconds = _KERNEL_SECONDS
        self._module = module
        self._end = time.monotonic() + seconds
        self._stack = contextlib.ExitStack()
        self._folder = Path(self._stack.enter_context(_scratch_folder()))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def left(self) -> float:
        """Seconds that are left. Raises OverDeadline if none are."""
        if self.margin <= 0:
            raise OverDeadline("the part's time is up")
        return self.margin

    @property
    def margin(self) -> float:
        """Seconds that are left; below 0 if it is over."""
        return self._end - time.monotonic()

    def bytes_of(self, gib: float) -> int:
        """As many bytes as a target is to have."""
        wanted = int(gib * (_EMULATED_GIB if self.emulated else 1 << 30))
        return max(1, wanted // PIECE) * PIECE

    def target(
        self,
        gib: float,
        kind: str = "plain",
        *,
        name: str = "",
        zero_percent: int = 0,
        env: Mapping[str, str] | None = None,
    ) -> CudaTarget:
        """A target that works. Raises TargetError."""
        folder = Path(self._folder, name) if name else Path(tempfile.mkdtemp(dir=self._folder))
        folder.mkdir(exist_ok=True)
        extra = EXTRA >> 4 if self.emulated else EXTRA
        options = ["--bytes", str(self.bytes_of(gib)), "--extra-bytes", str(extra)]
        options += ["--zero-percent", str(zero_percent)]
        options += ["--kernel-seconds", str(self.kernel_seconds)]
        options += ["--module", str(self._module)] if self._module else []
        target = CudaTarget(folder, kind, options, env or {})
        self._stack.callback(target.kill)
        target.wait_until_works(self.left)
        return target

    def caller(self) -> Caller:
        """A calling process that has called cuInit."""
        caller = self._stack.enter_context(Caller())
        caller.init(self.left)
        return caller

    def verify(self, target: CudaTarget) -> str:
        """The target's verdict on its memory, or why there is none."""
        return target.verify(min(self.left, _VERIFY_SECONDS))

    def pause_within_call(self, seconds: float) -> None:
        """Wait until a call has been going on for so long."""
        time.sleep(seconds)

    def call(
        self, caller: Caller, name: str, target: CudaTarget, seconds: float = 60.0, **options: Any
    ) -> Found:
        """The answer, or {"result": None, "name": why there is none}."""
        seconds = min(seconds, self.left)
        try:
            return dict(caller.call(name, target.pid, deadline_seconds=seconds, **options))
        except NoAnswer as exc:
            return {"result": None, "name": str(exc)}
        except ValueError:  # it has been closed
            return {"result": None, "name": "the calling process is gone"}

    def measured(self, caller: Caller, name: str, target: CudaTarget) -> Found:
        """As call; "staged_bytes": by how much its anonymous memory grew; "cpu_seconds" and
        "faults" of the target meanwhile."""
        before = counters(target.pid)
        answer = self.call(caller, name, target)
        after = counters(target.pid)
        answer["staged_bytes"] = after["RssAnon"] - before["RssAnon"]
        answer["cpu_seconds"] = round(after["cpu_seconds"] - before["cpu_seconds"], 2)
        answer["faults"] = after["faults"] - before["faults"]
        return answer

    def round_trip(self, caller: Caller, target: CudaTarget) -> Found:
        """The four calls, measured, as far as they succeed, and the verdict."""
        found: Found = {}
        for name in ROUND_TRIP:
            found[name] = self.measured(caller, name, target)
            if name == CHECKPOINT:
                found["huge_bytes"] = huge_bytes(target.pid)
            if found[name]["result"] != 0:
                found["brought_back"] = self.bring_back(caller, target)
                break
        found["memory"] = self.verify(target)
        return found

    def state(self, caller: Caller, target: CudaTarget) -> object:
        """What GetState gives: its number, or else its answer in words."""
        answer = self.call(caller, "GetState", target, 10.0)
        return answer["value"] if answer["result"] == 0 else answer["name"]

    def bring_back(self, caller: Caller, target: CudaTarget) -> Found:
        """Make it run by the calls that its state asks for."""
        state = self.state(caller, target)
        found: Found = {"state": state}
        for name in _WAY_BACK.get(state, ()):
            found[name] = self.call(caller, name, target)
        return found


def counters(pid: int) -> Found:
    """VmSize and RssAnon in bytes, cpu_seconds, faults; descriptors, mappings, threads, and
    mappings of nvidia-uvm. Of a process that has ended: as far as there are any."""
    found: Found = dict.fromkeys(_COUNTED, 0)
    process = Path(f"/proc/{pid}")
    with contextlib.suppress(OSError):
        for line in (process / "status").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key in {"VmSize", "RssAnon"}:
                found[key] = int(value.split()[0]) << 10
        fields = (process / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        found["faults"] = int(fields[7]) + int(fields[9])  # minflt and majflt of proc(5)
        found["cpu_seconds"] = (int(fields[11]) + int(fields[12])) / _CLOCK_TICKS
        maps = (process / "maps").read_text(encoding="utf-8", errors="replace").splitlines()
        found["mappings"] = len(maps)
        found["uvm_mappings"] = sum("nvidia-uvm" in line for line in maps)
        found["threads"] = len(os.listdir(process / "task"))
        found["descriptors"] = len(os.listdir(process / "fd"))
    return found


def huge_bytes(pid: int) -> int:
    """Bytes of its anonymous memory that are in huge pages."""
    text = ""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii", errors="replace")
    words = text.partition("AnonHugePages:")[2].split()
    return int(words[0]) << 10 if words else 0


def gpu_bytes_used() -> int | str:
    """As NVML has it, of all GPUs here; else why it is not known."""
    try:
        return nvml.memory_used()
    except CheckpointError as exc:
        return str(exc)


def _scratch_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="gpustasis-behaviour-", ignore_cleanup_errors=True)
