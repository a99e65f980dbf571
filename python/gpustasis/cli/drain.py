# SPDX-License-Identifier: Apache-2.0
"""`gpustasis drain` and `wait`: checkpoints that are in memory first."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from gpustasis.cli import output
from gpustasis.cli.framework import Command
from gpustasis.cli.options import Size, threads_option
from gpustasis.cli.stream_ends import new_file, standard_output
from gpustasis.draining.drain import Drained
from gpustasis.draining.drain import drain as drain_checkpoint
from gpustasis.draining.priority import lower
from gpustasis.draining.waiting import peer_of, wait_for
from gpustasis.errors import LocalError
from gpustasis.image.arena import Tier
from gpustasis.image.directory import allow_many_files, require_outside
from gpustasis.streaming.finished import require_sendable, send_finished
from gpustasis.streaming.send import DEFAULT_TIMEOUT_S, Target
from gpustasis.text import mib

_IMAGES = click.Path(file_okay=False, exists=True, path_type=Path)


def drain_aside(images: Path, **options: Any) -> Drained:
    """Drain as a command does that is to be in no job's way: with the priorities of lower(), which
    the calling thread keeps. options, errors: as of drain_checkpoint."""
    lower()
    allow_many_files()
    return drain_checkpoint(images, **options)


@click.command("drain", cls=Command)
@click.argument("images", type=_IMAGES)
@click.option(
    "--rate-limit",
    type=Size(),
    default=0,
    metavar="SIZE",
    help="Write at most so much of images in a second; 0: as much as the disk takes.  [default: 0]",
)
@click.option(
    "--compress",
    type=click.Choice(["lz4", "none"]),
    default="lz4",
    show_default=True,
    help="How memory is stored.",
)
@threads_option
@click.option(
    *("-o", "--output", "output_to"),
    metavar="FILE",
    help="Then write the checkpoint as a stream to a new file; -: to standard output, as of a pipe "
    "to an object store.",
)
def drain(
    images: Path, rate_limit: int, compress: str, threads: int, output_to: str | None
) -> None:
    """Bring the checkpoint in IMAGES, whose memory is in an arena (tier = "ram"), to the disk.

    The job runs on meanwhile; the drain runs with nice 19, and at the lowest level of the disk's
    best-effort class. What the checkpoint is built on is drained before, if it has to be. If the
    drain fails, or is killed, the checkpoint is in memory as before: run it again. Status 10 does
    not say that it is lost: read the message before you remove anything. With -o one that is on the
    disk already is only written as a stream; `gpustasis restore -i` restores that.
    """
    with ExitStack() as opened:
        target = None
        if output_to is not None:
            require_sendable(images)
            if output_to == "-":
                target = standard_output(opened, DEFAULT_TIMEOUT_S, one_way=True)
            else:
                require_outside(Path(output_to), images)
                target = new_file(opened, Path(output_to), DEFAULT_TIMEOUT_S)
        _drain(images, rate_limit, compress, threads, output_to, target)


def _drain(
    images: Path,
    rate_limit: int,
    compress: str,
    threads: int,
    output_to: str | None,
    target: Target | None,
) -> None:
    with output.bars() as update:

        def tell(count: int, total: int) -> None:
            if total:  # else another is drained before
                update(f"draining {images}", count, total)

        done = drain_aside(
            images,
            rate=rate_limit,
            threads=threads,
            compress=compress == "lz4",
            on_progress=tell,
        )
    text = f"{images} is durable"
    if done.images:
        text += (
            f": {mib(done.memory_bytes)} of memory in {mib(done.image_bytes)}, {done.seconds:.2f} s"
        )
    if done.earlier:
        text += "; drained before it: " + ", ".join(map(str, done.earlier))
    stream = None
    if target is not None and output_to is not None:
        sent = send_finished(images, target)
        stream = {
            "to": output_to,
            "stream_id": sent.stream_id.hex(),
            "files": sent.files,
            "bytes": sent.bytes,
        }
        text += f"; {mib(sent.bytes)} in {sent.files} files went to {target.out.place}"
    output.answer(
        {"state": Tier.DURABLE.value, **asdict(done), "stream": stream},
        lambda: output.say(text),
    )


@click.command("wait", cls=Command)
@click.argument("images", type=_IMAGES)
@click.option(
    "--for",
    "wanted",
    type=click.Choice([Tier.LOCAL.value, "peer", Tier.DURABLE.value]),
    default=Tier.DURABLE.value,
    show_default=True,
    help="durable: it is on the disk; peer: or a neighbour has a copy; local: it is complete in "
    "memory at least.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(0.0),
    metavar="S",
    help="Seconds to wait at most.  [default: no limit]",
)
def wait(images: Path, wanted: str, timeout: float | None) -> None:
    """Wait until somebody has drained the checkpoint in IMAGES, or copied it to a neighbour:
    another `gpustasis drain` or `peer copy`, which a timer may have started.

    Ends with status 0 when it is so, with 25 if it is not so after --timeout, and with 10 if there
    is no checkpoint: none was begun, its dump has failed, or it is lost. Also with 10 if it is
    whole in memory and cannot be drained any more: it is the only copy, so read the message before
    you remove anything.
    """
    on_peer = wanted == "peer"
    tier = Tier.DURABLE if on_peer else Tier(wanted)
    found = wait_for(images, tier, timeout, on_peer=on_peer)
    if found is None:
        raise LocalError(f"{images}: its dump has not ended, after {timeout:g} s")
    copied = peer_of(images) if found == Tier.LOCAL else None
    if found == Tier.LOCAL and wanted != Tier.LOCAL.value and not (on_peer and copied):
        raise LocalError(f"{images} is only in memory yet, after {timeout:g} s")
    peer = None if copied is None else copied.peer
    output.answer(
        {"directory": images, "state": found.value, "peer": peer},
        lambda: output.say(
            f"{images} is {found.value}" + (f", and {peer} has a copy" if peer else "")
        ),
    )
