# SPDX-License-Identifier: Apache-2.0
"""`python -m gpustasis_bench.demo`: the whole demo, from a checkout or a bundle."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NoReturn

import click
from rich.console import Console

from gpustasis.criu.find import find
from gpustasis_bench.demo.flow import Demo, make_report, prepare_work
from gpustasis_bench.demo.report import table_of, write_report
from gpustasis_bench.demo.training import main_program
from gpustasis_bench.errors import DemoError
from gpustasis_bench.machine import require_machine, run_command

_WORKING_SECONDS = {True: 10.0, False: 20.0}  # by emulated; a dump must begin before training ends


@click.command("demo")
@click.option(
    "--program",
    "folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path("build/demo"),
    show_default=True,
    help="Folder with train, train_kernels.ptx and train_kernels.so.",
)
@click.option(
    "--work",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("build/demo/work"),
    show_default=True,
    help="Folder for images and results; emptied first.",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("build/demo.json"),
    show_default=True,
    help="Where the JSON goes.",
)
@click.option("--backend", type=click.Choice(["auto", "gpu", "emulator"]), default="auto")
@click.option("--criu", "criu_program", help="The criu program, or a root that holds one.")
@click.option("--steps", type=click.IntRange(30), help="Training steps; default: enough.")
def command(
    folder: Path, work: Path, out: Path, backend: str, criu_program: str | None, steps: int | None
) -> None:
    """Train, checkpoint mid-way, kill, restore, compare to the bit; then the same by stock
    means."""
    machine = require_machine("gpustasis_bench.demo", sys.argv[1:], backend)
    criu = find(criu_program)
    console = Console(highlight=False)
    if machine.emulated:
        console.rule("[bold red]EMULATOR: no GPU takes part, no time below says anything of one")
    console.print(f"on {machine.gpu}, with criu {criu.version_text} ({criu.origin})")
    prepare_work(work)
    demo = Demo(main_program(folder, machine), criu, work, console)
    reference = demo.reference(steps or demo.choose_steps(_WORKING_SECONDS[machine.emulated]))
    ours = demo.trip("gpustasis", reference, {})
    stock = demo.trip("externalize=false", reference, {"externalize": "off"})
    report = make_report(machine.backend, criu, ours, stock)
    write_report(report, out)
    console.print(table_of(report, emulated=machine.emulated))
    console.print(f"written to {out}")
    if not report.restored_bit_exact:
        raise DemoError("a restored run did not compute what the run left alone did")


def main() -> NoReturn:
    """The command."""
    run_command(command, "demo")


if __name__ == "__main__":
    main()
