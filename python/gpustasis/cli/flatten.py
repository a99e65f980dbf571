# SPDX-License-Identifier: Apache-2.0
"""`gpustasis flatten CHECKPOINT -o OUT`: a copy of a checkpoint that needs no other."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

import gpustasis
from gpustasis.cli import output
from gpustasis.cli.framework import Command
from gpustasis.cli.options import checkpoint_argument, parent_option, threads_option
from gpustasis.image.directory import allow_many_files
from gpustasis.text import mib


@click.command("flatten", cls=Command)
@checkpoint_argument("checkpoint")
@click.option(
    *("-o", "--output", "out"),
    required=True,
    type=click.Path(path_type=Path),
    help="Where the copy goes; must not exist, or be an empty directory.",
)
@click.option(
    "--layout",
    type=click.Choice(["criu"]),
    help='criu: what layout = "packed" has packed is unpacked, as CRIU wrote it.',
)
@parent_option
@threads_option
def command(
    checkpoint: Path, out: Path, layout: str | None, parents: tuple[Path, ...], threads: int
) -> None:
    """Copy CHECKPOINT to OUT, with all that it has in earlier checkpoints.

    CHECKPOINT is an image directory, or an archive of a container engine; of an archive, CRIU's
    image directory is written and the rest left out. Every chunk is checked on the way. OUT appears
    when it is whole; what a flatten that was killed has left beside it, .OUT.part, is used up by
    the next one.
    """
    allow_many_files()
    with output.status(f"flattening {checkpoint}") as update:
        done = gpustasis.open(checkpoint, parents).flatten(
            out,
            threads=threads,
            unpacked=layout == "criu",
            on_file=lambda name: update(lambda: f"writing {name}"),
        )
    output.answer(
        {"checkpoint": checkpoint, "directory": out, **asdict(done)},
        lambda: output.say(
            f"{out}: {done.images} image{'' if done.images == 1 else 's'}, "
            f"{mib(done.image_bytes)}, and {mib(done.other_bytes)} of other files; "
            f"{mib(done.earlier_bytes)} of memory were in earlier checkpoints"
        ),
    )
