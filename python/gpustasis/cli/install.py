# SPDX-License-Identifier: Apache-2.0
"""`gpustasis install`, `uninstall` and `plugin-dir`: what is put on a host, and where it lies."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

from gpustasis import __version__
from gpustasis.cli import output
from gpustasis.cli.framework import Command
from gpustasis.criu.plugin import plugin_directory
from gpustasis.errors import UnsupportedError
from gpustasis.install import installation
from gpustasis.install.bundle import own
from gpustasis.install.change import Action, Change
from gpustasis.install.layout import advice, restart_advice
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


@click.command("install", cls=Command)
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
    changes: list[Change] = []
    with Root(directory, alone=not dry_run) as root:
        told = _told(changes)
        made = installation.install(root, __version__, python, told, dry_run, own(root))
        notes = [*advice(root, python), *restart_advice(root, made)]

    def show() -> None:
        for text in notes:
            output.say(text, mark=f"{'note':<11}", colour="yellow")

    output.answer(_fields(directory, dry_run, changes) | {"advice": notes}, show)


@click.command("uninstall", cls=Command)
@root_options
def uninstall(directory: Path, dry_run: bool) -> None:
    """Undo "gpustasis install".

    Files that were extended are as before, to the byte; what was made is removed, unless it was
    changed since: then it is left, and named. Checkpoints are not touched.
    """
    require_rights(directory, dry_run)
    changes: list[Change] = []
    with Root(directory, alone=not dry_run) as root:
        found = installation.uninstall(root, _told(changes), dry_run)
    output.answer(
        _fields(directory, dry_run, changes),
        lambda: None if found else output.say("nothing is installed there"),
    )


@click.command("plugin-dir", cls=Command)
def plugin_dir() -> None:
    """Print the directory to give to criu as --libdir. It holds the plugin and nothing else."""
    found = plugin_directory()
    output.answer({"directory": found}, lambda: output.exact(str(found)))


def _told(changes: list[Change]) -> Callable[[Change], None]:
    """What to call with each change when it is made."""

    def tell(change: Change) -> None:
        changes.append(change)
        output.say(
            f"{change.path}" + (f": {change.note}" if change.note else ""),
            mark=f"{change.action.value:<11}",
            colour=_COLOURS.get(change.action, "green"),
        )

    return tell


def _fields(directory: Path, dry_run: bool, changes: list[Change]) -> dict[str, object]:
    return {
        "root": directory,
        "dry_run": dry_run,
        "changes": [
            {"action": change.action.value, "path": str(change.path), "note": change.note}
            for change in changes
        ],
    }


def require_rights(directory: Path, dry_run: bool) -> None:
    """Raises UnsupportedError if this user cannot change the host."""
    if os.geteuid() != 0 and not dry_run and directory.resolve() == Path("/"):
        raise UnsupportedError("run it as root: it changes files under /etc, /usr and /var/lib")
