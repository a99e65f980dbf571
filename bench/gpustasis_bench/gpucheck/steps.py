# SPDX-License-Identifier: Apache-2.0
"""The steps of gpu-check. Each passes, fails with a reason, or is not possible here with a
reason."""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Any

from rich.console import Console

from gpustasis import process
from gpustasis.criu.find import Criu, find
from gpustasis.criu.log import criu_errors
from gpustasis.criu.run import check
from gpustasis.errors import CheckpointError, CriuError, DriverError
from gpustasis_bench.demo.flow import Demo, make_report, prepare_work
from gpustasis_bench.demo.report import table_of, write_report
from gpustasis_bench.demo.training import Program, main_program
from gpustasis_bench.gpucheck import target
from gpustasis_bench.gpucheck.behaviour import PARTS, fill_behaviour, memories
from gpustasis_bench.gpucheck.caller import Caller
from gpustasis_bench.gpucheck.checkpoints import Checkpoints
from gpustasis_bench.gpucheck.trace import Trace, fill_trace
from gpustasis_bench.machine import Machine

STEPS = ("driver", "trace", "behaviour", "criu", "C program", "checkpoints", "PyTorch")

WORKING_SECONDS = {True: 6.0, False: 20.0}  # by emulated: how long a run is to train

_OLDEST_API = 12080  # CUDA 12.8, driver 570: the first with the public checkpoint calls
_IMPORT_SECONDS = 300.0  # from a cold disk, PyTorch takes its time
# By name: variables, and options of demo/torch_train.py.
_TORCH_WORKLOADS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "plain": ((), ()),
    "expandable segments": (("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",), ()),
    "cudaMallocAsync": (("PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync",), ()),
    "CUDA graph": ((), ("--graph",)),
    "torch.compile": (("TORCHINDUCTOR_COMPILE_THREADS=1",), ("--compile",)),
    "DataLoader": ((), ("--workers", "2")),
}
_SHARED_FILES = {"ghost-limit": 512 << 20}  # bytes: batches of workers lie in files without names
_AS_ITSELF = ("/usr/bin/env", "-u", "PYTHONPATH")  # gpu-check's modules may be for another Python


class Verdict(Enum):
    """What became of a step, in the words that are printed."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_POSSIBLE = "not possible here"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A step's name and what became of it. reason: empty if it passed."""

    step: str
    verdict: str
    reason: str


class NotPossible(Exception):
    """A step cannot be done on this machine; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What the caller chose.

    programs: folder with train, its kernels and torch_train.py. out: folder for the results.
    criu: as find() takes it. torch_python: a Python with PyTorch; None: python3 of the PATH.
    seconds: how long each run is to train. parts: those of behaviour.PARTS to do.
    """

    programs: Path
    out: Path
    criu: str | None
    torch_python: Path | None
    seconds: float
    parts: Collection[str] = PARTS


