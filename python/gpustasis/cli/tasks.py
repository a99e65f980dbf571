# SPDX-License-Identifier: Apache-2.0
"""`gpustasis checkpoint`, `restore` and `recover`: what is done to a process tree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import gpustasis
from gpustasis.cli import output, streams
from gpustasis.cli.framework import Command
from gpustasis.cli.key_options import find_key, key_options
from gpustasis.cli.options import (
    criu_options,
    describe,
    dump_options,
    recipients_option,
    threads_option,
)
from gpustasis.errors import CheckpointError, add_to
from gpustasis.image.arena import Tier, tier_of
from gpustasis.text import mib

if TYPE_CHECKING:
    from gpustasis.peers.copying import Copied

_WHERE = {Tier.LOCAL: "in memory here", Tier.DURABLE: "on the disk here"}
_PHASE_WIDTH = 70  # characters


@click.command("checkpoint", cls=Command)
@click.argument("pid", type=click.IntRange(2))
@click.option(
    *("-D", "--images-dir", "images"),
    type=click.Path(file_okay=False, path_type=Path),
    help="Where the checkpoint goes; made if it is not there.",
)
@click.option("-R", "--leave-running", is_flag=True, help="The tree runs on afterwards.")
@click.option("-s", "--leave-stopped", is_flag=True, help="The tree is left stopped.")
@click.option(
    "--parent",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    help="An earlier checkpoint of the job: memory that its images hold is not stored again.",
)
@click.option(
    "--max-chain",
    type=click.IntRange(1, 65535),
    metavar="N",
    help="A chain of N on top of a full checkpoint gets no longer: the next one is full again.",
)
@click.option(
    "--wait",
    "waits",
    type=click.Choice(["peer", "durable"]),
    help="Before this command ends, copy the checkpoint to the neighbour, as `peer copy` does; or "
    "bring it to the disk, as `drain` does one in memory (--tier ram). A tree that ends with its "
    "checkpoint has ended before that begins.",
)
@recipients_option
@click.option(
    "--key",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="With --to and --parent: the private key, in PEM, that opens the parent, which is sealed "
    "too.",
)
@streams.output_options
@dump_options
@criu_options
def checkpoint(
    pid: int,
    images: Path | None,
    leave_running: bool,
    leave_stopped: bool,
    externalize: str | None,
    parent: Path | None,
    max_chain: int | None,
    waits: str | None,
    recipients: tuple[Path, ...],
    key: Path | None,
    criu_program: str | None,
    extra: tuple[str, ...],
    output_to: str | None,
    spool: Path | None,
    timeout: float,
    restore_timeout: float,
    one_way: bool,
    **options: Any,
) -> None:
    """Dump the process tree below PID into a directory (-D), or as a stream to a file, pipe or
    socket (-o). It ends then, unless told otherwise.

    A stream goes out while the dump is still at work. Into a socket it goes only when a `restore
    -i` at the other end has answered, and the tree ends only when that has everything, checked and
    on its disk. Through a pipe nobody answers: then the spool is kept, and named. With -o - what
    is said goes to stderr, JSON too.

    Options that CRIU has too mean what they mean there; what follows -- goes to criu.
    """
    if leave_running and leave_stopped:
        raise click.UsageError("--leave-running and --leave-stopped exclude each other")
    options["externalize"] = None if externalize is None else externalize == "on"
    options |= {"criu": criu_program, "criu_args": extra, "recipients": recipients}
    if (images is None) == (output_to is None):
        raise click.UsageError("name one place for the checkpoint: -D DIR or -o FILE")
    if output_to is not None:
        if parent is not None or max_chain is not None:
            raise click.UsageError("a stream holds a whole checkpoint: no --parent, no --max-chain")
        if key is not None:
            raise click.UsageError("--key opens a parent, and a stream holds a whole checkpoint")
        if waits is not None:
            raise click.UsageError("--wait: a stream is sent, and not drained")
        if leave_stopped:
            raise click.UsageError("--leave-stopped: a stream is of a tree that ends or runs on")
        place = streams.Place(spool=spool, timeout_s=timeout, restore_timeout_s=restore_timeout)
        streams.checkpoint_to(pid, output_to, place, one_way, leave_running, options)
        return
    assert images is not None
    streams.require_no_option("-o", "spool", "one_way", "timeout", "restore_timeout")
    copy = _copier() if waits == "peer" else None
    with _criu_progress(f"checkpointing process {pid}", images) as on_line:
        made = gpustasis.checkpoint(
            pid,
            images,
            parent=parent,
            max_chain=max_chain,
            key=key,
            leave_running=leave_running,
            leave_stopped=leave_stopped,
            on_line=on_line,
            **options,
        )
    done = made.dump
    assert done is not None
    tier, copied = tier_of(images), None
    if copy is not None:
        copied = copy(images, tier)
    elif waits == "durable":
        tier = _bring_to_disk(images, tier)

    def show() -> None:
        output.say(
            f"process {pid} is in {images}: {describe(done.statistics)} "
            f"(criu {done.criu_version}, {done.seconds:.2f} s)"
        )
        if copied is not None:
            output.say(
                f"{_WHERE[tier]}, and in memory on {copied.node}, in {copied.peer_directory}"
            )
        if tier == Tier.LOCAL:
            output.say(f"local: only in memory yet; gpustasis drain {images} brings it to the disk")
        if parent is not None and done.statistics is not None and done.statistics.full_because:
            output.say(f"{images} is a full checkpoint: {done.statistics.full_because}")

    peer = None if copied is None else copied.peer
    fields = {"directory": images, "state": tier.value, "peer": peer, **asdict(done)}
    output.answer(fields, show)


def _bring_to_disk(images: Path, tier: Tier) -> Tier:
    """What went to the disk at once, CRIU has not synced."""
    if tier == Tier.LOCAL:
        from gpustasis.cli.drain import drain_aside

        drain_aside(images)
        return tier_of(images)
    from gpustasis.draining.syncing import require_on_disk

    require_on_disk(images)
    return tier


def _copier() -> Callable[[Path, Tier], Copied]:
    """What copies a checkpoint to the neighbour. Raises PeerError, before anything is dumped,
    unless one is named, and is there."""
    from gpustasis.cli.peer import copy_aside
    from gpustasis.peers.config import load
    from gpustasis.peers.copying import require_peer

    config = load(None)
    require_peer(config)

    def copy(images: Path, tier: Tier) -> Copied:
        try:
            return copy_aside(images, config)
        except CheckpointError as exc:
            add_to(exc, f"; the checkpoint is {_WHERE[tier]}, and has no copy: {images}")
            raise

    return copy


@click.command("restore", cls=Command)
@click.option(
    *("-D", "--images-dir", "images"),
    type=click.Path(file_okay=False, path_type=Path),
    help="The checkpoint; with -i where it is put, and stays.",
)
@streams.input_options
@click.option(
    *("-d/-f", "--detach/--foreground", "detached"),
    default=True,
    show_default=True,
    help="Return when the tree runs, or when its root process has ended.",
)
@click.option(
    *("-s", "--leave-stopped"),
    is_flag=True,
    help="The tree is left stopped; not for one with GPU state.",
)
@click.option(
    "--pidfile",
    type=click.Path(dir_okay=False, path_type=Path),
    help="A file, not there yet, that the pid of the root process is written to.",
)
@key_options
@click.option(
    "--gpu-map",
    multiple=True,
    metavar="OLD=NEW",
    help="Put what was on GPU OLD of the checkpoint onto GPU NEW of this machine, which must be "
    "of the same model: by UUID, or by number (as `inspect` and `nvidia-smi` list them). Once for "
    "each GPU; GPUs that are not named stay where they were, or go to a free one of their model.",
)
@click.option(
    "--ignore-requirements",
    is_flag=True,
    help="Restore although mapped files have changed, the driver is older or GPU memory is short: "
    "see `inspect --requirements`. CRIU still compares sizes and build ids, so another version of "
    "the driver's libraries stays an error.",
)
@criu_options
def restore(
    images: Path | None,
    criu_program: str | None,
    extra: tuple[str, ...],
    key: Path | None,
    key_command: str | None,
    input_from: str | None,
    timeout: float,
    two_way: bool | None,
    source_may_run: bool,
    **options: Any,
) -> None:
    """Restore the process tree in a checkpoint, or in a stream (-i), and let it run on.

    A restore that cannot be proved right ends in an error, and nothing of the tree is left running.
    Of a stream nothing is restored before all of it is there, checked and on the disk, and its
    sender has said that the tree has ended (but for --source-may-run). Options that CRIU has too
    mean what they mean there; what follows -- goes to criu. A checkpoint or stream that was sealed
    while it was made takes its key, unless gpustasis's configuration names it.
    """
    if options["leave_stopped"] and not options["detached"]:
        raise click.UsageError("--leave-stopped and --foreground exclude each other")
    options |= {"criu": criu_program, "criu_args": extra}
    if input_from is not None:
        place = streams.Place(spool=images, timeout_s=timeout)
        opening = find_key(key, key_command)
        streams.restore_from(input_from, place, two_way, source_may_run, opening, options)
        return
    if images is None:
        raise click.UsageError("name a checkpoint: -D DIR, or a stream: -i FILE")
    streams.require_no_option("-i", "two_way", "source_may_run", "timeout")
    if not images.is_dir():
        raise click.UsageError(f"{images} is no directory")
    with _criu_progress(f"restoring {images}", images) as on_line:
        opening = find_key(key, key_command)
        done = gpustasis.restore(images, key=opening, on_line=on_line, **options)
    state = "runs" if options["detached"] else "has ended"
    if options["leave_stopped"]:
        state = "is stopped"
    output.answer(
        {"directory": images, **asdict(done)},
        lambda: output.say(
            f"process {done.pid} {state}, restored from {images}: {describe(done.statistics)} "
            f"(criu {done.criu_version}, {done.seconds:.2f} s)"
        ),
    )


@click.command("recover", cls=Command)
@click.argument("pid", type=click.IntRange(2))
@click.option(
    *("-D", "--images-dir", "images"),
    default=None,
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    help="Where the dump that was broken off was writing to, or the checkpoint whose restore was; "
    "a dump's is found by itself if it has taken memory out of the process.",
)
@key_options
@threads_option
def recover(
    pid: int, images: Path | None, key: Path | None, key_command: str | None, threads: int
) -> None:
    """Bring back process PID, whose dump or restore was broken off by criu's death.

    Puts back the GPU memory that a dump had taken out already, after checking every byte of it, and
    has the driver restore and unlock the process. A process that another program had locked or
    checkpointed before the dump is left so. A process that a restore left locked, with all its
    memory, is unlocked. For a tree, run it for each CUDA process. A dump that is sealed needs
    --key or --key-command.
    """
    from gpustasis.image.directory import allow_many_files

    allow_many_files()
    with output.bars() as update:
        done = gpustasis.recover(
            pid,
            images,
            key=find_key(key, key_command),
            threads=threads,
            on_progress=lambda count: update("putting GPU memory back", count, None),
        )
    text = f"process {pid} {done.outcome.value}"
    if done.refilled_bytes:
        text += f" ({mib(done.refilled_bytes)} of GPU memory put back)"
    output.answer(
        {
            "pid": pid,
            "outcome": done.outcome.name.lower(),
            "refilled_bytes": done.refilled_bytes,
        },
        lambda: output.say(text),
    )


@contextmanager
def _criu_progress(title: str, images: Path) -> Iterator[Callable[[str], None]]:
    """Show title, phase and the size of `images`; yields what to call with each log line."""
    from gpustasis.criu.log import phase_of

    with output.status(title) as update:

        def on_line(line: str) -> None:
            if (phase := phase_of(line)) is not None:
                update(lambda: f"{title}: {phase[:_PHASE_WIDTH]} ({mib(_size(images))} of images)")

        yield on_line


def _size(directory: Path) -> int:
    """Bytes of the files in `directory`, not below it; files that vanish meanwhile count 0."""
    total = 0
    for path in directory.iterdir():
        try:
            total += path.lstat().st_size
        except FileNotFoundError:
            continue
    return total
