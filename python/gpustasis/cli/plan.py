# SPDX-License-Identifier: Apache-2.0
"""`gpustasis plan`: how often to take checkpoints of a job, and what they cost and save."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from gpustasis.cli import output
from gpustasis.cli.framework import Command
from gpustasis.cli.plan_measured import Measured, measure
from gpustasis.errors import CheckpointError
from gpustasis.files import open_regular, replace_file
from gpustasis.planning.figures import BY_KEY, FIGURES, GROUPS, Figure, Figures
from gpustasis.planning.picture import draw
from gpustasis.planning.plan import Outcome, Plan, Way, make_plan
from gpustasis.planning.words import count, percent, short, span

_LIMIT = 1 << 20  # bytes of a file of figures
_UNITS = ("_gb_per_s", "_gb", "_s", "_h")
_TABLES = {"disk": ""}  # table of a file -> what its options begin with, where that is not its name
_EMULATED = (
    "the checkpoints were made with the driver EMULATOR: no time of a GPU is in these figures"
)


def _word(figure: Figure) -> str:
    """The option of a figure: --downtime of disk.downtime_s."""
    name = figure.name
    for unit in _UNITS:
        name = name.removesuffix(unit)
    prefix = _TABLES.get(figure.group, figure.group)
    return "--" + "-".join(filter(None, (prefix, name.replace("_", "-"))))


def _parameter(figure: Figure) -> str:
    return figure.key.replace(".", "__")


def _figure_options(function: Callable[..., None]) -> Callable[..., None]:
    """An option for each figure."""
    for figure in reversed(FIGURES):
        default = "" if figure.default is None else f" Default: {figure.default:g}."
        function = click.option(
            _word(figure),
            _parameter(figure),
            type=int if figure.whole else float,
            metavar="N",
            help=f"{figure.help}{default}",
        )(function)
    return function


@click.command("plan", cls=Command)
@click.option(
    "--figures",
    "file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="TOML with figures that are not given as options; docs/planner.md has the names.",
)
@click.option(
    "--from",
    "directories",
    multiple=True,
    metavar="DIR",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A checkpoint of the job, or of one of its ranks: its recorded times and sizes count "
    "where neither an option nor the file says otherwise. Several times.",
)
@click.option(
    "--picture",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw the plan into this SVG file, too.",
)
@click.option(
    "--commit-at",
    type=click.Choice(["durable", "peer"]),
    default="durable",
    show_default=True,
    help="As of `gpustasis job run`: with peer the job stands still until its copy is on the peer, "
    "and the checkpoint counts at once. With durable a copy is sent while the job works.",
)
@_figure_options
def command(
    file: Path | None,
    directories: tuple[Path, ...],
    picture: Path | None,
    commit_at: str,
    **options: float | None,
) -> None:
    """Say how often to take checkpoints of a job, and what each way of taking them costs and saves.

    Compared are: no checkpoints; checkpoints in user code (--user-...); gpustasis to disk
    (--downtime, --restore); and what would come of copies in the memory of the nodes (--peer-...).
    At least one way, the number of GPUs, and how often something fails have to be given. One GB is
    10^9 bytes. Figures of one machine say nothing about another: measure yours.
    """
    given = {
        figure.key: value
        for figure in FIGURES
        if (value := options[_parameter(figure)]) is not None
    }
    from_file = {} if file is None else _read(file)
    gpus = given.get("gpus", from_file.get("gpus"))
    found = Measured()
    try:
        if directories:
            found = measure(directories, None if gpus is None else BY_KEY["gpus"].check(gpus))
        figures = Figures(("option", given), ("file", from_file), ("measured", found.values))
        plan = make_plan(figures, commit_at_peer=commit_at == "peer")
    except ValueError as exc:
        raise click.UsageError(_with_option(str(exc))) from exc
    if picture is not None:
        _write(picture, draw(plan))
    output.answer(_to_json(plan, figures, found), lambda: _show(plan, figures, found))


def _read(path: Path) -> dict[str, object]:
    """Figures by key. Raises UsageError."""
    try:
        with open_regular(path) as opened:
            raw = opened.read(_LIMIT + 1)
        if len(raw) > _LIMIT:
            raise ValueError(f"is longer than {_LIMIT} bytes")
        tables: dict[str, Any] = tomllib.loads(raw.decode("utf-8"))
    except OSError as exc:
        raise click.UsageError(f"cannot read {path}: {exc.strerror}") from exc
    except (ValueError, RecursionError) as exc:
        raise click.UsageError(f"{path}: {exc}") from exc
    found: dict[str, object] = {}
    for name, value in tables.items():
        if name in GROUPS and isinstance(value, dict):
            found |= {f"{name}.{inner}": part for inner, part in value.items()}
        else:
            found[name] = value
    unknown = [key for key in found if key not in BY_KEY]
    if unknown:
        known = ", ".join(BY_KEY)
        raise click.UsageError(f"{path}: {unknown[0]!r} is no figure of a plan; there are {known}")
    return found


def _with_option(message: str) -> str:
    """The same, with the options of the figures that it names."""
    words = [
        _word(BY_KEY[key])
        for key in re.findall(r"^[a-z]+(?= is )|[a-z_.]*_[a-z_.]*[a-z]", message)
        if key in BY_KEY
    ]
    return f"{message} ({', '.join(dict.fromkeys(words))})" if words else message


def _write(path: Path, text: str) -> None:
    try:
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            replace_file(directory, path.name, text.encode(), 0o644)
        finally:
            os.close(directory)
    except OSError as exc:
        raise CheckpointError(f"cannot write the picture {path}: {exc.strerror}") from exc


def _show(plan: Plan, figures: Figures, found: Measured) -> None:
    money = figures["price_gpu_hour"] > 0 or figures["price_gb_month"] > 0
    titles = ["Way", "Every", "Young, Daly", "ETTR", "Checkpoints", "Failures", "GPU h lost"]
    rows = [[*_row(way, way.best), *_money(way, way.best, money)] for way in plan.ways]
    chosen = [
        [*_row(way, way.chosen), *_money(way, way.chosen, money)]
        for way in plan.ways
        if way.chosen is not None
    ]
    output.grid(
        [*titles, *(["Lost", "Storage"] if money else [])],
        [rows, chosen] if chosen else [rows],
        title=f"{count(plan.gpus, 'GPU')} on {count(plan.nodes, 'node')}, a failure every "
        f"{span(plan.mtbf_s)}; "
        "hours and money of a month",
    )
    for way in plan.ways:
        for note in way.notes:
            output.say(f"{way.title}: {note}")
    assumed = [
        f"{key} {short(given.value)}"
        for key, given in figures.all().items()
        if given.source == "default" and key in ("detect_s", "start_s", "work_h")
    ]
    if assumed:
        output.say(f"assumed: {', '.join(assumed)}")
    for note in found.notes:
        output.say(note)
    if found.emulated:
        output.say(_EMULATED)


def _row(way: Way, outcome: Outcome) -> list[str]:
    """Time for checkpoints, and time that failures take, as shares."""
    estimates = (
        ""
        if way.young_s is None or way.daly_s is None
        else f"{span(way.young_s)}, {span(way.daly_s)}"
    )
    return [
        way.title,
        span(outcome.interval_s) if way.takes_checkpoints else "-",
        estimates,
        percent(outcome.ettr),
        percent(outcome.shares.stops + outcome.shares.slowdown),
        percent(outcome.shares.again + outcome.shares.recovery),
        short(outcome.lost_gpu_hours),
    ]


def _money(way: Way, outcome: Outcome, wanted: bool) -> list[str]:
    return [f"{outcome.lost_money:,.0f}", f"{way.stored_money:,.0f}"] if wanted else []


def _to_json(plan: Plan, figures: Figures, found: Measured) -> dict[str, Any]:
    return {
        "gpus": plan.gpus,
        "nodes": plan.nodes,
        "mtbf_s": plan.mtbf_s,
        "failures_per_month": plan.failures,
        "emulated": found.emulated,
        "notes": found.notes,
        "figures": {key: asdict(given) for key, given in figures.all().items()},
        "ways": [_way_json(way) for way in plan.ways],
    }


def _way_json(way: Way) -> dict[str, Any]:
    return {
        "name": way.name,
        "title": way.title,
        "stop_s": way.costs.stop_s,
        "write_s": way.costs.lag_s,
        "recovery_s": way.costs.recovery_s,
        "young_s": way.young_s,
        "daly_s": way.daly_s,
        "stored_gb": way.stored_gb,
        "stored_money": way.stored_money,
        "notes": list(way.notes),
        "best": _outcome_json(way, way.best),
        "chosen": None if way.chosen is None else _outcome_json(way, way.chosen),
    }


def _outcome_json(way: Way, outcome: Outcome) -> Mapping[str, Any]:
    interval = outcome.interval_s if way.takes_checkpoints else None
    return asdict(outcome) | {"interval_s": interval}
