# SPDX-License-Identifier: Apache-2.0
"""How long a dump takes of which nothing was measured, and what is added to a time that was."""

from __future__ import annotations

from gpustasis.text import mib

DEFAULT_RATE = 200 << 20  # bytes per second, which most disks reach
START_S = 2.0  # of criu, the driver and other ranks, without any memory
MARGIN = 1.25  # of a time that was measured


def at_rate(size: int, rate: int | None) -> tuple[float, str]:
    """Seconds for `size` bytes of memory, and what that was made of. rate: bytes per second, as
    told; None: one is assumed."""
    used = DEFAULT_RATE if rate is None else rate
    source = "as told" if rate is not None else "assumed, for none of this job was measured"
    return START_S + size / used, f"at {mib(used)} a second, {source}"
