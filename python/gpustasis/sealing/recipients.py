# SPDX-License-Identifier: Apache-2.0
"""Whom a checkpoint is sealed for: X.509 certificates in PEM files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpustasis._core import KeyMemoryError, check_recipient
from gpustasis.errors import SealError
from gpustasis.files import open_regular

_MAX_PEM_SIZE = 64 << 10  # bytes of a file
MAX_RECIPIENTS = 256  # docs/format.md, "Envelope"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipient:
    """A certificate that is fit for one.

    pem: the file's content. subject: as RFC 2253 writes it. key: "RSA 3072". warning: that it has
    expired or is not valid yet, with the date; "": it is valid.
    """

    path: Path
    pem: bytes
    subject: str
    key: str
    warning: str


def read_recipients(paths: Sequence[Path]) -> list[Recipient]:
    """Raises SealError that names the file which cannot be read, holds not just one certificate, or
    one of a kind that no key is wrapped for."""
    if not 0 < len(paths) <= MAX_RECIPIENTS:
        raise SealError(f"{len(paths)} recipients; 1 to {MAX_RECIPIENTS} can be named")
    return [_read(path) for path in paths]


def read_pem(path: Path) -> bytes:
    """A certificate's file, or a longer one cut short. Raises SealError."""
    try:
        with open_regular(path) as file:
            return file.read(_MAX_PEM_SIZE + 1)
    except OSError as exc:
        raise SealError(f"cannot read the certificate {path}: {exc.strerror}") from exc


def _read(path: Path) -> Recipient:
    pem = read_pem(path)
    try:
        subject, key, warning = check_recipient(pem)
    except KeyMemoryError as exc:
        raise SealError(str(exc)) from exc
    except (ValueError, OSError) as exc:  # CorruptDataError is a ValueError
        raise SealError(f"certificate {path}: {exc}") from exc
    return Recipient(path=path, pem=pem, subject=subject, key=key, warning=warning)
