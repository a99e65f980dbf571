# SPDX-License-Identifier: Apache-2.0
"""Signed checkpoints: who has signed which files. docs/format.md has statement and signature,
docs/security.md what they are worth.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from gpustasis import process
from gpustasis._core import (
    MAX_SIGNATURE_SIZE,
    PARENT_LINK,
    SignedBy,
    SignedStatement,
    check_signer,
    make_statement,
    sign_statement,
    verify_statement,
    write_signed,
)
from gpustasis.criu.images import INVENTORY_NAME
from gpustasis.criu.plugin import run_settings
from gpustasis.errors import SealError
from gpustasis.image.arena import require_durable
from gpustasis.image.checkpoint import NO_PARENT, find_manifest, find_parent, is_sealed
from gpustasis.image.directory import share
from gpustasis.sealing.keys import (
    COMMAND_TIMEOUT_S,
    is_token,
    sealed_errors,
    token_words,
)
from gpustasis.sealing.recipients import read_pem

OnProgress = Callable[[int], object]
_MOST_ANCESTORS = 65535  # docs/format.md
_HEAD_LINES = 3  # of a statement, before those of files
_SAID = 400  # characters of what a program said, in an error


class Signer(Protocol):
    """What signs."""

    def sign(self, statement: bytes) -> tuple[bytes, SignedBy]:
        """CMS SignedData, detached, DER, and by whom it is. Raises SealError."""


@dataclass(frozen=True, slots=True)
class SignerFile:
    """A private key (PEM) that nobody else may read. certificate: None: in the same file."""

    key: Path
    certificate: Path | None

    def sign(self, statement: bytes) -> tuple[bytes, SignedBy]:
        """See Signer."""
        with sealed_errors("sign"):
            return sign_statement(statement, self.key, self.certificate)


@dataclass(frozen=True, slots=True)
class SignerCommand:
    """A program that is given the statement on stdin, and prints what `openssl cms -sign -binary
    -outform DER` does."""

    argv: Sequence[str]
    certificate: Path

    def sign(self, statement: bytes) -> tuple[bytes, SignedBy]:
        """See Signer."""
        pem = read_pem(self.certificate)
        with sealed_errors(f"certificate {self.certificate}"):
            check_signer(pem)
        with _memory() as given, _memory() as printed:
            given.write(statement)
            given.seek(0)
            finished = self._run(given, printed)
            if finished.status != 0:
                said = finished.errors.strip()[-_SAID:]
                raise SealError(f"{self.argv[0]} did not sign ({finished.ending}): {said}")
            printed.seek(0)
            signature = printed.read(MAX_SIGNATURE_SIZE + 1)
        with sealed_errors(f"what {self.argv[0]} has printed"):
            return signature, verify_statement(statement, signature, [pem])

    def _run(self, given: BinaryIO, printed: BinaryIO) -> process.Finished:
        def watch() -> None:
            if os.fstat(printed.fileno()).st_size > MAX_SIGNATURE_SIZE:
                raise SealError(
                    f"{self.argv[0]} prints more than the {MAX_SIGNATURE_SIZE} bytes of a "
                    "signature, and was killed"
                )

        try:
            return process.run(
                self.argv,
                apart=True,
                bounded=True,
                stdin=given.fileno(),
                stdout=printed.fileno(),
                timeout_s=COMMAND_TIMEOUT_S,
                on_tick=watch,
            )
        except TimeoutError as exc:
            raise SealError(f"{self.argv[0]} did not end within {COMMAND_TIMEOUT_S:g} s") from exc
        except OSError as exc:
            raise SealError(f"cannot run {self.argv[0]}: {exc.strerror}") from exc


@dataclass(frozen=True, slots=True)
class SignerToken:
    """A PKCS #11 URI. openssl uses the token, in a process of its own."""

    uri: str
    certificate: Path

    def sign(self, statement: bytes) -> tuple[bytes, SignedBy]:
        """See Signer. Raises UnsupportedError if openssl cannot use any token."""
        words = ("openssl", "cms", "-sign", "-binary", "-outform", "DER")
        argv = [*words, "-signer", str(self.certificate), *token_words(self.uri)]
        return SignerCommand(argv, self.certificate).sign(statement)


