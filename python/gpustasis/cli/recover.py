"""`gpustasis recover PID [-D DIR]`: bring back a task left behind by a criu that died."""

from __future__ import annotations

import os
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from gpustasis.criu.plugin import driver_libraries
from gpustasis.driver import Driver
from gpustasis.image.lock import allow_many_files
from gpustasis.recovery import find_images, recover


@click.command("recover")
@click.argument("pid", type=click.IntRange(2))
@click.option(
    "-D",
    "--images-dir",
    "images",
    default=None,
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    help="Where the dump that was broken off was writing to; found by itself if that dump has taken "
    "memory out of the process.",
)
@click.option(
    "--threads",
    type=click.IntRange(0, 1024),
    default=0,
    help="Threads that put GPU memory back; 0: one for each processor.",
)
def command(pid: int, images: Path | None, threads: int) -> None:
    """Bring back process PID, whose dump was broken off by criu's death.

    Puts back the GPU memory that was taken out already, after checking every byte of it, and has
    the driver restore and unlock the process. A process found locked or checkpointed by the dump
    is left so. For a tree, run it for each CUDA process.
    """
    allow_many_files()
    library, _ = driver_libraries(os.environ)
    driver = Driver(library)
    bar = Progress(
        TextColumn("putting GPU memory back"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        console=Console(stderr=True),
        transient=True,
        disable=not Console(stderr=True).is_terminal,
    )
    with bar:
        row = bar.add_task("", total=None)
        done = recover(
            pid,
            find_images(pid) if images is None else images,
            driver,
            threads=threads,
            on_progress=lambda count: bar.update(row, completed=count),
        )
    text = f"process {pid} {done.outcome.value}"
    if done.refilled_bytes:
        text += f" ({done.refilled_bytes / 2**20:.1f} MiB of GPU memory put back)"
    click.echo(text)
