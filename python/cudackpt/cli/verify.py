"""`cudackpt verify DIR`: check every byte of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn
from rich.progress import TransferSpeedColumn as SpeedColumn

from cudackpt.errors import ImageError
from cudackpt.image.lock import allow_many_files
from cudackpt.image.verification import OnProgress, Verification, verify_directory


@click.command("verify")
@click.argument("directory", type=click.Path(file_okay=False, exists=True, path_type=Path))
@click.option(
    "--threads", type=click.IntRange(0, 1024), default=0, help="0: as many as processors."
)
def command(directory: Path, threads: int) -> None:
    """Check every hash of the GPU images in DIRECTORY and of their manifest.

    What an earlier checkpoint holds for this one is read and checked there. Exits 0 if all is whole, 10 if anything is not; each problem is a line. CRIU's own images have
    no checksums and are not looked at.
    """
    allow_many_files()
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        SpeedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bars:
        found = verify_directory(directory, threads, _shown_on(bars))
    for problem in found.problems:
        click.echo(problem)
    if found.problems:
        count = len(found.problems)
        raise ImageError(f"{directory}: {count} problem{'s' if count > 1 else ''} found")
    click.echo(
        f"{directory}: manifest and {found.images} image{'' if found.images == 1 else 's'} whole, "
        f"{found.plain_bytes / 2**20:.1f} MiB of GPU memory{_earlier_text(found)}"
    )


def _earlier_text(found: Verification) -> str:
    count = found.earlier_checkpoints
    if count == 0:
        return ""
    plural = "s" if count > 1 else ""
    return f", {found.earlier_bytes / 2**20:.1f} MiB of it in {count} earlier checkpoint{plural}"


def _shown_on(bars: Progress) -> OnProgress:
    """A bar for each file, made when it is first heard of."""
    shown: dict[str, TaskID] = {}

    def show(name: str, done: int, total: int) -> None:
        if name not in shown:
            shown[name] = bars.add_task(name, total=total)
        bars.update(shown[name], completed=done)

    return show
