# SPDX-License-Identifier: Apache-2.0
"""`gpustasis seal`, `unseal` and `rewrap`: encrypt a checkpoint, decrypt it, and say who may."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import click

from gpustasis.cli import output
from gpustasis.cli.framework import Command
from gpustasis.cli.key_options import keep_from_dumps, key_from, key_options
from gpustasis.cli.options import Size, threads_option
from gpustasis.cli.sign import facts as signature_facts
from gpustasis.cli.sign import sign_options, signer_from
from gpustasis.draining.priority import lower
from gpustasis.image.arena import Tier, tier_of
from gpustasis.image.directory import allow_many_files
from gpustasis.sealing.recipients import Recipient, read_recipients
from gpustasis.sealing.seal import Sealed
from gpustasis.sealing.seal import seal as seal_checkpoint
from gpustasis.sealing.unseal import rewrap as rewrap_checkpoint
from gpustasis.sealing.unseal import unseal as unseal_checkpoint
from gpustasis.text import mib, plural

_directory_argument = click.argument(
    "checkpoint", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="DIR"
)
_to_option = click.option(
    "--to",
    "certificates",
    multiple=True,
    required=True,
    metavar="CERTIFICATE",
    type=click.Path(path_type=Path),
    help="An X.509 certificate in PEM, RSA or EC: who has its private key can open the checkpoint. "
    "Several times.",
)


@click.command("seal", cls=Command)
@_directory_argument
@_to_option
@click.option(
    *("-o", "--output", "out"),
    required=True,
    type=click.Path(path_type=Path),
    help="Where the sealed checkpoint goes; must not exist.",
)
@click.option(
    "--rate-limit",
    type=Size(),
    default=0,
    metavar="SIZE",
    help="Of a checkpoint that is only in memory: write at most so much of images in a second; 0: "
    "as much as the disk takes.  [default: 0]",
)
@sign_options
@threads_option
def seal(
    checkpoint: Path,
    certificates: tuple[Path, ...],
    out: Path,
    rate_limit: int,
    sign_key: Path | None,
    sign_certificate: Path | None,
    threads: int,
) -> None:
    """Encrypt the checkpoint in DIR into the new directory OUT: all of its files and their names,
    but for inventory.img, which CRIU and the container engines look for.

    OUT appears when it was read back and checked. DIR stays as it is, in the clear: to remove it
    is up to you, and what was removed may stay readable on the disk.

    A checkpoint that is only in memory (tier = "ram") is sealed out of it, compressed, with the
    priorities of a drain: what was in GPU memory is never on the disk in the clear. It is in memory
    as before then: `gpustasis arena discard` gives that back.
    """
    keep_from_dumps()
    if tier_of(checkpoint) == Tier.LOCAL:
        lower()
        allow_many_files()
    recipients = _read(certificates)
    signer = signer_from(sign_key, sign_certificate)
    with output.bars() as update:
        done = seal_checkpoint(
            checkpoint,
            recipients,
            out,
            threads=threads,
            rate=rate_limit,
            signer=signer,
            on_progress=lambda count: update("sealed, read back", count, None),
        )
    signature = done.signature
    output.answer(
        {
            "checkpoint": checkpoint,
            "directory": out,
            "recipients": _facts(recipients),
            **asdict(done),
            "signature": None if signature is None else signature_facts(signature),
        },
        lambda: _show(checkpoint, out, recipients, done),
    )


def _show(checkpoint: Path, out: Path, recipients: Sequence[Recipient], done: Sealed) -> None:
    output.say(
        f"{out}: {plural(done.files, 'file')}, {mib(done.plain_bytes)}, sealed for "
        f"{plural(len(recipients), 'recipient')}"
        + ("" if done.signature is None else f", signed by {done.signature.subject}")
    )
    if done.in_clear:
        output.say(
            f"{checkpoint} has images of a drain that failed or was killed, in the clear: "
            + ", ".join(done.in_clear)
        )
    if done.state == Tier.LOCAL:
        output.say(
            f"{checkpoint} is in memory as before: `gpustasis arena discard {checkpoint}` gives "
            "that back"
        )
        return
    output.say(
        f"{checkpoint} is still there, in the clear: remove it if you do not need it; what was "
        "removed may stay readable on the disk"
    )


@click.command("unseal", cls=Command)
@_directory_argument
@key_options
@click.option(
    *("-o", "--output", "out"),
    required=True,
    type=click.Path(path_type=Path),
    help="Where the checkpoint goes; must not exist, or be an empty directory.",
)
@threads_option
def unseal(
    checkpoint: Path, key: Path | None, key_command: str | None, out: Path, threads: int
) -> None:
    """Decrypt the sealed checkpoint in DIR into the new directory OUT, which can be restored then.

    OUT appears when everything was found to be what was sealed; with another key, or if a byte was
    changed, nothing is there.
    """
    keep_from_dumps()
    source = key_from(key, key_command)
    with output.bars() as update:
        done = unseal_checkpoint(
            checkpoint, source, out, threads=threads, on_progress=_counted(update)
        )
    output.answer(
        {"checkpoint": checkpoint, "directory": out, **asdict(done)},
        lambda: output.say(
            f"{out}: {plural(done.files, 'file')}, {mib(done.plain_bytes)}, in the clear"
        ),
    )


@click.command("rewrap", cls=Command)
@_directory_argument
@key_options
@_to_option
def rewrap(
    checkpoint: Path, key: Path | None, key_command: str | None, certificates: tuple[Path, ...]
) -> None:
    """Write a new envelope for the sealed checkpoint in DIR, for just these certificates. The data
    is not touched.

    Who could open it before may have kept its key, or a copy of the old envelope.
    """
    keep_from_dumps()
    source = key_from(key, key_command)
    recipients = _read(certificates)
    rewrap_checkpoint(checkpoint, source, recipients)
    output.answer(
        {"checkpoint": checkpoint, "recipients": _facts(recipients)},
        lambda: output.say(
            f"{checkpoint}: its key is wrapped for {plural(len(recipients), 'recipient')}"
        ),
    )


def _counted(update: Callable[[str, int, int | None], None]) -> Callable[[int], None]:
    return lambda done: update("unsealed", done, None)


def _read(certificates: Sequence[Path]) -> list[Recipient]:
    recipients = read_recipients(certificates)
    for found in recipients:
        if found.warning:
            output.warn(f"warning: certificate {found.path} {found.warning}")
    return recipients


def _facts(recipients: Sequence[Recipient]) -> list[dict[str, object]]:
    return [
        {
            "certificate": found.path,
            "subject": found.subject,
            "key": found.key,
            "warning": found.warning,
        }
        for found in recipients
    ]
