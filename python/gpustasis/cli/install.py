"""`gpustasis install`: have the container runtimes of a host use gpustasis."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

from gpustasis import __version__
from gpustasis.errors import UnsupportedError
from gpustasis.install.change import Action, Change
from gpustasis.install.installation import install
from gpustasis.install.layout import advice
from gpustasis.install.root import Root

Decorated = TypeVar("Decorated", bound=Callable[..., object])

_COLOURS = {Action.UNCHANGED: None, Action.SKIP: None, Action.KEEP: "yellow"}


def root_options(function: Decorated) -> Decorated:
    """--root and --dry-run."""
    for option in (
        click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing."),
        click.option(
            "--root",
            "directory",
            type=click.Path(path_type=Path),
            default=Path("/"),
            metavar="DIR",
            help="The directory that is, or will be, the root of the host.  [default: /]",
        ),
    ):
        function = option(function)
    return function


@click.command("install")
@root_options
@click.option(
    "--python",
    default=sys.executable,
    metavar="PATH",
    help="The Python that the OCI hook runs on, as a path on the host.  [default: this one]",
)
def command(directory: Path, dry_run: bool, python: str) -> None:
    """Have the container runtimes of a host checkpoint GPU memory.

    Puts the plugin, CRIU's configuration, the OCI hook and drop-ins in place, and prints each file
    with what is done to it. Files of others are extended in a marked block, never overwritten. It
    can be run again, also with a newer version. "gpustasis uninstall" undoes it.
    """
    require_rights(directory, dry_run)
    with Root(directory) as root:
        install(root, __version__, python, print_change, dry_run)
        for text in advice(root, python):
            click.echo(f"{click.style('note', fg='yellow')}       {text}")


def print_change(change: Change) -> None:
    word = click.style(f"{change.action.value:<10}", fg=_COLOURS.get(change.action, "green"))
    click.echo(f"{word} {change.path}" + (f": {change.note}" if change.note else ""))


def require_rights(directory: Path, dry_run: bool) -> None:
    """Raises UnsupportedError if this user cannot change the host."""
    if os.geteuid() != 0 and not dry_run and directory.resolve() == Path("/"):
        raise UnsupportedError("run it as root: it changes files under /etc, /usr and /var/lib")
