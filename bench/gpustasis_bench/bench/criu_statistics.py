"""CRIU's own figures of a dump: its file stats-dump.

Source: CRIU images/stats.proto, criu/stats.c and criu/include/magic.h (two magic words, then a
32-bit length and a protobuf message, all little-endian).
"""

from __future__ import annotations

from pathlib import Path

from gpustasis.criu.protobuf import fields
from gpustasis.errors import ImageError

STATS_NAME = "stats-dump"
_MAGICS = (0x55105940, 0x57093306)  # a service file; its kind: statistics
_DUMP = 1  # stats_entry.dump
_FREEZING_US, _FROZEN_US = 1, 2  # dump_stats_entry


def frozen_seconds(images: Path) -> float:
    """How long the tree did not run for this dump: from CRIU's beginning to stop it, the plugin's
    lock included, to CRIU's letting go of it. Raises ImageError if CRIU left no such figure."""
    path = images / STATS_NAME
    try:
        raw = path.read_bytes()
        words = tuple(int.from_bytes(raw[at : at + 4], "little") for at in (0, 4, 8))
        if words[:2] != _MAGICS:
            raise ValueError(f"magic {words[0]:#x} {words[1]:#x}")
        entry = dict(fields(raw[12 : 12 + words[2]]))[_DUMP]
        figures = dict(fields(bytes(entry)))
        total_us = sum(int(figures[number]) for number in (_FREEZING_US, _FROZEN_US))
    except (OSError, ValueError, IndexError, KeyError) as exc:
        raise ImageError(f"cannot read CRIU's statistics {path}: {exc!r}") from exc
    return total_us / 1e6
