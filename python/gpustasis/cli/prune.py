# SPDX-License-Identifier: Apache-2.0
"""`gpustasis prune STORE --keep-last N`: remove checkpoints that no rule keeps."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import click

import gpustasis
from gpustasis.cli import output
from gpustasis.cli.framework import Command
from gpustasis.cli.key_options import find_key, key_options
from gpustasis.cli.options import Duration
from gpustasis.image.directory import allow_many_files
from gpustasis.image.prune import Action, Outcome, Verdict
from gpustasis.text import mib


@click.command("prune", cls=Command)
@click.argument("store", type=click.Path(file_okay=False, exists=True, path_type=Path))
@click.option("--keep-last", type=click.IntRange(1), metavar="N", help="Keep the newest N.")
@click.option(
    "--keep-within",
    type=Duration(),
    metavar="TIME",
    help="Keep those at most that much older than the newest: 90s, 30m, 24h, 7d, 2w.",
)
@click.option(
    "--keep-hourly", type=click.IntRange(1), metavar="N", help="Keep the newest of N hours."
)
@click.option(
    "--keep-daily", type=click.IntRange(1), metavar="N", help="Keep the newest of N days."
)
@click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
@key_options
def command(
    store: Path,
    keep_last: int | None,
    keep_within: timedelta | None,
    keep_hourly: int | None,
    keep_daily: int | None,
    dry_run: bool,
    key: Path | None,
    key_command: str | None,
) -> None:
    """Remove the checkpoints in STORE that no --keep rule keeps and none that stays is built on.

    STORE is a directory whose subdirectories are checkpoints of one job. Their time is that of
    their manifest's last change. What is in use, or is no whole checkpoint of ours, is left alone.
    What sealed checkpoints are built on is told by their links, or, with a key, by their manifests.
    """
    if not (keep_last or keep_within is not None or keep_hourly or keep_daily):
        raise click.UsageError("say what to keep: at least one --keep rule is needed")
    allow_many_files()
    done = gpustasis.prune(
        store,
        keep_last=keep_last,
        keep_within=keep_within,
        keep_hourly=keep_hourly,
        keep_daily=keep_daily,
        dry_run=dry_run,
        key=find_key(key, key_command),
    )

    def show() -> None:
        for line in _lines(store, dry_run, done):
            output.say(line)

    output.answer(_to_json(store, dry_run, done), show)


def _lines(store: Path, dry_run: bool, done: Outcome) -> list[str]:
    removed = [verdict for verdict in done.verdicts if verdict.action is Action.REMOVED]
    kept = sum(verdict.action is Action.KEPT for verdict in done.verdicts)
    lines = [_line(verdict, dry_run) for verdict in done.verdicts]
    lines += [
        f"{name}: builds on {place}, which is not in {store} and was left alone"
        for name, places in done.outside.items()
        for place in places
    ]
    now = "would be deleted" if dry_run else "now deleted"
    lines += [f"{name}: left by a prune that was killed, {now}" for name in done.leftovers]
    size = mib(sum(verdict.size for verdict in removed))
    would = "would be removed" if dry_run else "removed"
    lines.append(f"{store}: {kept} kept, {len(removed)} {would}, {size}")
    return lines


def _line(verdict: Verdict, dry_run: bool) -> str:
    word: str = verdict.action
    if dry_run and verdict.action is Action.REMOVED:
        word = "would be removed"
    taken = verdict.entry.taken
    text = f"{verdict.entry.name}: {word}"
    if verdict.reasons:
        text += f" ({', '.join(verdict.reasons)})"
    return text + (f", of {taken:%Y-%m-%d %H:%M:%S}" if taken is not None else "")


def _to_json(store: Path, dry_run: bool, done: Outcome) -> dict[str, Any]:
    return {
        "store": str(store),
        "dry_run": dry_run,
        "entries": [
            {
                "name": verdict.entry.name,
                "checkpoint_id": _hex(verdict.entry.checkpoint_id),
                "parent_id": _hex(verdict.entry.parent_id),
                "taken": None if verdict.entry.taken is None else verdict.entry.taken.isoformat(),
                "action": verdict.action,
                "reasons": list(verdict.reasons),
                "bytes": verdict.size,
                "outside": [str(place) for place in done.outside.get(verdict.entry.name, [])],
            }
            for verdict in done.verdicts
        ],
        "leftovers": done.leftovers,
    }


def _hex(raw: bytes | None) -> str | None:
    return None if raw is None else raw.hex()
