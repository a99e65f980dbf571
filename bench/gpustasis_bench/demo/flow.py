# SPDX-License-Identifier: Apache-2.0
"""The demo's course: a run left alone, one through our checkpoint, one through a stock one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from gpustasis.criu.find import Criu
from gpustasis.criu.plugin import Scalar
from gpustasis.criu.run import Settings, dump, restore
from gpustasis_bench.demo.report import Report, image_bytes, read_statistics, sum_of
from gpustasis_bench.demo.training import OnStep, Program, Result, Run
from gpustasis_bench.errors import DemoError
from gpustasis_bench.machine import adopt_orphans

_CALIBRATION_STEPS = 16
_LEAST_STEPS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Trip:
    """One way through a checkpoint. Times are criu's, in seconds; size is the checkpoint's, bytes.

    exact: the run computed the same bits as the one left alone. dumped, restored: the plugin's
    statistics of both stages.
    """

    exact: bool
    dump_seconds: float
    restore_seconds: float
    size: int
    dumped: dict[str, Any]
    restored: dict[str, Any]


class Demo:
    """The whole course, in the empty folder `work`, telling `console` what happens."""

    def __init__(self, program: Program, criu: Criu, work: Path, console: Console) -> None:
        self._program = program
        self._criu = criu
        self._work = work
        self._console = console
        adopt_orphans()

    def choose_steps(self, seconds: float) -> int:
        """How many steps take about `seconds` here, from a short run of its own."""
        result = self._run_alone("calibration", _CALIBRATION_STEPS)
        per_step = float(result.raw["step_seconds"])
        return max(_LEAST_STEPS, int(seconds / max(per_step, 1e-6)))

    def reference(self, steps: int) -> Result:
        """Train without interruption."""
        self._console.print(f"[bold]reference[/]: {steps} steps, left alone")
        return self._run_alone("reference", steps)

    def trip(
        self,
        name: str,
        reference: Result,
        plugin: Mapping[str, Scalar],
        options: Mapping[str, bool | int] | None = None,
    ) -> Trip:
        """Train, dump after a third of the steps (which kills the run), restore, train to the end.

        plugin: settings of the plugin that differ from its configuration. options: of criu.
        Raises DemoError or CriuError if any of it fails; nothing is left running then.
        """
        steps = int(reference.raw["steps"])
        mark = steps // 3
        images = self._work / name / "images"
        settings = Settings(plugin=plugin, options=options or {})
        self._console.print(f"[bold]{name}[/]: training to step {mark} and on")
        run = Run(self._program, self._work / name / "run", steps, mark)
        try:
            with _progress(self._console, "training", steps) as on_step:
                run.await_mark(on_step)
            images.mkdir()
            with self._console.status("criu dump"):
                dumped = dump(self._criu, run.pid, images, settings)
            run.await_killed()
            size = image_bytes(images)
            self._console.print(
                f"  dumped and killed in {dumped.seconds:.2f} s, {size / 2**20:.1f} MiB stored"
            )
            with self._console.status("criu restore"):
                restored = restore(self._criu, images, settings)
            self._console.print(f"  restored in {restored.seconds:.2f} s, training on")
            with _progress(self._console, "training", steps) as on_step:
                result = run.await_result(on_step)
        finally:
            run.kill()
        exact = result.computed == reference.computed and result.intact
        self._console.print(
            "  losses and weights: " + ("identical to the bit" if exact else "[red]DIFFERENT[/]")
        )
        return Trip(
            exact=exact,
            dump_seconds=dumped.seconds,
            restore_seconds=restored.seconds,
            size=size,
            dumped=read_statistics(images, "dump"),
            restored=read_statistics(images, "restore"),
        )

    def _run_alone(self, name: str, steps: int) -> Result:
        run = Run(self._program, self._work / name, steps)
        try:
            with _progress(self._console, "training", steps) as on_step:
                result = run.await_result(on_step)
        finally:
            run.kill()
        if not result.intact:
            raise DemoError("a run left alone lost data in GPU memory: this machine is not well")
        return result


def make_report(backend: str, criu: Criu, ours: Trip, stock: Trip) -> Report:
    """Put the two trips side by side."""
    return Report(
        backend=backend,
        criu=criu.version_text,
        restored_bit_exact=ours.exact and stock.exact,
        gpu_bytes=int(sum_of(ours.dumped, "staged_bytes")),
        stored_bytes=ours.size,
        zero_bytes=int(sum_of(ours.dumped, "zero", "plain_bytes")),
        lz4_bytes=int(sum_of(ours.dumped, "lz4", "plain_bytes")),
        raw_bytes=int(sum_of(ours.dumped, "raw", "plain_bytes")),
        dump_seconds=round(ours.dump_seconds, 3),
        restore_seconds=round(ours.restore_seconds, 3),
        stock_dump_seconds=round(stock.dump_seconds, 3),
        stock_restore_seconds=round(stock.restore_seconds, 3),
        stock_bytes=stock.size,
        driver_checkpoint_seconds=_driver_seconds(ours.dumped, "driver_checkpoint"),
        driver_restore_seconds=_driver_seconds(ours.restored, "driver_restore"),
    )


def prepare_work(work: Path) -> None:
    """Make `work` an empty folder. What an earlier demo left there goes."""
    if work.exists():
        shutil.rmtree(work)
    work.mkdir(parents=True)


def _driver_seconds(record: dict[str, Any], phase: str) -> float:
    return round(sum_of(record, "phases_ms", phase) / 1000, 3)


@contextmanager
def _progress(console: Console, what: str, steps: int) -> Iterator[OnStep]:
    bar = Progress(
        TextColumn("  {task.description}"),
        BarColumn(),
        TextColumn("step {task.completed} of {task.total}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task(what, total=steps)
        yield lambda done, _: bar.update(task, completed=done)
