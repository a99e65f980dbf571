# SPDX-License-Identifier: Apache-2.0
"""`gpustasis plan`: where its figures come from, what it prints, what it refuses."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from gpustasis.cli import cli
from gpustasis.errors import CheckpointError
from gpustasis.planning.figures import BY_KEY, FIGURES, Figures
from gpustasis.planning.interval import Costs, best, ettr
from gpustasis.planning.plan import MONTH_H, make_plan
from support.deadlines import run_with_deadline
from support.json_output import check_document

LEAST = ("--gpus", "64", "--mtbf", "10", "--downtime", "20", "--restore", "40")
USER = ("--user-downtime", "4", "--user-write", "100", "--user-restore", "300")
PEER = ("--peer-memory", "10", "--peer-network", "5", "--size", "800")
MONEY = ("--price-gpu-hour", "3", "--price-gb-month", "0.02")
SVG = "{http://www.w3.org/2000/svg}"


def plan(*words: object) -> Result:
    return CliRunner().invoke(cli, ["plan", *map(str, words)])


def plan_json(*words: object) -> dict[str, Any]:
    ended = plan(*words, "--json")
    assert ended.exit_code == 0, ended.output
    return check_document(ended.stdout, "plan")


def ways(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {way["name"]: way for way in found["ways"]}


def test_what_is_printed_is_what_the_model_says() -> None:
    found = plan_json(*LEAST, "--drain", "2", "--detect", "100", *MONEY, "--size", "800")
    assert [way["name"] for way in found["ways"]] == ["none", "disk"]
    costs = Costs(stop_s=22, lag_s=0, recovery_s=140)
    interval = best(costs, 36000, 60)
    disk = ways(found)["disk"]
    assert disk["best"]["interval_s"] == pytest.approx(interval)
    assert disk["best"]["ettr"] == pytest.approx(ettr(costs, 36000, interval))
    hours = 64 * MONTH_H * (1 - disk["best"]["ettr"])
    assert disk["best"]["lost_gpu_hours"] == pytest.approx(hours)
    assert disk["best"]["lost_money"] == pytest.approx(3 * hours)
    assert disk["stored_money"] == pytest.approx(2 * 800 * 0.02)
    assert found["failures_per_month"] == pytest.approx(MONTH_H / 10)
    stops = disk["best"]["checkpoints"] * 22 / 3600 / MONTH_H
    assert disk["best"]["shares"]["stops"] == pytest.approx(stops)
    none = ways(found)["none"]["best"]
    assert none["interval_s"] is None
    whole = Costs(stop_s=0, lag_s=0, recovery_s=400)
    assert none["ettr"] == pytest.approx(ettr(whole, 36000, 720 * 3600))


def test_all_ways() -> None:
    found = ways(plan_json(*LEAST, *USER, *PEER, "--interval", "50"))
    assert list(found) == ["none", "user", "disk", "peer"]
    assert found["user"]["best"]["interval_s"] >= 96
    assert found["user"]["chosen"] is None
    assert "writing takes 100 s" in found["user"]["notes"][-1]
    assert found["disk"]["chosen"]["interval_s"] == 50
    assert found["disk"]["chosen"]["ettr"] < found["disk"]["best"]["ettr"]
    # 100 GB on each of 8 nodes: 10 s to memory, 20 s to the peer and from there
    peer = found["peer"]
    assert (peer["stop_s"], peer["write_s"], peer["recovery_s"]) == (10, 20, 300 + 20 + 10)
    assert peer["stored_gb"] == 0


def test_a_copy_that_the_job_waits_for_counts_at_once() -> None:
    """As `job run --commit-at peer`; "disk" beside it is what --commit-at durable costs."""
    found = ways(plan_json(*LEAST, *PEER, "--commit-at", "peer"))
    peer = found["peer"]
    assert (peer["stop_s"], peer["write_s"], peer["recovery_s"]) == (10 + 20, 0, 300 + 20 + 10)
    assert peer["title"] == "gpustasis, committed at the peer"
    assert found["disk"] == ways(plan_json(*LEAST, *PEER))["disk"]
    refused = plan(*LEAST, "--commit-at", "peer")
    assert refused.exit_code == 2
    assert "(--peer-memory)" in refused.output


def test_a_file_an_option_and_a_default(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text("gpus = 64\nmtbf_h = 5\n[disk]\ndowntime_s = 20\nrestore_s = 40.5\n")
    found = plan_json("--figures", file, "--mtbf", "10")["figures"]
    assert found["mtbf_h"] == {"value": 10, "source": "option"}
    assert found["disk.restore_s"] == {"value": 40.5, "source": "file"}
    assert found["keep"] == {"value": 2, "source": "default"}
    assert "peer.size_gb" not in found


def test_text_for_people() -> None:
    said = plan(*LEAST, *USER, *PEER).output
    assert "64 GPUs on 8 nodes, a failure every 10 h" in said
    assert "what if: to memory, a copy on a peer" in said
    assert "assumed: detect_s 300, start_s 300, work_h 720" in said
    assert "Storage" not in said
    assert "Storage" in plan(*LEAST, *MONEY).output


def without(words: tuple[str, ...], *names: str) -> list[str]:
    found = list(words)
    for name in names:
        at = found.index(name)
        del found[at : at + 2]
    return found


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (without(LEAST, "--gpus"), "gpus is not given: GPUs of the job. (--gpus)"),
        (without(LEAST, "--mtbf"), "(--gpu-failures, --node-failures, --mtbf)"),
        ([*LEAST, "--node-failures", "1"], "one of the two is enough"),
        (without(LEAST, "--restore"), "disk.restore_s is not given"),
        (without(LEAST, "--restore", "--downtime"), "no way of taking checkpoints is given"),
        ([*LEAST, "--peer-memory", "1"], "peer.size_gb is not given"),
        ([*LEAST, "--peer-memory", "1", "--size", "9"], "(--peer-network)"),
        ([*LEAST, "--slowdown", "1"], "disk.slowdown is 1.0, not a number from 0 to 0.999"),
        ([*LEAST, "--drain", "nan"], "disk.drain_s is nan"),
        ([*LEAST, "--work", "inf"], "work_h is inf"),
        ([*LEAST, "--gpus", "0"], "gpus is 0, not a number from 1 to"),
        ([*LEAST, "--gpus", "1.5"], "'1.5' is not a valid integer"),
    ],
)
def test_what_is_missing_or_wrong_is_named(words: list[str], message: str) -> None:
    ended = plan(*words)
    assert ended.exit_code == 2
    assert message in ended.output


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"gpus = ", "Invalid value"),
        (b"\xff", "utf-8"),
        (b"gpu = 3", "'gpu' is no figure of a plan; there are gpus, "),
        (b"[disk]\ndowntime = 3", "'disk.downtime' is no figure of a plan"),
        (b"disk = 3", "'disk' is no figure of a plan"),
        (b"gpus = '8'", "gpus is '8', not a number"),
        (b"gpus = true", "gpus is True, not a number"),
        (b"gpus = 8.5", "gpus is 8.5, not a whole number"),
        (b"gpus = 1" + b"0" * 400, "not a number from 1 to 1e+08"),
        (b"work_h = inf", "work_h is inf"),
        (b"[[gpus]]", "gpus is [{}], not a number"),
        (b"#" * (1 << 20) + b"##", "is longer than 1048576 bytes"),
        (b"x = " + b"[" * 20_000, "job.toml"),
    ],
)
def test_a_file_that_is_no_file_of_figures(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "job.toml"
    file.write_bytes(content)
    ended = plan(*without(LEAST, "--gpus"), "--figures", file)
    assert ended.exit_code == 2, ended.output
    assert message in ended.output


def test_a_fifo_in_place_of_the_file_does_not_hold_us_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "job.toml")
    ended = run_with_deadline(lambda: plan(*LEAST, "--figures", tmp_path / "job.toml"))
    assert ended.exit_code == 2


def test_the_picture(tmp_path: Path) -> None:
    file = tmp_path / "plan.svg"
    plan_json(*LEAST, *USER, *PEER, "--picture", file)
    root = ET.fromstring(file.read_text())  # noqa: S314 - our own
    texts = [text.text or "" for text in root.iter(f"{SVG}text")]
    titles = ("no checkpoints", "in user code", "gpustasis, to disk")
    assert set(titles) < set(texts)
    assert {"work between two checkpoints", "GPUs of the job", "1 h", "100 %"} < set(texts)
    lines = list(root.iter(f"{SVG}polyline"))
    assert len({line.get("stroke") for line in lines}) == 4
    assert len({line.get("stroke-dasharray") for line in lines}) == 4
    before = file.read_bytes()
    plan_json(*LEAST, *USER, *PEER, "--picture", file)
    assert file.read_bytes() == before
    ended = plan(*LEAST, "--picture", tmp_path / "none" / "x.svg")
    assert isinstance(ended.exception, CheckpointError)
    assert "none/x.svg: No such file" in str(ended.exception)


figures_of = st.fixed_dictionaries(
    {
        key: st.integers(int(figure.low), int(figure.high))
        if figure.whole
        else st.one_of(
            st.sampled_from([figure.low, figure.high]),
            st.floats(figure.low, figure.high),
        )
        for key, figure in BY_KEY.items()
        if key not in ("gpu_failures", "node_failures")
    }
)


@settings(deadline=None, max_examples=60)
@given(values=figures_of)
def test_figures_within_their_bounds_make_a_plan_and_a_picture(values: dict[str, float]) -> None:
    """Whatever they are, and however they contradict what jobs are like."""
    from gpustasis.planning.picture import draw

    try:
        made = make_plan(Figures(("option", values)))
    except ValueError as exc:
        assert "peer.size_gb" in str(exc)  # the one that is left: of 0
        return
    for way in made.ways:
        assert 0 <= way.best.ettr <= 1
        if way.chosen is not None and way.chosen.interval_s >= made.least_interval_s:
            assert way.chosen.ettr <= way.best.ettr * (1 + 1e-6) + 1e-300
    root = ET.fromstring(draw(made))  # noqa: S314 - our own
    numbers = [
        float(number)
        for line in root.iter(f"{SVG}polyline")
        for number in (line.get("points") or "").replace(",", " ").split()
    ]
    assert all(0 <= number <= 1040 for number in numbers)


def test_no_two_options_are_the_same() -> None:
    from gpustasis.cli.plan import command

    words = [param.opts[0] for param in command.params]
    assert len(words) == len(set(words)) > len(FIGURES)
