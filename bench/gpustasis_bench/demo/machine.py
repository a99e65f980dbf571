"""Where the demo runs: on a real GPU when there is one, else on the driver emulator."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpustasis import process
from gpustasis.emulator import Emulator
from gpustasis.errors import UnsupportedError
from gpustasis_bench.demo.gpu_probe import probe_gpu
from gpustasis_bench.demo.training import Program, c_program

EMULATED_MARK = "emulated"  # every GPU of the driver emulator has this word in its name


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """gpu: the first GPU's name. emulated: it is none; no number of it says anything of hardware."""

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


def main_program(folder: Path, machine: Machine) -> Program:
    """The training program as the demo runs it: 256 MiB on the emulator, 2 GiB on a GPU."""
    if machine.emulated:
        return c_program(folder, "train_kernels.so", data_mib=64, pool_mib=176, hidden=768)
    return c_program(folder, "train_kernels.ptx", data_mib=512, pool_mib=1280, hidden=2048)
