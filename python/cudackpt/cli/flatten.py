"""`cudackpt flatten DIR -o OUT`: a copy of a checkpoint that needs no other."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape

from cudackpt.image.flatten import flatten
from cudackpt.image.lock import allow_many_files


@click.command("flatten")
@click.argument("directory", type=click.Path(file_okay=False, exists=True, path_type=Path))
@click.option(
    "-o",
    "--output",
    "out",
    required=True,
    type=click.Path(path_type=Path),
    help="Where the copy goes; must not exist, or be an empty directory.",
)
@click.option(
    "--threads", type=click.IntRange(0, 1024), default=0, help="0: as many as processors."
)
def command(directory: Path, out: Path, threads: int) -> None:
    """Copy the checkpoint in DIRECTORY to OUT, with all that it has in earlier checkpoints.

    Every chunk is checked on the way. OUT appears when it is whole; what a flatten that was killed
    has left beside it, .OUT.part, is used up by the next one.
    """
    allow_many_files()
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(escape(f"flattening {directory}")) as status:
            done = flatten(
                directory,
                out,
                lambda name: status.update(escape(f"writing {name}")),
                threads=threads,
            )
    else:
        done = flatten(directory, out, threads=threads)
    click.echo(
        f"{out}: {done.images} image{'' if done.images == 1 else 's'}, "
        f"{done.image_bytes / 2**20:.1f} MiB, and {done.other_bytes / 2**20:.1f} MiB of other "
        f"files; {done.earlier_bytes / 2**20:.1f} MiB of GPU memory were in earlier checkpoints"
    )
