# SPDX-License-Identifier: Apache-2.0
"""`gpustasis verify PATH`: check every byte of a checkpoint, or of all checkpoints of a store."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

import gpustasis
from gpustasis.cli import output, sign
from gpustasis.cli.framework import Command
from gpustasis.cli.options import Size, checkpoint_argument, parent_option, threads_option
from gpustasis.errors import CheckpointError, ImageError, SealError
from gpustasis.image.arena import Tier, tier_at
from gpustasis.image.checkpoint import is_sealed
from gpustasis.image.directory import allow_many_files
from gpustasis.image.store_verification import is_store, verify_store
from gpustasis.image.verification import Verification
from gpustasis.sealing.signing import Signature
from gpustasis.text import memory_text, mib, plural


@click.command("verify", cls=Command)
@checkpoint_argument("checkpoint")
@parent_option
@threads_option
@sign.trusted_option
@click.option(
    "--state",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Of a store: a file that notes how far the check has come; a killed one goes on from it.",
)
@click.option(
    "--rate",
    type=Size(),
    help="Of a store: read at most so much in a second, for example 200MiB.",
)
def command(
    checkpoint: Path,
    parents: tuple[Path, ...],
    threads: int,
    trusted: tuple[Path, ...],
    state: Path | None,
    rate: int | None,
) -> None:
    """Check every hash of the images in CHECKPOINT, an image directory or an archive, that hold GPU
    memory or CPU memory, and of their manifest. Or give a store, a directory of checkpoints: all of
    them are checked, each image once, and every checkpoint that depends on a damaged chunk is
    named.

    What an earlier checkpoint holds for this one is read and checked there; of an archive, where
    --parent says. Exits 0 if all is whole, 10 if anything is not; each problem is a line. CRIU's
    own images have no checksums and are not looked at, unless they are packed, or signed: with
    --trusted every file of a directory is checked, and exit 14 says that it is not what was
    signed.
    """
    if rate == 0:
        raise click.UsageError("--rate 0 would read nothing")
    allow_many_files()
    if checkpoint.is_dir() and is_store(checkpoint):
        if trusted:
            raise click.UsageError("--trusted: name one checkpoint, not a store")
        _verify_store(checkpoint, state, rate, threads)
        return
    if state is not None or rate is not None:
        raise click.UsageError(f"--state and --rate: {checkpoint} is no store")
    signatures = sign.check(checkpoint, trusted, threads)
    if signatures and is_sealed(checkpoint):
        _show_sealed(checkpoint, signatures)
        return
    with output.bars() as update:
        found = gpustasis.open(checkpoint, parents).verify(threads=threads, on_progress=update)

    tier = tier_at(checkpoint)

    def show() -> None:
        sign.say(signatures)
        for problem in found.problems:
            output.say(problem)
        if not found.problems:
            images = f"{found.images} image{'' if found.images == 1 else 's'}"
            output.say(
                f"{checkpoint}: manifest and {images} whole, "
                f"{memory_text(found.plain_bytes, found.cpu_bytes)}{_other_text(found)}"
                + ("; only in memory yet" if tier == Tier.LOCAL else "")
            )

    answer = {"checkpoint": checkpoint, "state": tier.value, **asdict(found)}
    output.answer(answer | {"signatures": [sign.facts(one) for one in signatures]}, show)
    if found.problems:
        count = len(found.problems)
        raise ImageError(f"{checkpoint}: {plural(count, 'problem')} found")


def _show_sealed(checkpoint: Path, signatures: list[Signature]) -> None:
    """What is sealed is looked into only with a key; all of its bytes were signed."""

    def show() -> None:
        sign.say(signatures)
        output.say(f"{checkpoint}: sealed, and just as it was signed")

    found = asdict(Verification()) | {"checkpoint": checkpoint, "state": Tier.DURABLE.value}
    output.answer(found | {"signatures": [sign.facts(one) for one in signatures]}, show)


def _verify_store(store: Path, state: Path | None, rate: int | None, threads: int) -> None:
    found = verify_store(store, state=state, rate=rate, threads=threads)
    count = len(found.verdicts)
    sealed = [name for name in found.ignored if is_sealed(store / name)]

    def show() -> None:
        for verdict in found.verdicts:
            for problem in verdict.problems:
                output.say(problem)
        for name, reason in found.ignored.items():
            output.say(f"{name}: not checked: {reason}")
        if not found.damaged and count:
            plural = "" if count == 1 else "s"
            output.say(f"{store}: {count} checkpoint{plural} whole, {mib(found.read_bytes)} read")

    checkpoints = [
        {
            **asdict(verdict),
            "checkpoint_id": None if verdict.checkpoint_id is None else verdict.checkpoint_id.hex(),
        }
        for verdict in found.verdicts
    ]
    answer = {
        "store": store,
        "continued": found.continued,
        "read_bytes": found.read_bytes,
        "ignored": found.ignored,
        "checkpoints": checkpoints,
    }
    output.answer(answer, show)
    if sealed and not count:
        raise SealError(
            f"{store}: nothing was checked, every checkpoint in it is sealed "
            f"({', '.join(sealed)}): open them with `gpustasis unseal DIR --key KEY -o OUT`"
        )
    if not count:
        raise ImageError(f"{store}: nothing was checked: it holds no checkpoint that can be")
    if found.damaged:
        names = ", ".join(verdict.name for verdict in found.damaged)
        raise ImageError(
            f"{store}: {len(found.damaged)} of {count} checkpoints are damaged: {names}"
            + (f"; {found.state_problem}" if found.state_problem else "")
        )
    if found.state_problem:
        raise CheckpointError(f"{store}: {found.state_problem}")


def _other_text(found: Verification) -> str:
    alike = f", {mib(found.alike_bytes)} of it alike and stored once" if found.alike_bytes else ""
    if found.outside_checkpoints:
        ids = ", ".join(found.outside_checkpoints)
        return (
            f"{alike}; {mib(found.outside_bytes)} of it not checked: not in the archive but in "
            f"checkpoint {ids}; --parent says where that is"
        )
    packed = f"; {mib(found.packed_bytes)} of CRIU's images whole" if found.packed_bytes else ""
    count = found.earlier_checkpoints
    if count == 0:
        return alike + packed
    plural = "s" if count > 1 else ""
    earlier = f", {mib(found.earlier_bytes)} of it in {count} earlier checkpoint{plural}"
    return earlier + alike + packed
