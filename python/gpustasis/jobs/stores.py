# SPDX-License-Identifier: Apache-2.0
"""The store that words name: endpoints of etcd, or the socket of one on this host."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gpustasis.errors import StoreError
from gpustasis.jobs.etcd import Etcd
from gpustasis.jobs.etcd_words import Access
from gpustasis.jobs.local import Local
from gpustasis.jobs.store import Store

_MAX_PASSWORD = 4096


def open_named(
    places: Sequence[str],
    *,
    ca: Path | None = None,
    certificate: Path | None = None,
    key: Path | None = None,
    user: str = "",
    password_file: Path | None = None,
) -> Store:
    """Nothing is sent yet. Raises ValueError for words that name none; StoreError if the password
    cannot be read."""
    urls = [place for place in places if "://" in place]
    if not urls:
        if len(places) != 1 or any((ca, certificate, key, user, password_file)):
            raise ValueError("a store on this host is one socket, without further options")
        return Local(Path(places[0]))
    if len(urls) != len(places):
        raise ValueError("it names either endpoints of etcd or one socket")
    return Etcd(
        Access(
            endpoints=tuple(urls),
            ca=str(ca or ""),
            certificate=str(certificate or ""),
            key=str(key or ""),
            user=user,
            password=_password(password_file),
        )
    )


def _password(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        with path.open("rb") as file:
            return file.read(_MAX_PASSWORD).decode().removesuffix("\n")
    except (OSError, UnicodeDecodeError) as exc:
        raise StoreError(f"cannot read the password in {path}: {exc}") from exc
