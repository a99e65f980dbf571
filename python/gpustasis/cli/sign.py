# SPDX-License-Identifier: Apache-2.0
"""`gpustasis sign`: say who vouches for a checkpoint; and what other commands show of that."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from gpustasis.cli import output
from gpustasis.cli.framework import Command
from gpustasis.cli.key_options import keep_from_dumps
from gpustasis.cli.options import Decorated, threads_option
from gpustasis.sealing.signing import Signature, Signer, signer_of, verify_signed
from gpustasis.sealing.signing import sign as sign_checkpoint
from gpustasis.text import plural

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command("sign", cls=Command)
@click.argument(
    "checkpoint", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="DIR"
)
@click.option(
    "--key",
    metavar="FILE",
    type=_FILE,
    help="The private key, RSA or EC, PEM without a password; root's or yours, with mode 0600. Or "
    "a PKCS #11 URI, which openssl is run for.",
)
@click.option(
    "--key-command",
    metavar="COMMAND",
    help="A program and its arguments, run without a shell: it gets the statement on stdin and "
    "prints CMS, as `openssl cms -sign -binary -outform DER` does.",
)
@click.option(
    "--certificate",
    metavar="FILE",
    type=_FILE,
    help="The certificate of that key, PEM.  [default: in the file of --key]",
)
@threads_option
def command(
    checkpoint: Path,
    key: Path | None,
    key_command: str | None,
    certificate: Path | None,
    threads: int,
) -> None:
    """Sign the finished checkpoint in DIR: a list of all its files with SHA-256 of each, and CMS
    over that. What it is built on has to be signed before.

    A signature says who has signed these bytes, not what is in them: sign only what you know where
    it was made, and that nobody else could write there since.
    """
    keep_from_dumps()
    signer = _signer(key, key_command, certificate)
    with output.bars() as update:
        done = sign_checkpoint(
            checkpoint,
            signer,
            threads=threads,
            on_progress=lambda count: update("read", count, None),
        )
    _warn([done])
    output.answer(
        {"checkpoint": checkpoint, "signature": facts(done)},
        lambda: output.say(
            f"{checkpoint}: {plural(done.files, 'file')} signed by {done.subject}, {done.key}"
        ),
    )


def _signer(key: Path | None, command: str | None, certificate: Path | None) -> Signer:
    try:
        return signer_of(key, command, certificate)
    except ValueError as exc:
        raise click.UsageError(str(exc)) from exc


def sign_options(function: Decorated) -> Decorated:
    """--sign and --sign-certificate, of a command that makes a checkpoint."""
    for option in (
        click.option(
            "--sign-certificate",
            metavar="FILE",
            type=_FILE,
            help="The certificate of the key of --sign, PEM.  [default: in the same file]",
        ),
        click.option(
            "--sign",
            "sign_key",
            metavar="FILE",
            type=_FILE,
            help="Sign it with this private key, PEM, RSA or EC.",
        ),
    ):
        function = option(function)
    return function


def signer_from(key: Path | None, certificate: Path | None) -> Signer | None:
    """Of these options. Raises click.UsageError."""
    if key is None and certificate is None:
        return None
    if key is None:
        raise click.UsageError("--sign-certificate needs --sign")
    return _signer(key, None, certificate)


def trusted_option(function: Decorated) -> Decorated:
    """--trusted, as often as needed."""
    return click.option(
        "--trusted",
        multiple=True,
        metavar="CERTIFICATE",
        type=_FILE,
        help="Check that who has this certificate (PEM), or one that it has issued, has signed the "
        "checkpoint and all that it is built on. Several times: one of them.",
    )(function)


def check(checkpoint: Path, trusted: Sequence[Path], threads: int) -> list[Signature]:
    """Of a directory; none where nobody is named. Raises SealError."""
    if not trusted:
        return []
    if not checkpoint.is_dir():
        raise click.UsageError(f"--trusted: {checkpoint} is an archive: unpack it first")
    with output.bars() as update:
        found = verify_signed(
            checkpoint,
            trusted,
            threads=threads,
            on_progress=lambda count: update("signed files", count, None),
        )
    _warn(found)
    return found


def say(found: Sequence[Signature]) -> None:
    """A line for each."""
    for one in found:
        when = f", on {one.date} by its own clock" if one.date else ""
        output.say(f"{one.directory}: signed by {one.subject}, {one.key}{when}")


def facts(one: Signature) -> dict[str, object]:
    """For JSON."""
    return {
        "directory": one.directory,
        "subject": one.subject,
        "key": one.key,
        "date": one.date,
        "warning": one.warning,
        "files": one.files,
    }


def _warn(found: Sequence[Signature]) -> None:
    for one in found:
        if one.warning:
            output.warn(f"warning: the certificate of {one.subject} {one.warning}")
