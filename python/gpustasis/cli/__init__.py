# SPDX-License-Identifier: Apache-2.0
"""The command line. Each module here holds commands; this one finds them."""

from __future__ import annotations

import importlib
import logging
from typing import NoReturn

import click

from gpustasis import __version__
from gpustasis.cli import output
from gpustasis.cli.framework import Group, run

# Name -> the command, as module.name in this package, and one line of help. Modules are imported
# when a command of theirs runs: `--help` and completion stay fast.
COMMANDS: dict[str, tuple[str, str]] = {
    "agent": ("agent.command", "have one daemon per node make checkpoints, and ask it"),
    "arena": ("arena.command", "look after the memory that checkpoints go into first"),
    "build-image": ("build_image.command", "make an OCI image of a checkpoint archive"),
    "checkpoint": ("tasks.checkpoint", "dump a process tree, GPU memory included"),
    "containerd": ("containerd.command", "checkpoint a container of containerd's, through CRI"),
    "crio": ("containerd.crio", "checkpoint a container of CRI-O's, through CRI"),
    "diff": ("diff.command", "say what changed in memory between two checkpoints"),
    "doctor": ("doctor.command", "say what this machine lacks and what to do about it"),
    "drain": ("drain.drain", "bring a checkpoint that is in memory to its directory"),
    "emulator": ("emulator.command", "run programs on emulated GPUs, for tests and trials"),
    "flatten": ("flatten.command", "copy a checkpoint so that it needs no other"),
    "inspect": ("inspect.command", "say what a checkpoint holds"),
    "install": ("install.command", "have the container runtimes of a host use gpustasis"),
    "job": ("job.command", "checkpoint and restore jobs of several ranks: all, or none"),
    "kubelet": ("kubelet.command", "checkpoint containers of a cluster, through the kubelets"),
    "list": ("list.command", "list the checkpoints in a directory of them"),
    "migrate": ("streams.migrate", "move a process tree to another host"),
    "peer": ("peer.command", "keep copies of checkpoints in the memory of a neighbour"),
    "plan": ("plan.command", "say how often to take checkpoints, and what they cost and save"),
    "plugin-dir": ("install.plugin_dir", "print the directory to give to criu as --libdir"),
    "podman": ("podman.command", "checkpoint and restore Podman's containers"),
    "preempt": ("jit.preempt", "have a job checkpointed just in time"),
    "prune": ("prune.command", "remove old checkpoints from a directory of them"),
    "recover": ("tasks.recover", "bring back a task left behind by a criu that died"),
    "restore": ("tasks.restore", "restore a process tree from a checkpoint"),
    "rewrap": ("seal.rewrap", "give the key of a sealed checkpoint to others"),
    "seal": ("seal.seal", "encrypt a checkpoint"),
    "sign": ("sign.command", "sign a checkpoint"),
    "uninstall": ("install.uninstall", "undo install"),
    "unseal": ("seal.unseal", "decrypt a sealed checkpoint"),
    "verify": ("verify.command", "check every byte of a checkpoint"),
    "wait": ("drain.wait", "wait until a checkpoint is on the disk"),
    "watch": ("watch.command", "show how fast a job writes to its memory, and what follows"),
}
PROGRAM = "gpustasis"


class _Program(Group):
    """The commands of COMMANDS."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, name = COMMANDS[cmd_name][0].split(".")
        found: click.Command = getattr(importlib.import_module(f"gpustasis.cli.{module}"), name)
        found.short_help = COMMANDS[cmd_name][1]
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] == "jit":  # a script runs with the Python that runs the module
            ctx.fail("there is no command 'jit': run `python -m gpustasis.jit`, a module")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in self.list_commands(ctx)])


@click.group(cls=_Program, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name=PROGRAM)
@click.option("-v", "--verbose", count=True, help="Log more; twice: debug.")
def cli(verbose: int) -> None:
    """Checkpoint and restore GPU workloads, transparently, with CRIU.

    `python -m gpustasis.jit` runs a job that is checkpointed upon SIGTERM; its --help says how.

    Exit status: 0 when done, 2 for a wrong command line, 130 after Ctrl-C; the others mean what
    the message says, and are listed in docs/errors.md of the source.
    """
    output.start_log((logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)])


def main() -> NoReturn:
    """Run the command line and exit with a status of docs/errors.md."""
    run(cli, PROGRAM)
