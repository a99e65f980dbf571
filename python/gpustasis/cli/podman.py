# SPDX-License-Identifier: Apache-2.0
"""`gpustasis podman`: checkpoints of Podman's containers."""

from __future__ import annotations

import json
from pathlib import Path

import click

from gpustasis.cli import output
from gpustasis.cli.framework import Group
from gpustasis.cli.options import describe
from gpustasis.runtimes import podman
from gpustasis.runtimes.podman_service import DEFAULT_URL, Report, Service

_FILE = click.Path(dir_okay=False, path_type=Path)
_print_stats = click.option(
    "--print-stats", is_flag=True, help="One JSON object: figures of Podman, CRIU and gpustasis."
)
_ARCHIVE = click.Path(dir_okay=False, exists=True, path_type=Path)


@click.group("podman", cls=Group)
@click.option(
    "--url", metavar="URL", help=f"Podman's service.  [default: $CONTAINER_HOST, {DEFAULT_URL}]"
)
@click.pass_context
def command(ctx: click.Context, url: str | None) -> None:
    """Checkpoint and restore Podman's containers. Needs the extra `podman` and Podman's service."""
    ctx.obj = url


@command.command("checkpoint")
@click.argument("name")
@click.option(
    "-e", "--export", type=_FILE, help="Write an archive, for another host; not compressed."
)
@click.option("-R", "--leave-running", is_flag=True, help="The container runs on afterwards.")
@click.option(
    "-P", "--pre-checkpoint", is_flag=True, help="CPU memory only, ahead of the checkpoint."
)
@click.option("--with-previous", is_flag=True, help="On top of the pre-checkpoint.")
@click.option("-k", "--keep", is_flag=True, help="Keep logs, and with --export the images as well.")
@click.option("--tcp-established", is_flag=True, help="Dump open TCP connections.")
@click.option("--file-locks", is_flag=True, help="Dump file locks.")
@click.option("--ignore-rootfs", is_flag=True, help="Leave changed files out of the archive.")
@_print_stats
@click.pass_obj
def checkpoint(
    url: str | None, /, name: str, export: Path | None, print_stats: bool, **options: bool
) -> None:
    """Checkpoint the container NAME. It ends then, unless told otherwise."""
    wanted = podman.CheckpointOptions(export=export, **options)
    with Service(url) as service:
        report = podman.checkpoint(service, name, wanted)
    where = "checkpointed" if export is None else f"in {export}"
    _answer(report, name, f"container {name} is {where}", print_stats)


@command.command("restore")
@click.argument("name", required=False)
@click.option("-i", "--import", "archive", type=_ARCHIVE, help="Restore from an archive.")
@click.option(
    "--import-parent",
    "parents",
    multiple=True,
    type=_ARCHIVE,
    help="An archive that the other is built on; can be given again.",
)
@click.option("-n", "--name", "new_name", metavar="NAME", help="Name of the new container.")
@click.option(
    "-k",
    "--keep",
    is_flag=True,
    help="Keep images and logs; --print-stats needs it for gpustasis's figures.",
)
@click.option("--tcp-established", is_flag=True, help="Restore open TCP connections.")
@click.option("--tcp-close", is_flag=True, help="Restore TCP connections as closed.")
@click.option("--file-locks", is_flag=True, help="Restore file locks.")
@click.option("--ignore-rootfs", is_flag=True, help="Do not apply the archive's changed files.")
@click.option("--ignore-volumes", is_flag=True, help="Do not restore the archive's volumes.")
@_print_stats
@click.pass_obj
def restore(
    url: str | None,
    /,
    name: str | None,
    archive: Path | None,
    parents: tuple[Path, ...],
    new_name: str | None,
    print_stats: bool,
    **options: bool,
) -> None:
    """Restore the container NAME, or with --import the one in an archive."""
    if (name is None) == (archive is None):
        raise click.UsageError("give either the name of a container or --import")
    if archive is None and (parents or new_name):
        raise click.UsageError("--import-parent and --name need --import")
    wanted = podman.RestoreOptions(name=new_name, **options)
    with Service(url) as service:
        if archive is None:
            assert name is not None
            report = podman.restore(service, name, wanted)
        else:
            report = podman.restore_archive(service, archive, wanted, parents)
    shown = name or new_name or report.container_id[:12]
    _answer(report, shown, f"container {shown} runs", print_stats)


def _answer(report: Report, name: str, done: str, print_stats: bool) -> None:
    found = report.as_podman()

    def show() -> None:
        if print_stats:
            output.exact(json.dumps(found, indent=4))
            return
        figures = "" if report.plugin is None else f": {describe(report.plugin)}"
        output.say(f"{done}{figures} ({report.duration_us / 1e6:.2f} s)")

    output.answer({"container": name, "podman": found}, show)
