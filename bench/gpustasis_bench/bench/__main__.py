# SPDX-License-Identifier: Apache-2.0
"""`gpustasis-bench`: gpustasis beside stock CRIU, on this machine."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import NoReturn

import click
from rich.console import Console
from rich.table import Table

from gpustasis.criu.find import Criu, find, find_all
from gpustasis.errors import CheckpointError
from gpustasis_bench.bench.contenders import CONTENDERS, DIRECT, RATE_SETS, STAGED
from gpustasis_bench.bench.content import WORKLOADS, require_contents
from gpustasis_bench.bench.downtime import MOST_GPUS
from gpustasis_bench.bench.markdown import write_page
from gpustasis_bench.bench.plot import require_plot, write_plot
from gpustasis_bench.bench.report import write_json
from gpustasis_bench.bench.suite import Options, Suite
from gpustasis_bench.machine import require_machine, run_command

_TMPFS = "/dev/shm"  # noqa: S108 - the medium that is measured; each run makes a folder of its own
_WORK = Path("build/bench")
_FOLDER = click.Path(file_okay=False, path_type=Path)


class _Names(click.ParamType[list[str]]):
    """Names separated by commas, of those there are."""

    name = "NAME,..."

    def __init__(self, known: list[str]) -> None:
        self._known = known

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[str]:
        if isinstance(value, list):
            return value
        names = [name.strip() for name in str(value).split(",")]
        for name in names:
            if name not in self._known:
                self.fail(f"{name!r} is none of {', '.join(self._known)}", param, ctx)
        return list(dict.fromkeys(names))


@click.command("gpustasis-bench")
@click.option("--workloads", type=_Names(list(WORKLOADS)), default=",".join(WORKLOADS))
@click.option("--contenders", type=_Names(list(CONTENDERS)), default=",".join(CONTENDERS))
@click.option("--media", type=_Names(["tmpfs", "disk"]), default="tmpfs,disk", show_default=True)
@click.option("--pairs", type=click.IntRange(1), default=5, show_default=True)
@click.option(
    "--size",
    "size_gib",
    type=click.FloatRange(min=1 / 64),
    default=2.0,
    show_default=True,
    help="GiB of GPU memory of each workload; of cpu, of CPU memory; of mixed, of both together.",
)
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--tmpfs-dir", type=_FOLDER, default=Path(_TMPFS), show_default=True)
@click.option("--disk-dir", type=_FOLDER, default=_WORK / "disk", show_default=True)
@click.option(
    "--work",
    type=_FOLDER,
    default=_WORK,
    show_default=True,
    help="Where contents are kept, and programs.",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("build/bench.json"),
    show_default=True,
)
@click.option(
    "--docs",
    type=click.Path(dir_okay=False, exists=True, path_type=Path),
    help="A page whose part between the marks is replaced by the results; the plot goes beside it.",
)
@click.option("--chains/--no-chains", default=True, help="Checkpoints on top of others (qlora).")
@click.option(
    "--running/--no-running", default=True, help="Dumps that leave the job running: its downtime."
)
@click.option("--trees/--no-trees", default=True, help="Trees of processes without CUDA (cpu).")
@click.option("--limits/--no-limits", default=True, help="Bandwidths of the machine.")
@click.option(
    "--compare/--no-compare", default=True, help="Dumps and restores of each workload, in turns."
)
@click.option(
    "--downtime/--no-downtime",
    default=True,
    help="Jobs left running: on 1 to 8 emulated GPUs, finetuning, and qlora's second checkpoint.",
)
@click.option(
    "--rates",
    type=_Names(list(RATE_SETS)),
    default=f"{STAGED},{DIRECT}",
    show_default=True,
    help="Of downtime: how GPU memory is copied, at published rates; off: as fast as memory.",
)
@click.option(
    "--gpus",
    type=click.IntRange(1, MOST_GPUS),
    default=MOST_GPUS,
    show_default=True,
    help="Of downtime by GPUs and tasks: on how many emulated GPUs at most.",
)
@click.option(
    "--scale",
    type=click.FloatRange(min=0, min_open=True),
    help="Of downtime by GPUs and tasks: what rates are divided by.  [default: 4 GiB / the memory]",
)
@click.option("--backend", type=click.Choice(["auto", "gpu", "emulator"]), default="auto")
@click.option("--criu", "criu_program", help="A criu, or a root with one.  [default: the newest]")
def command(
    workloads: list[str],
    contenders: list[str],
    media: list[str],
    pairs: int,
    size_gib: float,
    seed: int,
    tmpfs_dir: Path,
    disk_dir: Path,
    work: Path,
    out: Path,
    docs: Path | None,
    chains: bool,
    running: bool,
    trees: bool,
    limits: bool,
    compare: bool,
    downtime: bool,
    rates: list[str],
    gpus: int,
    scale: float | None,
    backend: str,
    criu_program: str | None,
) -> None:
    """Measure dumps and restores of GPU memory as programs have it, ours and stock CRIU's in turns.

    Without a GPU it runs on the driver emulator, and says so. The contents of inference, finetuning
    and qlora are computed with Debian's PyTorch, in the root that `ci/test-root torch` makes.
    """
    places = {"tmpfs": tmpfs_dir, "disk": disk_dir}
    options = Options(
        workloads=tuple(WORKLOADS[name] for name in workloads),
        contenders=tuple(CONTENDERS[name] for name in contenders),
        media={name: places[name] for name in media},
        pairs=pairs,
        size=int(size_gib * 2**30),
        seed=seed,
        chains=chains,
        limits=limits,
        running=running,
        trees=trees,
        compare=compare,
        downtime=downtime,
        rates=tuple(rates),
        gpus=gpus,
        scale=scale,
        tmpfs=tmpfs_dir,
        work=work.absolute(),
        out=out,
    )
    require_contents(list(options.workloads))
    if docs is not None:
        require_plot()
    criu = _newest(criu_program)
    # A process that only waits for another one on the emulator lets that one clean up.
    signal.signal(signal.SIGINT, lambda *_: None)
    machine = require_machine("gpustasis_bench.bench", sys.argv[1:], backend)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    console = Console(highlight=False)
    if machine.emulated:
        console.rule("[bold red]EMULATOR: no GPU takes part")
    console.print(f"on {machine.gpu}, with criu {criu.version_text} ({criu.origin})")
    suite = Suite(options, criu, machine, lambda line: console.print(f"  {line}", markup=False))
    report = suite.run()
    whole = report.as_dict(complete=not report.failures)
    write_json(whole, out)
    if docs is not None:
        plot = docs.with_suffix(".svg")
        if whole["results"]:  # cpu, mixed and sealed are tables
            write_plot(whole, plot)
        write_page(whole, docs, plot)
    console.print(_bounds_table(whole["bounds"]))
    console.print(f"written to {out}" + (f" and {docs}" if docs else ""))
    if report.failures:
        failures = "\n  ".join(report.failures)
        raise CheckpointError(f"{len(report.failures)} measurements failed:\n  {failures}")


def _newest(program: str | None) -> Criu:
    """The same criu for all, and the newest, which can do most."""
    usable = [found for found in find_all(explicit=program) if found.usable]
    return max(usable, key=lambda found: found.version) if usable else find(program)


def _bounds_table(bounds: list[dict[str, object]]) -> Table:
    table = Table(title="Bounds; one that is missed is a finding, not an error")
    for title in ("what", "medium", "bound", "measured", "met", "possible here"):
        table.add_column(title)
    for bound in bounds:
        best = (
            ""
            if bound["best"] is None
            else f"{bound['in_turn']}; {bound['best']}: {bound['least_of']}"
        )
        met = "yes" if bound["met"] else "[bold red]NO[/]"
        if bound["proven"] is False:
            met += ", not proven"
        if bound["not_measured"] is not None:
            met = f"not measured: {bound['not_measured']}"
        measured = "-" if bound["measured"] is None else f"{bound['measured']:g}"
        table.add_row(
            str(bound["name"]), str(bound["medium"]), str(bound["bound"]), measured, met, best
        )
    return table


def main() -> NoReturn:
    """The command."""
    run_command(command, "gpustasis-bench")


if __name__ == "__main__":
    main()