class GpuCheck:
    """All steps in order, on one machine."""

    def __init__(self, machine: Machine, given: Given, console: Console) -> None:
        self._machine = machine
        self._given = given
        self._programs = given.programs
        self._out = given.out
        self._console = console
        self._criu: Criu | None = None
        self.findings: list[Finding] = []

    def run(self, steps: Collection[str] = STEPS) -> bool:
        """Do these of STEPS, whatever becomes of the others. True if none failed."""
        bodies = (
            self._check_driver,
            self._trace,
            self._behaviour,
            self._check_criu,
            self._c_program,
            self._checkpoints,
            self._pytorch,
        )
        for name, body in zip(STEPS, bodies, strict=True):
            if name in steps:
                self._do(name, body)
        record = {
            "backend": self._machine.backend,
            "gpu": self._machine.gpu,
            "steps": [asdict(finding) for finding in self.findings],
        }
        _write_json(self._out / "gpu-check.json", record)
        return all(finding.verdict != Verdict.FAILED.value for finding in self.findings)

    def _do(self, name: str, body: Callable[[], None]) -> None:
        verdict, reason = Verdict.PASSED, ""
        try:
            body()
        except NotPossible as exc:
            verdict, reason = Verdict.NOT_POSSIBLE, str(exc)
        except (CheckpointError, OSError) as exc:
            verdict, reason = Verdict.FAILED, str(exc)
        self.findings.append(Finding(step=name, verdict=verdict.value, reason=reason))
        tail = f" ({reason})" if reason else ""
        where = " [emulator]" if self._machine.emulated else ""
        self._console.print(f"{name}{where}: {verdict.value}{tail}", markup=False, soft_wrap=True)

    def _check_driver(self) -> None:
        with Caller() as caller:
            version = caller.load()["version"]
        if version < _OLDEST_API:
            raise DriverError(f"the driver has API {version}, {_OLDEST_API} (driver 570) is needed")

    def _trace(self) -> None:
        module = "train_kernels.so" if self._machine.emulated else "train_kernels.ptx"
        program = target.Program(path=self._programs / "train", module=self._programs / module)
        trace: Trace = {}
        try:
            fill_trace(trace, program, emulated=self._machine.emulated)
        finally:
            _write_json(self._out / "trace.json", trace)

    def _behaviour(self) -> None:
        machine, path = self._machine, self._out / "behaviour.json"
        module = self._programs / "spin.so" if machine.emulated else None  # a GPU's is PTX
        with Caller() as caller:
            record: dict[str, Any] = {
                "backend": machine.backend,
                "driver": caller.driver_version(),
                "driver_api": caller.load()["version"],
                "persistence_mode": caller.persistence_mode(),
                "kernel": platform.release(),
                "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            }

        def tell(line: str) -> None:
            self._console.print(line, markup=False, soft_wrap=True)

        def save() -> None:
            _write_json(path, record)

        fill_behaviour(
            record,
            self._given.parts,
            emulated=machine.emulated,
            module=module,
            save=save,
            tell=tell,
        )
        # A call that fails is a finding. That memory is lost without a word is none.
        wrong = [f"{where}: {said}" for where, said in memories(record) if said.startswith("wrong")]
        if wrong:
            raise DriverError(f"memory is not what it was: {'; '.join(wrong)}")

    def _check_criu(self) -> None:
        criu = find(self._given.criu)
        ended = check(criu)
        if ended.status != 0:
            said = "; ".join(criu_errors(ended.output)) or ended.output.strip()[-200:]
            raise NotPossible(f"criu {criu.version_text} check, {ended.ending}: {said}")
        self._criu = criu

    def _c_program(self) -> None:
        demo, criu = self._demo("c-program", main_program(self._programs, self._machine))
        reference = demo.reference(demo.choose_steps(self._given.seconds))
        ours = demo.trip("gpustasis", reference, {})
        stock = demo.trip("stock", reference, {"externalize": "off"})
        report = make_report(self._machine.backend, criu, ours, stock)
        write_report(report, self._out / "demo.json")
        self._console.print(table_of(report, emulated=self._machine.emulated))
        if not report.restored_bit_exact:
            raise CriuError("the restored program did not compute the same bits")

    def _checkpoints(self) -> None:
        program = main_program(self._programs, self._machine)
        demo, criu = self._demo("checkpoints", program)
        reference = demo.reference(demo.choose_steps(self._given.seconds))
        found: dict[str, object] = {"backend": self._machine.backend, "criu": criu.version_text}
        made = Checkpoints(program, criu, self._out / "checkpoints", reference)
        try:
            for name, body in (
                ("left running", made.left_running),
                ("two processes", made.two_processes),
                ("killed dumps", made.killed_dumps),
            ):
                found[name] = body()
                self._console.print(f"  {name}: identical to the bit")
        finally:
            _write_json(self._out / "checkpoints.json", found)

    def _pytorch(self) -> None:
        """Training loops as people write them, each against a run of its own that is left alone."""
        if self._machine.emulated:
            raise NotPossible("PyTorch needs more of a driver than the emulator has")
        python = _python_with_torch(self._given.torch_python)
        script = str(self._programs / "torch_train.py")
        failed = []
        for name, (environ, options) in _TORCH_WORKLOADS.items():
            program = Program(argv=(*_AS_ITSELF, *environ, python, script, *options))
            try:
                demo, _ = self._demo(f"pytorch {name}", program)
                reference = demo.reference(demo.choose_steps(self._given.seconds))
                if not demo.trip("gpustasis", reference, {}, _SHARED_FILES).exact:
                    raise CriuError("it did not compute the same bits")
            except (CheckpointError, OSError) as exc:
                failed.append(f"{name}: {exc}")
        if failed:
            raise CriuError("; ".join(failed))

    def _demo(self, name: str, program: Program) -> tuple[Demo, Criu]:
        if self._criu is None:
            raise NotPossible("there is no criu that works here")
        work = self._out / name
        prepare_work(work)
        return Demo(program, self._criu, work, self._console), self._criu


def _python_with_torch(named: Path | None) -> str:
    python = str(named) if named else shutil.which("python3")
    if python is None:
        raise NotPossible("there is no python3 in the PATH; --torch-python names one")
    question = "import torch; assert torch.cuda.is_available(), 'it has no CUDA here'"
    ended = process.run([*_AS_ITSELF, python, "-c", question], timeout_s=_IMPORT_SECONDS)
    if ended.status != 0:
        said = ended.output.strip().splitlines() or ["it ended silently"]
        raise NotPossible(f"PyTorch of {python}: {said[-1]}")
    return python


def _write_json(path: Path, value: object) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    part.replace(path)
