# SPDX-License-Identifier: Apache-2.0
"""What the campaign job-faults has found, as tables for docs/reliability.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpustasis.jobs.messages import Phase
from support.ring_faults import CASES, Fault, Moment

_BEGIN, _END = "<!-- job-faults -->\n", "<!-- end of job-faults -->\n"


def write(path: Path, report: Mapping[str, Any]) -> None:
    """Put the tables between two comments of that page."""
    before, _, rest = path.read_text(encoding="utf-8").partition(_BEGIN)
    _, _, after = rest.partition(_END)
    if not after:
        raise ValueError(f"{path}: no place between {_BEGIN!r} and {_END!r}")
    made = f"{before}{_BEGIN}{tables(report)}{_END}{after}"
    path.write_text(made, encoding="utf-8")


def tables(report: Mapping[str, Any]) -> str:
    """Of each part: how often each fault has hit each moment, and how that was decided."""
    machine, parts = report["machine"], report["campaigns"]["job-faults"]
    lines = [
        (
            f"Date {machine['date']}, seed {report['seed']}, CRIU {', '.join(machine['criu'])}, "
            f"emulated driver {machine['emulated_driver']}, Linux {machine['kernel']}. A trial is "
            "a hit if the store said, when the fault was made, that the phase was the wanted one. "
            "In `decided`: if the keeper's log said that it had not acted yet. "
            "Hits, committed + aborted:"
        ),
        "",
    ]
    for part in parts:
        lines += [*_table(part), ""]
    return "\n".join(lines)


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
