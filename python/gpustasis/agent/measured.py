# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint that was made has taken."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from gpustasis.agent.operations import Figures
from gpustasis.agent.space import disk_used
from gpustasis.criu.images import STATISTICS_NAME, dump_figures
from gpustasis.criu.run import Run
from gpustasis.image.arena import tier_of

_PAGE = os.sysconf("SC_PAGE_SIZE")


def figures_of(
    done: Run, images: Path, duration_s: float, incremental: bool, verified: bool
) -> Figures:
    """incremental: it was built on another, unless the dump says that it is not."""
    statistics = done.statistics
    criu: dict[str, int] = {}
    with suppress(OSError):
        criu = dump_figures((images / STATISTICS_NAME).read_bytes())
    gpu = 0 if statistics is None else statistics.staged_bytes
    cpu = 0 if statistics is None else sum(one.plain_bytes for one in statistics.cpu_memory)
    stood = [criu[name] for name in ("freezing_time", "frozen_time") if name in criu]
    return Figures(
        duration_s=duration_s,
        downtime_s=sum(stood) / 1e6 if stood else None,
        size_bytes=gpu + cpu + criu.get("pages_written", 0) * _PAGE,
        stored_bytes=disk_used(images),
        gpu_bytes=gpu,
        incremental=incremental and not (statistics is not None and statistics.full_because),
        emulated=statistics is not None and statistics.emulated,
        verified=verified,
        tier=tier_of(images).value,
    )
