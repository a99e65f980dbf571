# SPDX-License-Identifier: Apache-2.0
"""Processes that have a file open."""

from __future__ import annotations

from gpustasis.task import open_files


def find_openers(part: str, *comms: str) -> list[int]:
    """Those of these names, as open_files() sees them, with one whose path holds `part`."""
    every = [each for opened in open_files(*comms).values() for each in opened.items()]
    return [pid for pid, names in every if any(part in name for name in names)]