def _memory() -> BinaryIO:
    return open(os.memfd_create("gpustasis"), "w+b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """One that was found good. files: how many it names; date: by the signer's own clock, "": it
    does not say; warning: that the certificate has expired, or is not valid yet; "": it is."""

    directory: Path
    subject: str
    key: str
    date: str
    warning: str
    files: int


def sign(
    directory: Path, signer: Signer, *, threads: int = 0, on_progress: OnProgress | None = None
) -> Signature:
    """Sign all files of the finished checkpoint in `directory`, and with them what it is built on,
    which is signed already. What was signed before there is signed anew.

    threads: 0: one for each processor. Raises SealError for what cannot be signed.
    """
    with share(directory):
        return sign_held(directory, signer, threads=threads, on_progress=on_progress)


def sign_held(
    directory: Path, signer: Signer, *, threads: int = 0, on_progress: OnProgress | None = None
) -> Signature:
    """The same, where the caller keeps others from the directory."""
    require_durable(directory, "sign it")
    if not (directory / INVENTORY_NAME).is_file():
        raise SealError(f"{directory} holds no whole checkpoint: it has no {INVENTORY_NAME}")
    place = f"{directory}: sign"
    with sealed_errors(place):
        statement = make_statement(directory, _parent(directory), threads, on_progress)
    signature, by = signer.sign(statement)
    with sealed_errors(place):
        write_signed(directory, statement, signature)
    return _signature(directory, by, statement.count(b"\n") - _HEAD_LINES)


def _signature(directory: Path, by: SignedBy, files: int) -> Signature:
    return Signature(
        directory=directory,
        subject=by.subject,
        key=by.key,
        date=by.date,
        warning=by.warning,
        files=files,
    )


def verify_signed(
    directory: Path,
    trusted: Sequence[Path],
    *,
    own: bool = False,
    threads: int = 0,
    on_progress: OnProgress | None = None,
) -> list[Signature]:
    """Check that one of `trusted`, certificates (PEM), has signed all files of the checkpoint in
    `directory`, and what is read of those that it is built on; one signature for each, the
    checkpoint's own first.

    own: nobody but root and this user may be able to write there. Raises SealError for the first
    that is wrong.
    """
    pems = [read_pem(path) for path in trusted]
    found: list[Signature] = []
    wanted: bytes | None = None
    at: Path | None = directory
    while at is not None:
        with sealed_errors(str(at)):
            signed = SignedStatement.read(at, pems, own=own)
            if wanted is not None and signed.digest != wanted:
                raise SealError(
                    f"{at}: its statement is not the one that was signed with the checkpoint built "
                    "on it: it is another one, or an older one"
                )
            signed.check(at, for_others=bool(found), own=own, threads=threads, progress=on_progress)
        found.append(_signature(at, signed.by, len(signed.files)))
        wanted, at = signed.parent, _parent(at)
        if (wanted is None) != (at is None) or len(found) > _MOST_ANCESTORS:
            raise SealError(
                f"{found[-1].directory}: its statement "
                + ("names no parent, and it is built on one" if at else "names a parent")
                + ("" if at else f", and it has no {PARENT_LINK}")
            )
    return found


def _parent(directory: Path) -> Path | None:
    """What the checkpoint in `directory` is built on. Raises SealError if that cannot be found."""
    if not os.path.islink(directory / PARENT_LINK):
        return None
    manifest = None if is_sealed(directory) else find_manifest(directory)
    if manifest is not None and manifest.parent_id == NO_PARENT:
        return None
    parent = find_parent(directory)
    if parent is None:
        raise SealError(f"{directory}: {PARENT_LINK} leads to no checkpoint")
    return parent


def configured_trusted(environ: Mapping[str, str]) -> list[Path]:
    """The certificates that the plugin's configuration names as trusted. Raises CheckpointError if
    that cannot be read."""
    named = run_settings(environ).get("trusted")
    if isinstance(named, str):
        named = named.split(",")
    return [Path(one) for one in named] if isinstance(named, Sequence) else []


def signer_of(key: Path | None, command: str | None, certificate: Path | None) -> Signer:
    """Of a command line, which names just one of the first two. Raises ValueError."""
    if (key is None) == (command is None):
        raise ValueError("name one private key: --key FILE, or --key-command 'PROGRAM ARGUMENTS'")
    if key is not None and is_token(key):
        if certificate is None:
            raise ValueError("--key pkcs11: needs --certificate: that of the key in the token")
        return SignerToken(str(key), certificate)
    if key is not None:
        return SignerFile(key, certificate)
    assert command is not None
    if certificate is None:
        raise ValueError("--key-command needs --certificate: that of the key which the program has")
    try:
        argv = shlex.split(command)
    except ValueError as exc:
        raise ValueError(f"--key-command cannot be split into words: {exc}") from exc
    if not argv:
        raise ValueError("--key-command is empty")
    return SignerCommand(argv, certificate)
