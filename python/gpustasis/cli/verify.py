"""`gpustasis verify CHECKPOINT`: check every byte of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn
from rich.progress import TransferSpeedColumn as SpeedColumn

from gpustasis.archive.opened import Archive
from gpustasis.archive.opening import open_files
from gpustasis.archive.verification import verify_archive
from gpustasis.cli.options import checkpoint_argument, parent_option
from gpustasis.errors import ImageError
from gpustasis.image.lock import allow_many_files
from gpustasis.image.verification import OnProgress, Verification, verify_directory


@click.command("verify")
@checkpoint_argument("checkpoint")
@parent_option
@click.option(
    "--threads", type=click.IntRange(0, 1024), default=0, help="0: as many as processors."
)
def command(checkpoint: Path, parents: tuple[Path, ...], threads: int) -> None:
    """Check every hash of the GPU images in CHECKPOINT, an image directory or an archive, and of
    their manifest.

    What an earlier checkpoint holds for this one is read and checked there; of an archive, where
    --parent says. Exits 0 if all is whole, 10 if anything is not; each problem is a line. CRIU's own images have
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
        found = _verify(checkpoint, parents, threads, _shown_on(bars))
    for problem in found.problems:
        click.echo(problem)
    if found.problems:
        count = len(found.problems)
        raise ImageError(f"{checkpoint}: {count} problem{'s' if count > 1 else ''} found")
    click.echo(
        f"{checkpoint}: manifest and {found.images} image{'' if found.images == 1 else 's'} whole, "
        f"{found.plain_bytes / 2**20:.1f} MiB of GPU memory{_earlier_text(found)}"
    )


def _verify(
    checkpoint: Path, parents: tuple[Path, ...], threads: int, on_progress: OnProgress
) -> Verification:
    with open_files(checkpoint, parents) as files:
        if isinstance(files, Archive):
            return verify_archive(files, threads, on_progress)
        return verify_directory(files.directory, threads, on_progress)


def _earlier_text(found: Verification) -> str:
    if found.outside_checkpoints:
        ids = ", ".join(found.outside_checkpoints)
        return (
            f"; {found.outside_bytes / 2**20:.1f} MiB of it not checked: not in the archive but in "
            f"checkpoint {ids}; --parent says where that is"
        )
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
