"""`gpustasis checkpoint PID -D DIR`: dump a process tree, GPU memory included."""

from __future__ import annotations

from pathlib import Path

import click

from gpustasis.cli.options import SHELL_JOB, criu_options, describe, plugin_settings
from gpustasis.cli.progress import criu_progress
from gpustasis.criu import run
from gpustasis.criu.find import find
from gpustasis.errors import CheckpointError
from gpustasis.image.checkpoint import find_manifest

_INVENTORY = "inventory.img"  # CRIU writes it into every complete checkpoint


@click.command("checkpoint")
@click.argument("pid", type=click.IntRange(2))
@click.option(
    "-D",
    "--images-dir",
    "images",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Where the checkpoint goes; made if it is not there.",
)
@click.option("--leave-running", is_flag=True, help="The tree runs on afterwards.")
@click.option("--stop", "leave_stopped", is_flag=True, help="The tree is left stopped.")
@click.option(
    "--externalize",
    type=click.Choice(["on", "off"]),
    help="off: GPU memory goes into CRIU's own images, as with the stock plugin.",
)
@click.option(
    "--parent",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    help="An earlier checkpoint of the job: GPU memory that it holds is not stored again.",
)
@click.option(
    "--max-chain",
    type=click.IntRange(1, 65535),
    metavar="N",
    help="A chain of N on top of a full checkpoint gets no longer: the next one is full again.",
)
@click.option("--compress", type=click.Choice(["lz4", "none"]), help="How GPU memory is stored.")
@criu_options
def command(
    pid: int,
    images: Path,
    leave_running: bool,
    leave_stopped: bool,
    externalize: str | None,
    parent: Path | None,
    max_chain: int | None,
    compress: str | None,
    threads: int | None,
    work_dir: Path | None,
    shell_job: str,
    criu_program: str | None,
    extra: tuple[str, ...],
) -> None:
    """Dump the process tree below PID. It ends then, unless told otherwise."""
    if leave_running and leave_stopped:
        raise click.UsageError("--leave-running and --stop exclude each other")
    criu = find(criu_program)
    based_on = None if parent is None else _parent(parent, images)
    _prepare(images)
    with criu_progress(f"checkpointing process {pid}", images) as on_line:
        settings = run.Settings(
            plugin=plugin_settings(
                externalize=externalize,
                compress=compress,
                threads=threads,
                parent=based_on,
                max_chain=max_chain,
            ),
            work=work_dir,
            shell_job=SHELL_JOB[shell_job],
            extra=extra,
            on_line=on_line,
        )
        outcome = run.dump(
            criu,
            pid,
            images,
            settings,
            leave_running=leave_running,
            leave_stopped=leave_stopped,
        )
    click.echo(
        f"process {pid} is in {images}: {describe(outcome.statistics)} "
        f"(criu {criu.version_text}, {outcome.seconds:.2f} s)"
    )
    statistics = outcome.statistics
    if based_on is not None and statistics is not None and statistics.full_because:
        click.echo(f"{images} is a full checkpoint: {statistics.full_because}")


def _parent(parent: Path, images: Path) -> str:
    """The parent's directory without links, as the plugin is to be told."""
    directory = parent.resolve()
    if find_manifest(directory) is None:
        raise CheckpointError(f"{parent} is no parent: it holds no GPU state saved by gpustasis")
    if directory == images.resolve():
        raise CheckpointError(f"{parent} cannot be its own parent; name another directory")
    return str(directory)


def _prepare(images: Path) -> None:
    """An empty place for the images: what another dump left there would be taken for this one's."""
    try:
        images.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as exc:
        raise CheckpointError(f"cannot make {images}: {exc.strerror}") from exc
    if (images / _INVENTORY).exists():
        raise CheckpointError(f"{images} holds a checkpoint already; name another directory")
