"""`gpustasis uninstall`: undo `gpustasis install`."""

from __future__ import annotations

from pathlib import Path

import click

from gpustasis.cli.install import print_change, require_rights, root_options
from gpustasis.install.installation import uninstall
from gpustasis.install.root import Root


@click.command("uninstall")
@root_options
def command(directory: Path, dry_run: bool) -> None:
    """Undo "gpustasis install".

    Files that were extended are as before, to the byte; what was made is removed, unless it was
    changed since: then it is left, and named. Checkpoints are not touched.
    """
    require_rights(directory, dry_run)
    with Root(directory) as root:
        if not uninstall(root, print_change, dry_run):
            click.echo("nothing is installed there")
