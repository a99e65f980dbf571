# SPDX-License-Identifier: Apache-2.0
"""What commands that open sealed checkpoints have in common: the key, and what keeps it in here."""

from __future__ import annotations

import ctypes
import os
import resource
from pathlib import Path

import click

from gpustasis.cli.options import Decorated
from gpustasis.errors import SealError
from gpustasis.image.directory import allow_many_files
from gpustasis.sealing.keys import KeySource, key_source

_PR_SET_DUMPABLE = 4  # sys/prctl.h


def key_options(function: Decorated) -> Decorated:
    """--key and --key-command."""
    for option in (
        click.option(
            "--key-command",
            metavar="COMMAND",
            help="A program and its arguments, run without a shell: it gets the envelope (CMS, "
            "DER) on stdin and prints the key record, as `openssl cms -decrypt -inform DER` does.",
        ),
        click.option(
            "--key",
            metavar="FILE",
            type=click.Path(path_type=Path),
            help="The private key, PEM without a password; root's or yours, with mode 0600. "
            "Or a PKCS #11 URI, which openssl is run for.",
        ),
    ):
        function = option(function)
    return function


def key_from(key: Path | None, command: str | None) -> KeySource:
    """Of these options, one of which is there. Raises click.UsageError."""
    try:
        return key_source(key, command)
    except ValueError as exc:
        raise click.UsageError(str(exc)) from exc


def find_key(key: Path | None, command: str | None) -> KeySource | None:
    """Of these options, if one is there; this process is kept from dumps then."""
    if key is None and command is None:
        return None
    keep_from_dumps()
    return key_from(key, command)


def keep_from_dumps() -> None:
    """No core dump of a process that holds keys: with a limit of 1 the kernel makes none. One of 0,
    which an ordinary user cannot raise, does not keep it from piping one to a program
    (core_pattern): that it does for no process that is not dumpable."""
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    if most != 0:  # RLIM_INFINITY is -1
        resource.setrlimit(resource.RLIMIT_CORE, (1, most))
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise SealError(f"cannot keep this process, which will hold keys, from dumps: {reason}")
    allow_many_files()
