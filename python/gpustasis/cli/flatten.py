"""`gpustasis flatten CHECKPOINT -o OUT`: a copy of a checkpoint that needs no other."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape

from gpustasis.archive.flatten import flatten_archive
from gpustasis.archive.opened import Archive
from gpustasis.archive.opening import open_files
from gpustasis.cli.options import checkpoint_argument, parent_option
from gpustasis.image.flatten import Flattened, OnFile, flatten
from gpustasis.image.lock import allow_many_files


@click.command("flatten")
@checkpoint_argument("checkpoint")
@click.option(
    "-o",
    "--output",
    "out",
    required=True,
    type=click.Path(path_type=Path),
    help="Where the copy goes; must not exist, or be an empty directory.",
)
@parent_option
@click.option(
    "--threads", type=click.IntRange(0, 1024), default=0, help="0: as many as processors."
)
def command(checkpoint: Path, out: Path, parents: tuple[Path, ...], threads: int) -> None:
    """Copy CHECKPOINT to OUT, with all that it has in earlier checkpoints.

    CHECKPOINT is an image directory, or an archive of a container engine; of an archive, CRIU's
    image directory is written and the rest left out. Every chunk is checked on the way. OUT appears
    when it is whole; what a flatten that was killed has left beside it, .OUT.part, is used up by
    the next one.
    """
    allow_many_files()
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(escape(f"flattening {checkpoint}")) as status:
            done = _flatten(
                checkpoint,
                out,
                parents,
                threads,
                lambda name: status.update(escape(f"writing {name}")),
            )
    else:
        done = _flatten(checkpoint, out, parents, threads, None)
    click.echo(
        f"{out}: {done.images} image{'' if done.images == 1 else 's'}, "
        f"{done.image_bytes / 2**20:.1f} MiB, and {done.other_bytes / 2**20:.1f} MiB of other "
        f"files; {done.earlier_bytes / 2**20:.1f} MiB of GPU memory were in earlier checkpoints"
    )


def _flatten(
    checkpoint: Path, out: Path, parents: tuple[Path, ...], threads: int, on_file: OnFile | None
) -> Flattened:
    with open_files(checkpoint, parents) as files:
        if isinstance(files, Archive):
            return flatten_archive(files, out, on_file, threads=threads)
        return flatten(files.directory, out, on_file, threads=threads)
