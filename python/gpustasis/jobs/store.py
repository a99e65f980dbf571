# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a job need of the store that they agree in. etcd.py and local.py are two.

Keys and values are text. Every change raises the store's revision by one; an entry names the
revision at which it was last written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from gpustasis.errors import StoreError

MAX_VALUE_BYTES = 1 << 20  # etcd refuses requests above 1.5 MiB
MAX_KEY_BYTES = 1024


class Unreachable(StoreError):
    """Nobody answered in time. What was asked may have been done, or may be done yet."""


class LeaseGone(StoreError):
    """The lease has expired, and its entries with it."""


class WatchLost(StoreError):
    """Changes may have been missed: read again, and watch from there."""


@dataclass(frozen=True, slots=True)
class Entry:
    """revision: of the store, when this was written."""

    value: str
    revision: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What was stored at one revision."""

    revision: int
    entries: Mapping[str, Entry]


@dataclass(frozen=True, slots=True)
class Require:
    """The entry was last written at this revision; 0: there is none."""

    key: str
    revision: int


@dataclass(frozen=True, slots=True)
class Put:
    """lease: the entry goes when it does; 0: it stays."""

    key: str
    value: str
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """revision: of the store afterwards; of the new entries, if applied."""

    applied: bool
    revision: int


@dataclass(frozen=True, slots=True)
class Change:
    """entry: None: it is gone."""

    key: str
    entry: Entry | None
    revision: int


class Watch(Protocol):
    """The changes of some entries, in their order, each once."""

    def wait(self, timeout_s: float) -> Sequence[Change]:
        """The next ones; none: there were none in that time. Raises WatchLost; for good, then."""

    def close(self) -> None: ...


class Store(Protocol):
    """Every method raises StoreError: Unreachable if nobody answers within the store's own limit,
    else what was refused. Methods may be called by several threads."""

    def read(self, *keys: str) -> Snapshot:
        """The entries with these keys as they are now, not as some server knew them before; a key
        that ends in "/": all that begin with it."""

    def write(self, requires: Sequence[Require], puts: Sequence[Put]) -> Answer:
        """All of the puts if all that is required holds, else nothing. Entries without a lease are
        durable when it returns. Never sent twice. Raises LeaseGone."""

    def grant(self, ttl_s: int) -> int:
        """A lease that lives for so long after each keep."""

    def keep(self, lease: int) -> None:
        """Raises LeaseGone."""

    def revoke(self, lease: int) -> None:
        """End it, and its entries, now. One that is gone is no error."""

    def watch(self, key: str, after: int) -> Watch:
        """Changes later than revision `after` of an entry; of all that begin so, if the key ends
        in "/"."""

    def close(self) -> None: ...
