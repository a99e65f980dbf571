# SPDX-License-Identifier: Apache-2.0
"""`gpustasis-gpu-check`: every step of gpu-check, on the GPU here or on the emulator."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

import click
from rich.console import Console

from gpustasis.errors import UnsupportedError
from gpustasis_bench.gpucheck.behaviour import PARTS
from gpustasis_bench.gpucheck.steps import STEPS, WORKING_SECONDS, Given, GpuCheck
from gpustasis_bench.machine import require_machine, run_command

_EXIT_FAILED = 1


@click.command("gpu-check")
@click.option(
    "--programs",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path("build/demo"),
    show_default=True,
    help="Folder with train, its kernels and torch_train.py.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("gpu-check-results"),
    show_default=True,
    help="Folder for the trace, the figures and the verdicts.",
)
@click.option("--criu", "criu_place", help="The criu program, or a root that holds one.")
@click.option("--emulator", is_flag=True, help="Check the emulator, whether there is a GPU or not.")
@click.option(
    "--torch-python",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Python with PyTorch and CUDA.  [default: python3 of the PATH]",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=1),
    help="How long each run is to train.  [default: 20 on a GPU, 6 on the emulator]",
)
@click.option(
    "--step",
    "steps",
    multiple=True,
    type=click.Choice(STEPS),
    help="Do only this; may be repeated.",
)
@click.option(
    "--part",
    "parts",
    multiple=True,
    type=click.Choice(PARTS),
    help="Do only this of the step behaviour; may be repeated.",
)
def command(
    programs: Path,
    out: Path,
    criu_place: str | None,
    emulator: bool,
    torch_python: Path | None,
    seconds: float | None,
    steps: tuple[str, ...],
    parts: tuple[str, ...],
) -> None:
    """Trace the driver's behaviour, then checkpoint and restore real programs on it."""
    backend = "emulator" if emulator else "gpu"
    machine = require_machine("gpustasis_bench.gpucheck", sys.argv[1:], backend)
    if os.geteuid() != 0:
        raise UnsupportedError("gpu-check needs root: it traces processes and runs criu")
    out.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False)
    if machine.emulated:
        console.rule("[bold red]EMULATOR: no GPU takes part, no finding below is one of hardware")
    given = Given(
        programs=programs.absolute(),
        out=out.absolute(),
        criu=criu_place,
        torch_python=torch_python,
        seconds=seconds or WORKING_SECONDS[machine.emulated],
        parts=parts or PARTS,
    )
    good = GpuCheck(machine, given, console).run(steps or STEPS)
    console.print(f"trace, figures and verdicts are in {out}")
    if not good:
        sys.exit(_EXIT_FAILED)


def main() -> NoReturn:
    """The command."""
    run_command(command, "gpu-check")


if __name__ == "__main__":
    main()
