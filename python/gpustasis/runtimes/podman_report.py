# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint or restore took: Podman's figures, CRIU's, and ours, under Podman's names.

Podman's are those of its --print-stats (podman-container-checkpoint(1)): times in microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpustasis.criu.statistics import Stage, Statistics


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One checkpoint or restore that succeeded.

    duration_us: the whole request, as seen from here. runtime_us: of that runc's or crun's; 0: not
    known. plugin: None if no process used a GPU, or its figures are out of reach. archive: where
    it was exported to.
    """

    stage: Stage
    container_id: str
    duration_us: int
    runtime_us: int
    criu: Mapping[str, int]
    plugin: Statistics | None
    archive: Path | None = None

    def as_podman(self) -> dict[str, Any]:
        """As `podman container checkpoint --print-stats` would have it, and gpustasis_statistics."""
        verb = "checkpoint" if self.stage == "dump" else "restore"
        container: dict[str, Any] = {
            "Id": self.container_id,
            f"runtime_{verb}_duration": self.runtime_us,
            "criu_statistics": dict(self.criu),
        }
        if self.plugin is not None:
            container["gpustasis_statistics"] = plugin_figures(self.plugin)
        return {
            f"podman_{verb}_duration": self.duration_us,
            "container_statistics": [container],
        }


def plugin_figures(statistics: Statistics) -> dict[str, Any]:
    """Sizes in bytes, and the time of each phase (docs/operating.md, "Statistics") in
    microseconds, summed over the processes."""
    times: dict[str, float] = {}
    for task in statistics.tasks:
        for name, milliseconds in task.phases_ms.items():
            times[name] = times.get(name, 0) + milliseconds
    return {
        "backend": statistics.backend,
        "processes": len(statistics.tasks),
        "staged_bytes": statistics.staged_bytes,
        "same_bytes": statistics.same_bytes,
        "file_bytes": statistics.file_bytes,
        **{f"{name}_time": round(1000 * total) for name, total in times.items()},
    }
