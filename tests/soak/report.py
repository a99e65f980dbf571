# SPDX-License-Identifier: Apache-2.0
"""The report of the long campaigns: JSON for programs, Markdown for people."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from campaigns.tally import Tally
from soak.plan import CAMPAIGNS

VERSION = 1
BROKEN_OFF = "broken off"  # the part of a campaign that could not go on
# Those of tests/campaigns/kill_points.py, direct_dump.py and ram_dump.py, for people.
_PHASES = {
    "start": "criu has been started, and the plugin has not yet asked the driver for anything",
    "lock": "the driver locks the tasks: GPU work drains",
    "freeze": "criu stops the tasks",
    "checkpoint": "the driver copies GPU memory to the host, and the plugin writes it",
    "handing over": "direct: the driver has handed GPU memory over; nothing of it is stored",
    "storing": "direct: the worker stores it; in memory first: an image goes into the arena",
    "stored": "direct: the images are complete, and the driver takes its memory back",
    "drop": "the plugin takes pages, which are in its image and synced, from a task",
    "store": "the plugin stores CPU memory",
    "collect": "criu looks at namespaces, mounts and files",
    "dump tasks": "criu dumps the tasks, with code of its own in them",
    "finish": "criu writes its inventory, and the plugin its manifest, pack or sealed file",
    "refill": "the plugin puts pages back into a job that runs on",
    "restoring": "direct: the worker gives a job that runs on its memory back",
    "unlocking": "direct: all have theirs, and the driver unlocks them",
    "end": "all is done, and criu is about to end",
}


def describe_part(name: str, tally: Tally, seconds: float) -> dict[str, Any]:
    return {
        "part": name,
        "trials": tally.trials,
        "failures": tally.failures,
        "counts": {key: tally.counts[key] for key in sorted(tally.counts) if key != "trials"},
        "seconds": round(seconds, 1),
    }


def describe_machine(criu_versions: Sequence[str], driver: str, plugin: str) -> dict[str, Any]:
    return {
        "backend": "emulator",
        "emulated_driver": driver,
        "criu": list(criu_versions),
        "gpustasis": plugin,
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def write_json(path: Path, report: dict[str, Any]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    part.replace(path)


def remember(path: Path, report: dict[str, Any]) -> dict[str, Any]:
    """Put the campaigns of `report` into the record at `path`, in place of what it had of them, and
    return the record: what each campaign has found when it was last run, and on what."""
    record: dict[str, Any] = {"version": VERSION, "campaigns": {}}
    if path.exists():
        record = json.loads(path.read_text(encoding="utf-8"))
    for name, parts in report["campaigns"].items():
        record["campaigns"][name] = {
            "seed": report["seed"],
            "machine": report["machine"],
            "parts": parts,
        }
    found = record["campaigns"]
    record["campaigns"] = {name: found[name] for name in CAMPAIGNS if name in found}
    write_json(path, record)
    return record


def _conditions(campaign: dict[str, Any]) -> str:
    machine = campaign["machine"]
    return (
        f"seed {campaign['seed']}, gpustasis {machine['gpustasis']}, "
        f"CRIU {', '.join(machine['criu'])}, emulated driver {machine['emulated_driver']}, "
        f"Linux {machine['kernel']}"
    )


def write_markdown(path: Path, record: dict[str, Any]) -> None:
    """`record` is what remember() returns."""
    campaigns = record["campaigns"]
    conditions: dict[str, list[str]] = {}
    for name, campaign in campaigns.items():
        conditions.setdefault(_conditions(campaign), []).append(name)
    lines = [
        "# Long fault campaigns",
        "",
        "Made by `make soak` (`ci/soak --docs` writes this page); the code is in `tests/campaigns`",
        "and `tests/soak`. All of it ran on the driver **emulator**: it says how CRIU, the plugin",
        "and the images behave, and nothing about a real GPU or NVIDIA's driver. Each campaign is",
        "here as it was last run.",
        "",
        *(
            f"- {what}: {'all' if len(conditions) == 1 else ', '.join(names)}."
            for what, names in conditions.items()
        ),
        "",
        "`ci/soak --seed N CAMPAIGN` makes the same choices again.",
        "",
        "| campaign | date | part | trials | failed | what came of them | s |",
        "| --- | --- | --- | ---: | ---: | --- | ---: |",
    ]
    for name, campaign in campaigns.items():
        for part in campaign["parts"]:
            counts = ", ".join(f"{key}: {value}" for key, value in part["counts"].items())
            lines.append(
                f"| {name} | {campaign['machine']['date']} | {part['part']} | {part['trials']} "
                f"| {len(part['failures'])} | {counts or '-'} | {part['seconds']:.0f} |"
            )
    lines += [
        "",
        "LOST are jobs that did not live on. CRIU runs code of its own in the tasks, in the",
        "place of theirs and led by breakpoints: a task that stands there when criu is killed",
        "dies of SIGTRAP or SIGSEGV, with the plugin or without. The bound is that no job is lost.",
        "In *kill-points*, *kill-cpu-memory*, *kill-sealed*, *kill-with-worker* and",
        "*kill-on-parent* every loss with the plugin is a failure, whoever caused it. In others",
        "one is counted, and is no failure, if CRIU's code was seen in each task that died, and if",
        "there are no more than chance leaves of a CRIU that loses one in ten of the jobs whose",
        "dump is killed in that phase (99.9 % of all cases), nor more than a third of them. The",
        "stock parts kill the same criu without the plugin, on a job without CUDA, for comparison;",
        "what they lose is counted and is no failure of ours.",
        "",
        'A failure that was "killed at A of B of PHASE (OTHER)" was aimed at moment or call A of B',
        "in PHASE; by criu's log, criu was in OTHER when it died. The last column is in seconds;",
        "parts that are made together have their time in the first of them.",
        "",
        "| phase of a dump | what goes on |",
        "| --- | --- |",
        *(f"| {name} | {what} |" for name, what in _PHASES.items()),
    ]
    missing = ", ".join(f"*{name}*" for name in CAMPAIGNS if name not in campaigns)
    if missing:
        lines += ["", f"Without a result here: {missing}."]
        lines += ["What *job-faults*, *recovery* and *job-scale* have found is in reliability.md,"]
        lines += ["what *plan* has found in planner.md, each with its date."]
    broken = [
        name
        for name, campaign in campaigns.items()
        if any(part["part"] == BROKEN_OFF for part in campaign["parts"])
    ]
    if broken:
        listed = ", ".join(f"*{name}*" for name in broken)
        lines += ["", f"Broken off, so that parts are missing: {listed}."]
    lines += ["", "What each campaign does:", ""]
    lines += [f"- **{name}**: {what}." for name, (what, _) in CAMPAIGNS.items()]
    failures = [
        f"- {name}, {part['part']}: {text.splitlines()[0]}"
        for name, campaign in campaigns.items()
        for part in campaign["parts"]
        for text in part["failures"]
    ]
    if failures:
        lines += ["", "Failures:", "", *failures]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
