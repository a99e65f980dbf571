# SPDX-License-Identifier: Apache-2.0
"""docs/performance.svg: times and sizes as bars, by workload and contender."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from gpustasis.errors import UnsupportedError
from gpustasis_bench.bench.report import contenders_in

_FIGURES = (
    ("dump_seconds", "dump, s", 1.0),
    ("frozen_seconds", "frozen, s", 1.0),
    ("restore_seconds", "restore, s", 1.0),
    ("stored_bytes", "stored, MiB", 2.0**20),
)
_GROUP = 0.8  # of the room between two workloads is for bars


def require_plot() -> None:
    """Raises UnsupportedError if matplotlib, which is of the extra, is not there."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UnsupportedError(
            "the plot needs matplotlib; install the extra: pip install 'gpustasis-bench[plot]'"
        )


def write_plot(whole: dict[str, Any], path: Path) -> None:
    """One row for each medium, one picture for each figure; whiskers from least to greatest."""
    require_plot()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "gpustasis"  # the same figures give the same file
    mpl.rcParams["svg.fonttype"] = "none"
    media = list(dict.fromkeys(result["medium"] for result in whole["results"]))
    figure = Figure(figsize=(15, 3.6 * len(media) + 0.8), layout="constrained")
    emulated = whole["backend"] == "emulator"
    note = "driver EMULATOR, no GPU" if emulated else whole["machine"]["gpu"]
    figure.suptitle(
        f"gpustasis beside stock CRIU, without driver calls; {whole['machine']['cores']} cores; "
        f"{note}; {whole['date']}"
    )
    grid = figure.subplots(len(media), len(_FIGURES), squeeze=False)
    for row, medium in enumerate(media):
        for column, (name, title, unit) in enumerate(_FIGURES):
            axes = grid[row][column]
            _draw(axes, whole["results"], medium, name, unit)
            axes.set_title(f"{medium}: {title}", fontsize=10)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    figure.savefig(path, metadata={"Date": None})


def _draw(axes: Any, results: list[dict[str, Any]], medium: str, name: str, unit: float) -> None:
    shown = [result for result in results if result["medium"] == medium]
    workloads = list(dict.fromkeys(result["workload"] for result in shown))
    contenders = contenders_in(results)
    width = _GROUP / len(contenders)
    for index, contender in enumerate(contenders):
        own = [result for result in shown if result["contender"] == contender]
        at = [
            workloads.index(result["workload"]) + (index - (len(contenders) - 1) / 2) * width
            for result in own
        ]
        values = [result[name] / unit for result in own]
        least = [result["spread"][name]["least"] / unit for result in own]
        greatest = [result["spread"][name]["greatest"] / unit for result in own]
        below = [value - low for value, low in zip(values, least, strict=True)]
        above = [high - value for value, high in zip(values, greatest, strict=True)]
        whiskers = [below, above]
        axes.bar(at, values, width, yerr=whiskers, label=contender, error_kw={"linewidth": 0.7})
    axes.set_xticks(range(len(workloads)), workloads, fontsize=8)
    axes.set_ylim(bottom=0)
