"""`gpustasis restore -D DIR`: restore a process tree from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import click

from gpustasis.cli.options import SHELL_JOB, criu_options, describe, plugin_settings
from gpustasis.cli.progress import criu_progress
from gpustasis.criu import run
from gpustasis.criu.find import find


@click.command("restore")
@click.option(
    "-D",
    "--images-dir",
    "images",
    required=True,
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    help="The checkpoint.",
)
@click.option(
    "-d/-f",
    "--detach/--foreground",
    "detached",
    default=True,
    show_default=True,
    help="Return when the tree runs, or when its root process has ended.",
)
@criu_options
def command(
    images: Path,
    detached: bool,
    threads: int | None,
    work_dir: Path | None,
    shell_job: str,
    criu_program: str | None,
    extra: tuple[str, ...],
) -> None:
    """Restore the process tree in a checkpoint and let it run on.

    A restore that cannot be proved right ends in an error, and nothing of the tree is left running.
    """
    criu = find(criu_program)
    with criu_progress(f"restoring {images}", images) as on_line:
        settings = run.Settings(
            plugin=plugin_settings(threads=threads),
            work=work_dir,
            shell_job=SHELL_JOB[shell_job],
            extra=extra,
            on_line=on_line,
        )
        outcome = run.restore(criu, images, settings, detached=detached)
    done = "runs" if detached else "has ended"
    click.echo(
        f"process {outcome.pid} {done}, restored from {images}: {describe(outcome.statistics)} "
        f"(criu {criu.version_text}, {outcome.seconds:.2f} s)"
    )
