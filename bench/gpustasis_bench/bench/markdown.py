# SPDX-License-Identifier: Apache-2.0
"""The parts of docs/performance.md that a run of the benchmark writes: what it compares, and
downtimes. Each stays as it is where the run has measured none of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpustasis_bench.bench.contenders import OURS, STOCK
from gpustasis_bench.bench.downtime_bounds import evaluate_downtime
from gpustasis_bench.bench.downtime_page import downtime_text
from gpustasis_bench.bench.statistics import INTERVAL
from gpustasis_bench.errors import BenchError

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
DOWNTIME_BEGIN, DOWNTIME_END = "<!-- downtime:begin -->", "<!-- downtime:end -->"
_READING = (
    "Medians, without the driver's time; ± is half the distance between the quartiles. In "
    "brackets: stock over this one for times, this one over stock for sizes, geometric means over "
    f"the pairs, and their interval ({INTERVAL})."
)
_RUNNING = (
    "How long the job could not use its GPU, from lock to unlock: medians of what it saw itself. "
    "*hooks* is all that the plugin did, driver and all tasks included."
)
_RUNNING_HEAD = (
    "| what | rates | GPUs | tasks | medium | ours s | stock s | stock over ours | driver s | "
    "hooks s, ours | hooks s, stock |"
)
_CPU_MEMORY = (
    'With `cpu_memory = "ours"`. Medians; in brackets stock over ours for times, ours over stock '
    "for sizes. *resident* is the anonymous memory of the processes after the restore, over that "
    "before the dump; *stood still* what a job that was left running saw of its dump. Stock is "
    "criu without a plugin; of mixed it is that of the tables above."
)
_CPU_MEMORY_HEAD = (
    "| what | contender | medium | dump s | frozen s | restore s | stored MiB | resident | "
    "stood still s |"
)
_SEALING = (
    "A process with CUDA; half of its memory is the GPU's. *packed* and *sealed* are ours with "
    '`cpu_memory = "ours"`, the second with one recipient (RSA, 3072 bits). The others are stock '
    "CRIU whose directory goes through `tar` into a program that encrypts it, and back; their "
    "times are those of both. Nothing waits for the disk there, as ours does. Medians; in brackets "
    "this one over packed."
)
_COMPARED = ("results", "running", "cpu_memory", "trees", "sealing", "chains", "second_checkpoints")
_GIB, _MIB = 2**30, 2**20
_UNSPREAD = 1.05  # how much better a single measurement may have been


def write_page(whole: dict[str, Any], page: Path, plot: Path) -> None:
    """Replace what stands between the marks of each part that was measured. Raises BenchError if
    the page has not both."""
    require_place(page, BEGIN, END)
    require_place(page, DOWNTIME_BEGIN, DOWNTIME_END)
    downtime = downtime_text(whole)
    if downtime:
        ours = {bound["name"] for bound in evaluate_downtime(whole)}
        bounds = bounds_text([each for each in whole["bounds"] if each["name"] in ours])
        blocks = [_machine(whole), downtime, bounds, _limits(whole)]
        replace_between(page, DOWNTIME_BEGIN, DOWNTIME_END, _joined(blocks))
    if not downtime or any(whole[part] for part in _COMPARED):
        replace_between(page, BEGIN, END, results_text(whole, plot.name))


def require_place(page: Path, begin: str, end: str) -> None:
    """Raises BenchError if the page has not each of these marks once, in this order."""
    text = page.read_text(encoding="utf-8")
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise BenchError(f"{page} has no place for results: {begin} and {end}, once each")


def replace_between(page: Path, begin: str, end: str, made: str) -> None:
    """Put `made` between these marks of the page. Raises BenchError if it has none."""
    require_place(page, begin, end)
    before, rest = page.read_text(encoding="utf-8").split(begin)
    after = rest.split(end)[1]
    page.write_text(f"{before}{begin}\n{made}{end}{after}", "utf-8")


def results_text(whole: dict[str, Any], plot: str) -> str:
    """Machine, plot, tables and bounds, in Markdown, without downtimes."""
    blocks = [_machine(whole)]
    if whole["results"]:
        blocks += [f"![Times and sizes beside stock CRIU]({plot})", _READING]
    for medium in dict.fromkeys(result["medium"] for result in whole["results"]):
        blocks.append(f"### On {medium} ({whole['machine']['media'].get(medium, 'unknown')})")
        blocks.append(_results(whole, medium))
    blocks += [_running(whole), _cpu_memory(whole), _sealing(whole), _chains(whole)]
    downtimes = {bound["name"] for bound in evaluate_downtime(whole)}
    bounds = [each for each in whole["bounds"] if each["name"] not in downtimes]
    return _joined([*blocks, bounds_text(bounds), _limits(whole)])


def _joined(blocks: list[str]) -> str:
    return "\n\n".join(block for block in blocks if block) + "\n"


def _machine(whole: dict[str, Any]) -> str:
    machine, options = whole["machine"], whole["options"]
    versions = ", ".join(f"{name} {version}" for name, version in whole["versions"].items())
    where = machine["gpu"]
    if whole["backend"] == "emulator":
        where += ": the driver **emulator**, no GPU took part"
    where_and_how = (
        f"Taken on {whole['date']} with `gpustasis-bench`, {options['pairs']} pairs, seed "
        f"{options['seed']}. {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['memory_bytes'] / _GIB:.0f} GiB of memory, Linux {machine['kernel']}; {where}."
    )
    lines = [
        where_and_how,
        f"Versions: {versions}.",
    ]
    lines += [f"**Not usable:** {reason}." for reason in whole["not_usable_because"]]
    if not whole["complete"]:
        lines.insert(0, "**The run was broken off: not all is here.**")
    cooled = [f"{name}: {how}" for name, how in whole["page_cache_before_restores"].items()]
    lines.append(f"Before each restore: {'; '.join(cooled)}.")
    lines += [f"{name}: {why}." for name, why in whole["absent"].items()]
    lines += [f"**Not measured:** {failure}." for failure in whole["failures"]]
    return "\n".join(lines)


def _results(whole: dict[str, Any], medium: str) -> str:
    head = (
        "| workload | contender | dump s | frozen s | restore s | stored MiB | memory MiB | "
        "driver s, dump + restore | with the driver's: dump | restore |"
    )
    lines = [head, "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"]
    for result in whole["results"]:
        if result["medium"] != medium:
            continue
        driver = result["driver_seconds"]
        cells = [
            result["workload"],
            result["contender"],
            *(
                _time(result, name)
                for name in ("dump_seconds", "frozen_seconds", "restore_seconds")
            ),
            _size(result, "stored_bytes"),
            f"{result['peak_rss_bytes'] / _MIB:.0f}",
            f"{driver['dump']:.2f} + {driver['restore']:.2f}",
            *(
                f"{result['with_driver'][name]:.2f}{_ratio(result, name, 2, 'ratios_with_driver')}"
                for name in ("dump_seconds", "restore_seconds")
            ),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _time(result: dict[str, Any], name: str) -> str:
    half = result["spread"][name]["relative"] * result[name]
    return f"{result[name]:.3f} ± {half:.3f}{_ratio(result, name, 2)}"


def _size(result: dict[str, Any], name: str) -> str:
    return f"{result[name] / _MIB:.1f}{_ratio(result, name, 3)}"


def _ratio(result: dict[str, Any], name: str, digits: int, key: str = "ratios") -> str:
    ratio = result[key][name]
    if ratio is None or result["contender"] == STOCK:
        return ""
    if ratio["low"] is None or ratio["low"] == ratio["high"]:
        return f" ({ratio['mean']:.{digits}f})"
    return f" ({ratio['mean']:.{digits}f}: {ratio['low']:.{digits}f} … {ratio['high']:.{digits}f})"


def _running(whole: dict[str, Any]) -> str:
    if not whole["running"]:
        return ""
    lines = [
        "### Jobs that are left running",
        "",
        _RUNNING,
        "",
        _RUNNING_HEAD,
        "| --- | --- | ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for one in whole["running"]:
        ours, stock = (one["contenders"][name] for name in (OURS, STOCK))
        interval = "" if one["ratio"]["low"] is None else _interval(one["ratio"])
        cells = [
            *(one["workload"], one["rates"], str(one["gpus"]), str(one["tasks"]), one["medium"]),
            f"{ours['downtime_seconds']:.3f}",
            f"{stock['downtime_seconds']:.3f}",
            f"{one['ratio']['mean']:.2f}{interval}",
            *(f"{ours['driver_seconds']:.3f}", f"{ours['hook_seconds']:.3f}"),
            f"{stock['hook_seconds']:.3f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cpu_memory(whole: dict[str, Any]) -> str:
    measured = whole["cpu_memory"] + whole["trees"]
    if not measured:
        return ""
    lines = [
        "### CPU memory",
        "",
        _CPU_MEMORY,
        "",
        _CPU_MEMORY_HEAD,
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for one in measured:
        what = one["workload"] if "workload" in one else f"tree of {one['processes']:,}"
        for name in (OURS, STOCK):
            found, ratios = one["contenders"][name], one["ratios"] if name == OURS else {}
            stored = f"{found['stored_bytes'] / _MIB:.1f}"
            if ratios:
                stored += f" ({ratios['stored_bytes']['mean']:.3f})"
            downtime = ""
            if "downtime_seconds" in found:
                downtime = _seconds(found, ratios, "downtime_seconds")
            cells = [
                *(what, name, one["medium"]),
                *(
                    _seconds(found, ratios, figure)
                    for figure in ("dump_seconds", "frozen_seconds", "restore_seconds")
                ),
                *(stored, f"{found['rss_share']:.3f}", downtime),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _sealing(whole: dict[str, Any]) -> str:
    if not whole["sealing"]:
        return ""
    versions = whole["sealing"][0]["versions"]
    told = ", ".join(f"{name} {version}" for name, version in versions.items())
    lines = [
        "### Sealed",
        "",
        f"{_SEALING} {told}.",
        "",
        "| contender | medium | dump s | restore s | stored MiB |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    for one in whole["sealing"]:
        for name, found in one["contenders"].items():
            ratios = one["ratios"].get(name, {})
            stored = f"{found['stored_bytes'] / _MIB:.1f}"
            times = (_seconds(found, ratios, f"{stage}_seconds") for stage in ("dump", "restore"))
            lines.append(f"| {' | '.join([name, one['medium'], *times, stored])} |")
    return "\n".join(lines)


def _seconds(found: dict[str, Any], ratios: dict[str, Any], figure: str) -> str:
    if not ratios:
        return f"{found[figure]:.3f}"
    ratio = ratios[figure]
    interval = ")"
    if ratio["low"] is not None:
        interval = f": {ratio['low']:.2f} … {ratio['high']:.2f})"
    return f"{found[figure]:.3f} ({ratio['mean']:.2f}{interval}"


def _interval(ratio: dict[str, Any]) -> str:
    return f" ({ratio['low']:.2f} … {ratio['high']:.2f})"


def _chains(whole: dict[str, Any]) -> str:
    lines = []
    for second in whole["second_checkpoints"]:
        ours, stock = second["ours"], second["stock"]
        lines.append(
            f"* Second checkpoint of {second['workload']} on {second['medium']}: "
            f"{second['skipped_of_nonzero']:.1%} of the chunks that are not zero are the "
            f"parent's ({second['skipped_of_all']:.1%} of all are not written); dump "
            f"{ours['dump_seconds']:.3f} s and {ours['stored_bytes'] / _MIB:.1f} MiB, a full one "
            f"of stock CRIU's {stock['dump_seconds']:.3f} s and "
            f"{stock['stored_bytes'] / _MIB:.1f} MiB."
        )
    lines += [
        f"* Restore through a chain of {chain['length']} on {chain['medium']}: "
        f"{chain['chain_restore_seconds']:.3f} s; from a full checkpoint of the same memory "
        f"{chain['full_restore_seconds']:.3f} s."
        for chain in whole["chains"]
    ]
    return "### Checkpoints on top of others\n\n" + "\n".join(lines) if lines else ""


def bounds_text(bounds: list[dict[str, Any]]) -> str:
    """A table of them, or nothing if there is none."""
    if not bounds:
        return ""
    known = [bound for bound in bounds if bound["not_measured"] is None]
    missed = [bound for bound in known if not bound["met"]]
    beyond = sum(map(_is_out_of_reach, missed))
    unproven = sum(bound["met"] and bound["proven"] is False for bound in known)
    lines = [
        "### Bounds",
        "",
        (
            f"{len(known)} bounds: {len(known) - len(missed)} met, {unproven} of them not proven; "
            f"{len(missed)} missed, {beyond} of them not possible here: "
            "all that must be done, at the bandwidths of this run, misses the bound as well, also "
            "at the better end of the spread of what was measured (without one, if it were "
            f"{_UNSPREAD - 1:.0%} better)."
        ),
        "",
        "| what | medium | bound | measured | met | all that must be done | the slowest of it |",
        "| --- | --- | ---: | ---: | --- | ---: | --- |",
    ]
    for bound in bounds:
        measured = "-" if bound["measured"] is None else f"{bound['measured']:g}"
        if bound["low"] is not None:
            measured += f" ({bound['low']:.2f} … {bound['high']:.2f})"
        best = "" if bound["best"] is None else f"{bound['best']:.2f}: {bound['least_of']}"
        met = "yes" if bound["met"] else "**no**"
        if not bound["met"] and _is_out_of_reach(bound):
            met += ", not possible here"
        if bound["proven"] is False:
            met += ", not proven"
        if bound["not_measured"] is not None:
            met = f"not measured: {bound['not_measured']}"
        in_turn = "" if bound["in_turn"] is None else f"{bound['in_turn']:.2f}"
        cells = [bound["name"], bound["medium"], bound["bound"], measured, met, in_turn, best]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _is_out_of_reach(bound: dict[str, Any]) -> bool:
    """Whether even all that must be done, each part at its bandwidth in the same run, misses it:
    also if it were better by as much as what was measured is at the better end of its interval.
    What was measured to be better than that proves nothing."""
    in_turn, measured = bound["in_turn"], bound["measured"]
    if in_turn is None:
        return False
    sign, limit = bound["bound"].split()
    is_least = sign == ">="
    end = bound["high"] if is_least else bound["low"]
    better = _UNSPREAD if is_least else 1 / _UNSPREAD
    if measured and end is not None:
        better = end / measured
    if is_least:
        is_beaten = measured is not None and measured > in_turn
        return not is_beaten and in_turn * better < float(limit)
    is_beaten = measured is not None and measured < in_turn
    return not is_beaten and in_turn * better > float(limit)


def _limits(whole: dict[str, Any]) -> str:
    limits = whole["limits"]
    if limits is None:
        return ""
    rows = {
        "memcpy": limits["memcpy"],
        "process_vm_readv, memory that is there": limits["read_process"],
        "process_vm_writev, memory that is not": limits["write_process"],
        "madvise(MADV_DONTNEED)": limits["drop"],
        "LZ4 of noise": {"1": limits["lz4_random"]},
        "XXH3-128": {"1": limits["xxh3"]},
    }
    for medium, filesystem in whole["machine"]["media"].items():
        past = "" if filesystem == "tmpfs" else ", past the page cache"
        rows[f"{medium}: write and fdatasync{past}"] = limits[medium]["write"]
        if "rewrite" in limits[medium]:
            rewrite = f"{medium}: write into one file, over pages that are there"
            rows[rewrite] = limits[medium]["rewrite"]
        rows[f"{medium}: read, cold{past}"] = limits[medium]["read"]
    threads = sorted({int(each) for rates in rows.values() for each in rates})
    titles = [f"{each} thread{'' if each == 1 else 's'}" for each in threads]
    lines = [
        "### What the machine can do",
        "",
        "Each is the best of three times.",
        "",
        f"| GiB/s | {' | '.join(titles)} |",
        f"| --- |{' ---: |' * len(threads)}",
    ]
    for name, rates in rows.items():
        found = (rates.get(str(each)) for each in threads)
        cells = ["" if rate is None else f"{rate / _GIB:.2f}" for rate in found]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)
