# SPDX-License-Identifier: Apache-2.0
"""Who may knock: connections of which nobody knows yet from whom they are."""

from __future__ import annotations

import ipaddress
import threading
from collections import Counter


class Slots:
    """most: at a time; each: of one address, so that one host cannot have them all."""

    def __init__(self, most: int, each: int) -> None:
        self._most = most
        self._each = each
        self._taken: Counter[str] = Counter()
        self._lock = threading.Lock()

    def take(self, host: str) -> bool:
        """False: there is none for it."""
        name = _group(host)
        with self._lock:
            if self._taken.total() >= self._most or self._taken[name] >= self._each:
                return False
            self._taken[name] += 1
            return True

    def give(self, host: str) -> None:
        """Back what was taken."""
        name = _group(host)
        with self._lock:
            self._taken[name] -= 1
            if not self._taken[name]:
                del self._taken[name]


def _group(host: str) -> str:
    """An IPv6 host has 2**64 addresses of its own: they count as one."""
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if found.version == 4 or found.ipv4_mapped is not None:
        return host
    return str(ipaddress.IPv6Network((int(found), 64), strict=False))
