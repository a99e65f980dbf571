"""Command line. Each module here is one command; this one dispatches and maps errors."""

from __future__ import annotations

import importlib
import logging
import sys
from typing import NoReturn

import click

from gpustasis import __version__
from gpustasis.errors import CheckpointError

# Name -> one line of help. Modules are imported when their command runs: `--help` stays fast.
COMMANDS: dict[str, str] = {
    "build-image": "make an OCI image of a checkpoint archive",
    "checkpoint": "dump a process tree, GPU memory included",
    "containerd": "checkpoint a container of containerd's, through CRI",
    "diff": "say what changed in GPU memory between two checkpoints",
    "doctor": "say what this machine lacks and what to do about it",
    "emulator": "run programs on emulated GPUs, for tests and trials",
    "flatten": "copy a checkpoint so that it needs no other",
    "install": "have the container runtimes of a host use gpustasis",
    "inspect": "say what a checkpoint holds",
    "kubelet": "checkpoint containers of a cluster, through the kubelets",
    "plugin-dir": "print the directory to give to criu as --libdir",
    "podman": "checkpoint and restore Podman's containers",
    "prune": "remove old checkpoints from a directory of them",
    "recover": "bring back a task left behind by a criu that died",
    "restore": "restore a process tree from a checkpoint",
    "uninstall": "undo install",
    "verify": "check every byte of a checkpoint",
    "watch": "show how fast a job writes to its memory, and what follows",
}


class _Group(click.Group):
    """Commands by module name: gpustasis.cli.<name>.command."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"gpustasis.cli.{cmd_name.replace('-', '_')}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted(COMMANDS.items()))


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
@click.option("-v", "--verbose", count=True, help="Log more; twice: debug.")
def cli(verbose: int) -> None:
    """Checkpoint and restore GPU workloads, transparently, with CRIU."""
    level = (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)]
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")


def main() -> NoReturn:
    """Run the command line and exit: 0, a CheckpointError's exit_code, or click's own 2."""
    try:
        cli.main(prog_name="gpustasis", standalone_mode=True)
    except CheckpointError as exc:
        print(f"gpustasis: {exc}", file=sys.stderr)
        sys.exit(exc.exit_code)
    sys.exit(0)
