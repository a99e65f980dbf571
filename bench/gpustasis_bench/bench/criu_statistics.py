# SPDX-License-Identifier: Apache-2.0
"""CRIU's own figures of a dump."""

from __future__ import annotations

from pathlib import Path

from gpustasis.criu.images import STATISTICS_NAME, dump_figures
from gpustasis.errors import ImageError


def frozen_seconds(images: Path) -> float:
    """How long the tree did not run for this dump: from CRIU's beginning to stop it, the plugin's
    lock included, to CRIU's letting go of it. Raises ImageError if CRIU left no such figure."""
    path = images / STATISTICS_NAME
    try:
        figures = dump_figures(path.read_bytes())
        return (figures["freezing_time"] + figures["frozen_time"]) / 1e6
    except (OSError, KeyError) as exc:
        raise ImageError(f"cannot read CRIU's statistics {path}: {exc!r}") from exc
