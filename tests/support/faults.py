# SPDX-License-Identifier: Apache-2.0
"""Faults of the emulated driver that tests have asked for."""

from __future__ import annotations

import time

from gpustasis.emulator import Emulator
from support.job import POLL_S, TIMEOUT_S


def await_hit(emulator: Emulator) -> None:
    """Until each fault has met the operation that it is for, as often as was asked."""
    deadline = time.monotonic() + TIMEOUT_S
    while left := emulator.status()["faults"]:
        assert time.monotonic() < deadline, f"nobody has met {left}"
        time.sleep(POLL_S)
