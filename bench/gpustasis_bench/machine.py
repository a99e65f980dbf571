# SPDX-License-Identifier: Apache-2.0
"""Where the programs of this package run: on a real GPU when there is one, else on the emulator.

`python -m gpustasis_bench.machine` prints one JSON object: the first GPU's name, or what is
missing. It is asked in a process of its own, since a driver leaves threads and descriptors behind.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import click

from gpustasis import process
from gpustasis.emulator import Emulator
from gpustasis.errors import CheckpointError, UnsupportedError

EMULATED_MARK = "emulated"  # every GPU of the driver emulator has this word in its name
_PROBE_S = 120  # 8 GPUs without persistence mode take seconds to wake
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def run_command(command: click.Command, name: str) -> NoReturn:
    """Run a command and exit: 0, what it exits with, a CheckpointError's exit_code; 2 if the system
    refuses something, and for a wrong command line."""
    try:
        command(prog_name=name)
    except (CheckpointError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(error.exit_code if isinstance(error, CheckpointError) else 2)
    sys.exit(0)


def adopt_orphans() -> None:
    """Restored processes become children of this one, which can then wait for them."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuAnswer:
    """gpu: the first GPU's name, or None. reason: why there is none, in half a sentence."""

    gpu: str | None
    reason: str


def probe_gpu() -> GpuAnswer:
    """Ask the system's own CUDA driver and NVML, in a subprocess."""
    try:
        ended = process.run(
            [sys.executable, "-m", "gpustasis_bench.machine"],
            timeout_s=_PROBE_S,
            env={k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"},
        )
    except TimeoutError:
        return GpuAnswer(gpu=None, reason=f"the driver gave no answer in {_PROBE_S} s")
    try:
        answer = json.loads(ended.output.splitlines()[-1])  # a driver may talk before that
        return GpuAnswer(gpu=answer["gpu"], reason=answer["reason"])
    except (ValueError, KeyError, IndexError):
        return GpuAnswer(gpu=None, reason=f"the driver's process failed ({ended.ending})")


def _ask() -> GpuAnswer:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        management = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as exc:
        return GpuAnswer(gpu=None, reason=str(exc))
    count = ctypes.c_uint()
    status = management.nvmlInit_v2() or management.nvmlDeviceGetCount_v2(ctypes.byref(count))
    if status != 0 or count.value == 0:
        return GpuAnswer(gpu=None, reason=f"NVML lists no GPU (status {status})")
    status = driver.cuInit(0)
    if status != 0:
        return GpuAnswer(gpu=None, reason=f"cuInit answers {status}")
    device = ctypes.c_int()
    name = ctypes.create_string_buffer(256)
    status = driver.cuDeviceGet(ctypes.byref(device), 0)
    status = status or driver.cuDeviceGetName(name, 256, device)
    if status != 0:
        return GpuAnswer(gpu=None, reason=f"the first GPU answers {status}")
    return GpuAnswer(gpu=name.value.decode(errors="replace"), reason="")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """gpu: the first GPU's name. emulated: it is none; no number of it says anything of
    hardware."""

    gpu: str
    emulated: bool

    @property
    def backend(self) -> str:
        """What outputs name as their backend."""
        return "emulator" if self.emulated else self.gpu


def find_machine() -> Machine | str:
    """The GPU that this process would use, or why there is none."""
    answer = probe_gpu()
    if answer.gpu is None:
        return answer.reason
    return Machine(gpu=answer.gpu, emulated=EMULATED_MARK in answer.gpu)


def require_machine(module: str, argv: Sequence[str], backend: str) -> Machine:
    """Return the machine that `backend`, "auto", "gpu" or "emulator", asks for.

    Where that is the emulator and this process does not run on one, `python -m MODULE ARGV` is run
    on an emulator of its own, and its end is this process's end.
    Raises UnsupportedError where a GPU is asked for and there is none.
    """
    found = find_machine()
    if isinstance(found, Machine) and (found.emulated or backend != "emulator"):
        if found.emulated and backend == "gpu":
            raise UnsupportedError("a GPU is asked for, and this runs on the driver emulator")
        return found
    if backend == "gpu":
        raise UnsupportedError(f"no GPU on this machine: {found}")
    if not isinstance(found, Machine):
        print(f"no GPU on this machine ({found}): using the driver EMULATOR", file=sys.stderr)
    sys.exit(_run_emulated([sys.executable, "-m", module, *argv]))


def _run_emulated(command: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="gpustasis-emulator-") as folder:
        emulator = Emulator(path=Path(folder, "socket"))
        emulator.start()
        try:
            environment = emulator.environment(int(emulator.status()["api_version"]))
            return process.run(command, env=os.environ | environment, terminal=True).status
        finally:
            emulator.stop()


if __name__ == "__main__":
    found = _ask()
    print(json.dumps({"gpu": found.gpu, "reason": found.reason}))
