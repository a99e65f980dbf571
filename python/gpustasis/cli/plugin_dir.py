"""`gpustasis plugin-dir`: where criu finds the plugin."""

from __future__ import annotations

import click

from gpustasis.criu.plugin import plugin_directory


@click.command("plugin-dir")
def command() -> None:
    """Print the directory to give to criu as --libdir. It holds the plugin and nothing else."""
    click.echo(plugin_directory())
