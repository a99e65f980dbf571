"""`gpustasis verify CHECKPOINT`: check every byte of a checkpoint."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

import gpustasis
from gpustasis.cli import output
from gpustasis.cli.framework import Command
from gpustasis.cli.options import checkpoint_argument, mib, parent_option, threads_option
from gpustasis.errors import ImageError
from gpustasis.image.lock import allow_many_files
from gpustasis.image.verification import Verification


@click.command("verify", cls=Command)
@checkpoint_argument("checkpoint")
@parent_option
@threads_option
def command(checkpoint: Path, parents: tuple[Path, ...], threads: int) -> None:
    """Check every hash of the GPU images in CHECKPOINT, an image directory or an archive, and of
    their manifest.

    What an earlier checkpoint holds for this one is read and checked there; of an archive, where
    --parent says. Exits 0 if all is whole, 10 if anything is not; each problem is a line. CRIU's
    own images have no checksums and are not looked at.
    """
    allow_many_files()
    with output.bars() as update:
        found = gpustasis.open(checkpoint, parents).verify(threads=threads, on_progress=update)

    def show() -> None:
        for problem in found.problems:
            output.say(problem)
        if not found.problems:
            images = f"{found.images} image{'' if found.images == 1 else 's'}"
            output.say(
                f"{checkpoint}: manifest and {images} whole, "
                f"{mib(found.plain_bytes)} of GPU memory{_earlier_text(found)}"
            )

    output.answer({"checkpoint": checkpoint, **asdict(found)}, show)
    if found.problems:
        count = len(found.problems)
        raise ImageError(f"{checkpoint}: {count} problem{'s' if count > 1 else ''} found")


def _earlier_text(found: Verification) -> str:
    if found.outside_checkpoints:
        ids = ", ".join(found.outside_checkpoints)
        return (
            f"; {mib(found.outside_bytes)} of it not checked: not in the archive but in "
            f"checkpoint {ids}; --parent says where that is"
        )
    count = found.earlier_checkpoints
    if count == 0:
        return ""
    plural = "s" if count > 1 else ""
    return f", {mib(found.earlier_bytes)} of it in {count} earlier checkpoint{plural}"
