"""`cudackpt uninstall`: undo `cudackpt install`."""

from __future__ import annotations

from pathlib import Path

import click

from cudackpt.cli.install import print_change, require_rights, root_options
from cudackpt.install.installation import uninstall
from cudackpt.install.root import Root


@click.command("uninstall")
@root_options
def command(directory: Path, dry_run: bool) -> None:
    """Undo "cudackpt install".

    Files that were extended are as before, to the byte; what was made is removed, unless it was
    changed since: then it is left, and named. Checkpoints are not touched.
    """
    require_rights(directory, dry_run)
    with Root(directory) as root:
        if not uninstall(root, print_change, dry_run):
            click.echo("nothing is installed there")
