"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

from gpustasis.criu.plugin import Scalar
from gpustasis.criu.statistics import Statistics

Decorated = TypeVar("Decorated", bound=Callable[..., object])


def checkpoint_argument(name: str) -> Callable[[Decorated], Decorated]:
    """A checkpoint: an image directory or an archive."""
    kind = click.Path(exists=True, path_type=Path)
    return click.argument(name, type=kind, metavar=name.upper())


def parent_option(function: Decorated) -> Decorated:
    """--parent, as often as needed; the parameter is `parents`."""
    return click.option(
        "--parent",
        "parents",
        multiple=True,
        metavar="DIR|ARCHIVE",
        type=click.Path(exists=True, path_type=Path),
        help="Of an archive: where an earlier checkpoint is that it is built on. Several times, "
        "for each archive of the chain; a directory is followed to its own parents.",
    )(function)


SHELL_JOB = {"auto": None, "yes": True, "no": False}


def criu_options(function: Decorated) -> Decorated:
    """--criu, --shell-job, --work-dir, --threads and the arguments for criu after --."""
    for option in (
        click.argument("extra", nargs=-1, type=click.UNPROCESSED, metavar="[-- CRIU-ARGS...]"),
        click.option(
            "--criu",
            "criu_program",
            metavar="PATH",
            help="The criu program, or a root directory that holds one.",
        ),
        click.option(
            "--shell-job",
            type=click.Choice(list(SHELL_JOB)),
            default="auto",
            show_default=True,
            help="Whether the job belongs to a shell's session.",
        ),
        click.option(
            "--work-dir",
            type=click.Path(file_okay=False, exists=True, path_type=Path),
            help="Where criu puts its log and statistics.  [default: the image directory]",
        ),
        click.option(
            "--threads",
            type=click.IntRange(0, 1024),
            help="Threads that move GPU memory; 0: one for each processor.",
        ),
    ):
        function = option(function)
    return function


def plugin_settings(**values: Scalar | None) -> dict[str, Scalar]:
    """The settings that were given on the command line."""
    return {key: value for key, value in values.items() if value is not None}


def describe(statistics: Statistics | None) -> str:
    """What became of GPU memory, in a clause for the end of a line."""
    if statistics is None or not statistics.tasks:
        return "no CUDA process in it"
    count = len(statistics.tasks)
    text = f"{count} CUDA process{'es' if count > 1 else ''}"
    text += f", {statistics.staged_bytes / 2**20:.1f} MiB of GPU memory"
    if statistics.same_bytes:
        text += f", {statistics.same_bytes / 2**20:.1f} MiB of it in earlier checkpoints already"
    if any(task.externalized for task in statistics.tasks):
        text += f" stored in {statistics.file_bytes / 2**20:.1f} MiB"
    return text + (" (emulator: no real GPU)" if statistics.emulated else "")
