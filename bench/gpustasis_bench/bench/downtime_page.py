# SPDX-License-Identifier: Apache-2.0
"""Downtimes and their model in Markdown: a part of what a run writes into docs/performance.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpustasis_bench.bench.contenders import DIRECT, STAGED, STOCK

_GIB, _MIB, _GB = 2**30, 2**20, 10**9
_DOWNTIME = (
    "Medians. In brackets stock over this one, pair by pair, with its interval. *stood still*: "
    "from lock to unlock, as the job saw it. *dump*: from criu's start to its end, the driver's "
    "time included, with the job's way back; *restore*: of the same images after the job's end, "
    "from a cold disk. *disk alone*: in the same rounds, to read these images from the cold disk, "
    "and to write as many bytes to it and sync them, and nothing else. *processor*: seconds of "
    "user and system a GiB of GPU memory, of criu, worker and guardians; *drain*: the same of the "
    "drain. *host memory*: beyond the job, at its highest: criu, worker, guardians, growth of the "
    "job, and what lies in a tmpfs."
)
_HEAD = (
    "| GPUs of each task | tasks | rates | contender | stood still s | dump s | restore s "
    "| from memory s | disk alone s: read, write | processor s/GiB | drain s/GiB "
    "| host memory MiB |"
)
_CONTENT_HEAD = (
    "| what | contender | stood still s | without the driver's s | dump s | restore s | from "
    "memory s | disk alone s: read, write | processor s/GiB | drain s/GiB | host memory MiB |"
)
_MODEL = (
    "*predicted* is what `model.py` makes of the rates, of the bandwidths of this machine (below), "
    "and of what a dump of nearly nothing took here (*fixed*, without the driver's time for it). "
    "Ratio: measured over predicted."
)
_MODEL_HEAD = (
    "| GPUs of each task | tasks | contender | fixed s | driver down | store | drop | put back "
    "| driver up | predicted s | measured s | ratio |"
)
_PREDICTIONS = (
    "**Predictions, measured by nobody:** seconds for which a job would stand still, of one task "
    "and of eight, each with a GPU, all of whose memory is noise. The host is that of "
    "oOraph/bench-criu (8 x A100): it reads 9 GB/s out of tasks and its disks take 16 GB/s, "
    "however many GPUs there are, and this is what limits eight of them; hashing as on the machine "
    "of this page, with 16 threads. That its memory takes 24 GB/s and gives back as much, of 16 "
    "threads that copy to pages that are there, is assumed: nobody has published it. It is in what "
    "*ours ram* and *ours direct+ram* take. The H100 that was tried ([hardware](hardware.md)) "
    "copied 1.8 to 2.0 GB/s down, or 3.1 to 3.6 with transparent huge pages on `always`, and 4.3 "
    "to 6.2 GB/s up, not the published 5 each way: its staged columns are too low by about 25 s, "
    "stock's of 8 GPUs by about 200 s. Direct memory was tried on no GPU. The table before says by "
    "how much what was measured here exceeds what the model predicts for it: expect the same there."
)


def downtime_text(whole: Mapping[str, Any]) -> str:
    """All tables of `downtime`, or nothing if that was not asked for."""
    found = whole["downtime"]
    if not found or "scale" not in found:
        return ""
    blocks = [_introduction(found), _shapes(found), _contents(found)]
    blocks += [_others(found), _model(found), _predictions(found)]
    return "\n\n".join(block for block in blocks if block)


def _introduction(found: Mapping[str, Any]) -> str:
    size, scale = found["size_bytes"], found["scale"]
    pairs = f"{found['pairs']} pairs, by GPUs and tasks {found['shape_pairs']}"
    lines = [f"Emulated GPUs; images on {found['medium']}; {pairs}. {_DOWNTIME}", ""]
    for name, rates in found["rates"].items():
        down, up = rates["down"] / _GB, rates["up"] / _GB
        lines.append(f"* Rates, {name}: of each GPU {down:g} GB/s down and {up:g} GB/s up.")
    lines.append(
        f"* By GPUs and tasks: each GPU holds {size / _MIB:.0f} MiB of noise; rates are divided "
        f"by {scale:g}. So the driver takes as long as for {size * scale / _GIB:g} GiB, and the "
        "host counts as one that is so many times faster than this."
    )
    lines += [f"* Not measured: {name}: {why}." for name, why in found["absent"].items()]
    return "\n".join(lines)


def _shapes(found: Mapping[str, Any]) -> str:
    if not found["shapes"]:
        return ""
    lines = [_HEAD, _rule(4, 8)]
    for shape in found["shapes"]:
        for name, one in shape["contenders"].items():
            rates = "off" if shape["rates"] == "off" else DIRECT if "direct" in name else STAGED
            cells = [
                *(str(shape["gpus"]), str(shape["tasks"]), rates, name),
                *_times(one, shape["ratios"][name], name),
                _warm(one, shape["ratios"][name], name),
                _alone(one),
                *_costs(one),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _contents(found: Mapping[str, Any]) -> str:
    if not found["contents"]:
        return ""
    lines = [_CONTENT_HEAD, _rule(2, 9)]
    for content in found["contents"]:
        for name, one in content["contenders"].items():
            ratios = content["ratios"][name]
            still, dump, restore = _times(one, ratios, name)
            without = ""
            if "without_driver_seconds" in one:
                without = _cell(one, ratios, "without_driver_seconds", name)
            warm = _warm(one, ratios, name)
            what = f"{content['workload']}, {content['gpu_bytes'] / _MIB:.0f} MiB"
            cells = [what, name, still, without, dump, restore, warm, _alone(one), *_costs(one)]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _alone(one: Mapping[str, Any]) -> str:
    figures = ("reading_seconds", "writing_seconds")
    return ", ".join(f"{one[figure]:.3f}" for figure in figures if figure in one)


def _others(found: Mapping[str, Any]) -> str:
    lines = []
    for second in found["second"]:
        for name, one in second["contenders"].items():
            gaps = one["downtime_seconds"]
            line = (
                f"* Second checkpoint of {second['workload']}, {name}: the job stands still for "
                f"{gaps['full']:.3f} s, on top of the first for {gaps['incremental']:.3f} s: "
                f"{_interval(one['ratio'])}"
            )
            if one["ratio_without_driver"]:
                line += f"; without the driver's time {_interval(one['ratio_without_driver'])}"
            lines.append(f"{line}.")
    lines += _first(found)
    lines += [
        f"* Programs on all processors beside a drain at {each['rate_limit_bytes'] / _MIB:.0f} "
        f"MiB/s at most ({each['contender']}): {_interval(each['ratio'])} of their rounds alone. "
        f"In these {each['window_seconds']:.0f} s they left the drain "
        f"{each['window_bytes_per_second'] / _MIB:.0f} MiB/s and {each['window_cpu_seconds']:.2f} "
        f"s of a processor; in all it took {each['drain_seconds']:.1f} s and "
        f"{each['drain_cpu_seconds']:.2f} s."
        for each in found["neighbours"]
    ]
    return "\n".join(lines)


def _first(found: Mapping[str, Any]) -> list[str]:
    return [
        f"* The first dump into an arena that has no memory yet, {shape['gpu_bytes'] / _MIB:.0f} "
        f"MiB in {shape['tasks']} tasks, {name}: {one['first_downtime_seconds']:.3f} s; all later "
        f"ones: {one['downtime_seconds']:.3f} s."
        for shape in found["shapes"]
        if (shape["gpus"], shape["rates"]) == (1, "published")
        for name, one in shape["contenders"].items()
        if "first_downtime_seconds" in one
    ]


def _model(found: Mapping[str, Any]) -> str:
    if not found["model"]:
        return ""
    lines = [
        "### The model beside the measurements",
        "",
        _MODEL,
        "",
        _MODEL_HEAD,
        _rule(3, 9),
    ]
    for row in found["model"]:
        parts = row["parts"]
        names = ("fixed", "down", "store", "drop", "refill", "up")
        cells = [
            *(str(row["gpus"]), str(row["tasks"]), row["contender"]),
            *(f"{parts[name]:.3f}" for name in names),
            f"{row['predicted_seconds']:.3f}",
            f"{row['measured_seconds']:.3f}",
            f"{row['ratio']:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _predictions(found: Mapping[str, Any]) -> str:
    rows = found["predictions"]
    names = list(rows[0]["seconds"])
    lines = ["### What the model predicts for GPUs", "", _PREDICTIONS, ""]
    lines += [
        f"* {each['what']}: predicted {each['predicted_seconds']} s for the dump of "
        f"76 GB, published {each['measured_seconds']} s (oOraph/bench-criu)."
        for each in found["published_dumps"]
    ]
    lines += [
        "",
        f"| prediction for | GPUs | GB each | {' | '.join(names)} | rates from |",
        _rule(1, 2 + len(names), 1),
    ]
    for row in rows:
        seconds = [f"{row['seconds'][name]:.0f}" for name in names]
        source = row["source"] + (f"; assumed: {row['assumed']}" if row["assumed"] else "")
        size = f"{row['gpu_bytes'] / _GB:g}"
        lines.append(f"| {' | '.join([row['gpu'], str(row['gpus']), size, *seconds, source])} |")
    return "\n".join(lines)


def _times(one: Mapping[str, Any], ratios: Mapping[str, Any], name: str) -> list[str]:
    figures = ("downtime_seconds", "dump_seconds", "restore_seconds")
    return [_cell(one, ratios, figure, name) for figure in figures]


def _warm(one: Mapping[str, Any], ratios: Mapping[str, Any], name: str) -> str:
    figure = "warm_restore_seconds"
    return _cell(one, ratios, figure, name) if figure in one else ""


def _costs(one: Mapping[str, Any]) -> list[str]:
    drain = one.get("drain_cpu_seconds_per_gib")
    return [
        f"{one['cpu_seconds_per_gib']:.2f}",
        "" if drain is None else f"{drain:.2f}",
        f"{one['host_bytes'] / _MIB:.0f}",
    ]


def _cell(one: Mapping[str, Any], ratios: Mapping[str, Any], figure: str, name: str) -> str:
    ratio = ratios.get(figure)
    if ratio is None or name == STOCK:
        return f"{one[figure]:.3f}"
    return f"{one[figure]:.3f} ({_interval(ratio, ': ')})"


def _interval(ratio: Mapping[str, Any] | None, before: str = " (") -> str:
    if ratio is None:
        return "no ratio"
    if ratio["low"] is None:
        return f"{ratio['mean']:.2f}"
    after = ")" if before == " (" else ""
    return f"{ratio['mean']:.2f}{before}{ratio['low']:.2f} … {ratio['high']:.2f}{after}"


def _rule(texts: int, numbers: int, last_texts: int = 0) -> str:
    cells: Sequence[str] = ["---"] * texts + ["---:"] * numbers + ["---"] * last_texts
    return f"| {' | '.join(cells)} |"
