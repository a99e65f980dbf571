# SPDX-License-Identifier: Apache-2.0
"""Published figures of large jobs: the planner comes to them from the published inputs, as far as
these go, and docs/planner.md says what it comes to."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpustasis.planning.figures import FIGURES
from gpustasis.planning.words import percent
from support.published import HOUR, JOBS, MTBF_OFF, MTBFS, Job, mtbf_of

_PAGE = (Path(__file__).resolve().parents[2] / "docs" / "planner.md").read_text()
_ROUNDED = 0.005  # published in whole percents


def table(page: str, head: str) -> list[list[str]]:
    """Cells of the rows below that head."""
    (found,) = page.split(head)[1:]
    rows = found.split("\n\n")[0].strip().splitlines()[1:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.row)
def test_the_published_figure_is_among_the_answers(job: Job) -> None:
    low, high = job.answers()
    if job.at_least:
        assert high > job.published
    else:
        assert low - _ROUNDED <= job.published <= high + _ROUNDED
    assert low > 0.25  # a range of everything would show nothing
    assert high - low < 0.26


def test_the_table_has_every_job_and_answer() -> None:
    rows = table(_PAGE, "| job | inputs | published ETTR | planner |")
    assert [row[0] for row in rows] == [job.row for job in JOBS]
    for row, job in zip(rows, JOBS, strict=True):
        low, high = job.answers()
        wanted = percent(low) if low == high else f"{percent(low)} to {percent(high)}"
        assert row[3] == wanted, row[0]
        assert f"{100 * job.published:.0f} %" in row[2]
        assert ("more than" in row[2]) == job.at_least


@pytest.mark.parametrize(("gpus", "rate", "hours"), MTBFS)
def test_published_mtbfs(gpus: int, rate: float, hours: float) -> None:
    found = mtbf_of(gpus, rate) / HOUR
    assert found == pytest.approx(hours, rel=0.03)
    assert f"{found:.3g}" in _PAGE
    assert f"{gpus:,} GPUs" in _PAGE


def test_what_is_not_reproduced_is_said() -> None:
    gpus, rate, hours = MTBF_OFF
    found = mtbf_of(gpus, rate) / HOUR
    assert found > 3 * hours
    assert f"**MTBF of {gpus:,} GPUs on RSC-1, {hours} h** [1]: {found:.1f} h here" in _PAGE


def test_every_figure_and_its_option_are_in_the_table() -> None:
    from gpustasis.cli.plan import command

    rows = table(_PAGE, "| figure | option | unit, meaning |")
    named = {word for row in rows for word in row[0].replace("`", "").split(", ")}
    options = {word for row in rows for word in row[1].replace("`", "").split(", ")}
    assert {figure.key for figure in FIGURES if figure.group != "user"} | {"user.…"} == named
    words = {
        param.opts[0] for param in command.params if "__" in str(param.name) or param.name in named
    }
    assert {word for word in words if not word.startswith("--user-")} | {"--user-…"} == options
    for figure in FIGURES:
        if figure.default and figure.group == "" and figure.name != "gpus_per_node":
            (row,) = [row for row in rows if f"`{figure.key}`" in row[0]]
            assert row[2].endswith(f"; {figure.default:g}"), figure.key
