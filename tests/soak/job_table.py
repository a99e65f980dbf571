# SPDX-License-Identifier: Apache-2.0
"""What the campaigns job-faults, recovery and job-cost have found, as tables for
docs/reliability.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from campaigns import recovery
from gpustasis.jobs.messages import Phase
from support.ring_faults import CASES, Fault, Moment

Report = Mapping[str, Any]


def write(path: Path, report: Report) -> None:
    """Put the tables of those that were run between two comments of that page each."""
    text = path.read_text(encoding="utf-8")
    for name, tables in (
        ("job-faults", _fault_tables),
        ("recovery", _recovery_tables),
        ("job-cost", _cost_tables),
    ):
        if name in report["campaigns"]:
            text = _put(path, text, name, tables(report))
    path.write_text(text, encoding="utf-8")


def _put(path: Path, text: str, name: str, tables: str) -> str:
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"{path}: no place between {begin!r} and {end!r}")
    return f"{before}{begin}{tables}{end}{after}"


def _conditions(report: Report) -> str:
    machine = report["machine"]
    return (
        f"Date {machine['date']}, seed {report['seed']}, CRIU {', '.join(machine['criu'])}, "
        f"emulated driver {machine['emulated_driver']}, Linux {machine['kernel']}."
    )


def _fault_tables(report: Report) -> str:
    """Of each part: how often each fault has hit each moment, and how that was decided."""
    lines = [
        (
            f"{_conditions(report)} A trial is "
            "a hit if the store said, when the fault was made, that the phase was the wanted one. "
            "In `decided`: if the keeper's log said that it had not acted yet. "
            "Hits, committed + aborted:"
        ),
        "",
    ]
    for part in report["campaigns"]["job-faults"]:
        lines += [*_table(part), ""]
    return "\n".join(lines)


def _recovery_tables(report: Report) -> str:
    """Of each part: how often each fault was recovered from, and in what time."""
    lines = [
        _conditions(report),
        "",
        "| part | fault | trials | recovered | median, s | worst, s |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    jobs = failed = 0
    for part in report["campaigns"]["recovery"]:
        counts = part["counts"]
        jobs += counts.get("jobs that ended as an uninterrupted one", 0)
        failed += len(part["failures"])
        for fault in recovery.Fault:
            done = counts.get(f"{fault}: recovered", 0)
            times = [counts.get(f"{fault}: {word}, ms", 0) / 1000 for word in ("median", "worst")]
            tried = counts.get(f"{fault}: tried", 0)
            lines.append(
                f"| {part['part']} | {fault} | {tried} | {done} | {times[0]:.2f} | {times[1]:.2f} |"
            )
    lines += ["", f"{jobs} jobs ended as an uninterrupted one, {failed} did not.", ""]
    return "\n".join(lines)


def _cost_tables(report: Report) -> str:
    """Of each part: how long its checkpoints took."""
    lines = [
        _conditions(report),
        "",
        (
            "| part | checkpoints | order to decision, ms | slowest rank's dump, ms | the first "
            "less the second, ms | decision to running, ms |"
        ),
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for part in report["campaigns"]["job-cost"]:
        counts = part["counts"]
        cells = [
            f"{counts.get(f'{name}: median, ms', 0)} ({counts.get(f'{name}: least, ms', 0)} ... "
            f"{counts.get(f'{name}: most, ms', 0)})"
            for name in ("commit", "dump", "beyond", "back")
        ]
        lines.append(f"| {part['part']} | {part['trials']} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _table(part: Mapping[str, Any]) -> Sequence[str]:
    counts = part["counts"]
    missed = counts.get("phase missed", 0)
    back = counts.get("restored from the last whole checkpoint", 0)
    last = counts.get("last whole checkpoint restored", 0)
    return [
        (
            f"{part['part']}: {part['trials']} trials, {len(part['failures'])} failed, {missed} "
            f"missed the phase. After {back} of them a rank had not lived on, and all were "
            "restored from the last whole checkpoint. All were killed, and the last whole "
            f"checkpoint came back, {last} times."
        ),
        "",
        f"| fault | {' | '.join(Moment)} |",
        f"| --- |{' ---: |' * len(Moment)}",
        *(
            f"| {fault} | {' | '.join(_cell(counts, fault, moment) for moment in Moment)} |"
            for fault in Fault
        ),
    ]


def _cell(counts: Mapping[str, int], fault: Fault, moment: Moment) -> str:
    if (fault, moment) not in CASES:
        return "-"
    both = [counts.get(f"{fault} in {moment}: {p}", 0) for p in (Phase.COMMITTED, Phase.ABORTED)]
    return f"{both[0]} + {both[1]}"
