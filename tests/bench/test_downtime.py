# SPDX-License-Identifier: Apache-2.0
"""Downtimes by GPUs and tasks, short, with a real criu on emulators; and the bounds that follow."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpustasis._core import DEFAULT_CHUNK_SIZE
from gpustasis.emulator import Emulator
from gpustasis_bench.bench import beside
from gpustasis_bench.bench.beside import InMemory, drain, spin
from gpustasis_bench.bench.contenders import (
    CONTENDERS,
    OURS,
    OURS_BOTH,
    OURS_DIRECT,
    OURS_KEPT,
    OURS_RAM,
    RATES,
    STAGED,
    STOCK,
    second_variants,
    variants,
)
from gpustasis_bench.bench.content import Content, make_content, read_content
from gpustasis_bench.bench.course import Course
from gpustasis_bench.bench.downtime import SHAPES, Downtime
from gpustasis_bench.bench.downtime_bounds import evaluate_downtime
from gpustasis_bench.bench.downtime_figures import new_bytes, require_kept
from gpustasis_bench.bench.downtime_page import downtime_text
from gpustasis_bench.bench.markdown import (
    BEGIN,
    DOWNTIME_BEGIN,
    DOWNTIME_END,
    END,
    write_page,
)
from gpustasis_bench.bench.medium import Medium
from gpustasis_bench.bench.model import PUBLISHED_HOST, Rates
from gpustasis_bench.bench.programs import compile_program, why_refused
from gpustasis_bench.bench.timing import run_timed
from gpustasis_bench.contents.layout import ContentWriter
from gpustasis_bench.errors import BenchError, WrongMemoryError
from support.bench import made_report, run_bench

CREDIT_S = 0.003  # of an idle link of the emulator (link_clock.cpp), each time
MIB = 1 << 20


@pytest.fixture
def part(course: Course, medium: Medium, tmpfs: Path, tmp_path: Path) -> Downtime:
    return Downtime(
        course=course,
        medium=medium,
        arena=tmpfs,
        pairs=1,
        size=4 * MIB,
        scale=64.0,  # 134 ms down and 38 up for 4 MiB
        rates=("staged", "direct"),
        hook_cost=compile_program("hook_cost", tmp_path),
    )


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """One of its own, so that nobody else writes to it."""
    place = tmp_path / "tmpfs"
    place.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512m,mode=700", "tmpfs", place], check=True, timeout=30
    )
    yield place
    subprocess.run(["umount", "--lazy", place], check=True, timeout=30)


def test_shapes_are_measured(part: Downtime) -> None:
    part.scale = 512.0  # one copy down of stock's takes 1 s: the load of a machine is no more
    part.begin()
    part.measure_shapes(((1, 1), (1, 2), (2, 1)))
    rates = {each.name: RATES[each.rates] for each in part.present}
    assert set(rates) == {each.name for each in variants(part.arena)}
    assert part.found["absent"] == {}
    found = {(each["gpus"], each["tasks"]): each for each in part.found["shapes"]}
    for (gpus, tasks), shape in found.items():
        assert shape["gpu_bytes"] == 4 * MIB * gpus * tasks
        assert set(shape["contenders"]) == set(rates)
        for name, one in shape["contenders"].items():
            turns = tasks if name == STOCK else 1
            down, up = (4 * MIB / rate * part.scale for rate in (rates[name].down, rates[name].up))
            assert one["downtime_seconds"] > turns * (down + up)
            assert one["downtime_seconds"] < one["dump_seconds"]
            assert 0 < one["cpu_seconds"] < 20
            assert one["restore_seconds"] > turns * up
            assert ("reading_seconds" in one) == (name != STOCK)
            assert ("writing_seconds" in one) == (name in (OURS, OURS_DIRECT))
            assert one.get("reading_seconds", 1) > 0
            assert one.get("writing_seconds", 1) > 0
            assert one["host_bytes"] > (4 * MIB * gpus * tasks if name == OURS else MIB)
            assert shape["fixed_seconds"][name] > 0
            hold_ratios(shape, name)
        assert shape["ratios"][STOCK]["downtime_seconds"]["mean"] == 1.0
    # stock's driver works in one task after the other, and in all GPUs of one at once
    down, up = (4 * MIB / rate * part.scale for rate in (rates[STOCK].down, rates[STOCK].up))
    stock = {key: each["contenders"][STOCK]["driver_seconds"] for key, each in found.items()}
    assert stock[1, 2] > 2 * (down - CREDIT_S)
    assert down - CREDIT_S < stock[2, 1] < 2 * (down + up - 2 * CREDIT_S)
    report = made_report(part.found)
    assert len(report["downtime"]["model"]) == 3 * len(rates)
    text = downtime_text(report)
    assert text.count("| 1 | 2 | staged | ours |") == 1
    assert "Not measured" not in text
    # Of the host of the predictions nobody has published how fast its memory is.
    assumed = f"That its memory takes {PUBLISHED_HOST.memory / 1e9:g} GB/s and gives back as much"
    assert PUBLISHED_HOST.memory == PUBLISHED_HOST.memory_back
    assert assumed in text and "is assumed" in text


def hold_ratios(part: dict[str, Any], name: str) -> None:
    """Of the one pair that was measured: stock over that contender, and memory over disk."""
    stock, own = (part["contenders"][one]["rounds"] for one in (STOCK, name))
    for figure, ratio in part["ratios"][name].items():
        (above,) = stock[figure]
        (below,) = own[figure]
        if min(above, below) <= 0:  # the driver alone took longer
            assert ratio is None, (name, figure)
            continue
        assert ratio["mean"] == pytest.approx(above / below, rel=1e-2), (name, figure)
    assert "downtime_seconds" in part["ratios"][name]
    has_warm = "warm_restore_seconds" in own and name != STOCK
    assert has_warm == ("warm_over_cold" in part["contenders"][name])
    if has_warm:
        (warm,), (cold,) = own["warm_restore_seconds"], own["restore_seconds"]
        mean = part["contenders"][name]["warm_over_cold"]["mean"]
        assert mean == pytest.approx(warm / cold, rel=1e-2), name


def test_rates_that_were_not_asked_for_are_named(part: Downtime, tmp_path: Path) -> None:
    part.rates = ("off",)
    part.begin()
    part.measure_shapes(((1, 1),))
    absent = part.found["absent"]
    assert set(absent) == {OURS_DIRECT, OURS_BOTH}
    assert [each["rates"] for each in part.found["shapes"]] == ["off"]
    assert set(part.found["shapes"][0]["contenders"]) >= {STOCK, OURS}
    part.measure_content(make_content("random", 4 * MIB, 7, tmp_path / "content", None))
    assert part.found["contents"] == []  # they are measured at published rates only
    report = made_report(part.found)
    text = downtime_text(report)
    for name, why in absent.items():
        assert f"* Not measured: {name}: {why}." in text
        assert any(
            bound["not_measured"] == f"{name}: {why}" and not bound["met"]
            for bound in evaluate_downtime(report)
        )


def test_a_content_is_measured_without_the_drivers_time_too(
    part: Downtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RATES, STAGED, Rates(down=2e9, up=5e7))  # the way back takes 0.17 s
    content = make_content("random", 8 * MIB, 7, tmp_path / "content", None)
    part.begin()
    part.measure_content(content)
    (found,) = part.found["contents"]
    assert found["nonzero_bytes"] == 8 * MIB < found["gpu_bytes"]  # the segment is larger
    ours = found["contenders"][OURS]
    # Both ways, down and up; what is asked before the lock is not of the time that it stands still.
    both = content.gpu_bytes / 2e9 + content.gpu_bytes / 5e7
    assert ours["driver_seconds"] > ours["standing_driver_seconds"] > both - 2 * CREDIT_S
    assert ours["without_driver_seconds"] == pytest.approx(
        ours["downtime_seconds"] - ours["standing_driver_seconds"], abs=1e-4
    )
    assert found["ratios"][OURS]["without_driver_seconds"]["pairs"] == 1
    for name in found["contenders"]:
        hold_ratios(found, name)
    report = made_report(part.found)
    assert f"| random, {content.gpu_bytes // MIB} MiB | ours |" in downtime_text(report)


def test_a_second_checkpoint_is_measured_full_and_on_top(
    part: Downtime, two_states: Content
) -> None:
    part.begin()
    part.measure_second(two_states)
    (found,) = part.found["second"]
    assert set(found["contenders"]) == {OURS, OURS_KEPT, OURS_RAM}
    assert (found["nonzero_bytes"], two_states.nonzero_bytes(0)) == (3 * MIB + 1020, 3 * MIB + 1000)
    for one in found["contenders"].values():
        # One chunk is new, and of its few bytes that are not zero little is stored.
        assert one["new_plain_bytes"] == DEFAULT_CHUNK_SIZE
        assert 1020 < one["new_stored_bytes"] < MIB
        assert set(one["downtime_seconds"]) == {"full", "incremental"}
        assert one["ratio"]["pairs"] == 1
    assert found["contenders"][OURS]["without_driver_seconds"]["full"] > 0
    kept = {each.name: each for each in second_variants(part.present)}[OURS_KEPT]
    assert kept.contender.plugin["staging"] == "keep" and not kept.in_memory
    with pytest.raises(BenchError, match="staging was dropped, kept, and is measured as kept"):
        require_kept(kept, {"tasks": [{"staging": "kept"}, {"staging": "dropped"}]})
    assert "Second checkpoint of sample, ours" in downtime_text(made_report(part.found))


def test_what_is_new_in_a_dump_is_what_it_has_stored_itself() -> None:
    """Not what a parent or another image has, and no zeros."""

    def task(file_bytes: int, **plain: int) -> dict[str, Any]:
        names = ("zero", "lz4", "raw", "ref", "alike")
        return {"file_bytes": file_bytes} | {
            name: {"chunks": 1, "plain_bytes": plain.get(name, 10**9), "stored_bytes": 5}
            for name in names
        }

    record = {"tasks": [task(700, lz4=1000, raw=30), task(60, lz4=200, raw=4)]}
    assert new_bytes(record) == (1234, 760)


@pytest.fixture
def two_states(tmp_path: Path) -> Content:
    folder = tmp_path / "contents" / "sample"
    folder.mkdir(parents=True)
    writer = ContentWriter(folder)
    writer.add("first", "noise", os.urandom(3 * MIB))
    writer.add("second", "noise", os.urandom(1000))
    writer.next_state()
    writer.change("second", os.urandom(1020))  # its place has room
    writer.finish("sample", folder)
    made = read_content(folder)
    assert made is not None
    return made


def test_each_task_of_a_tree_has_a_gpu_of_its_own(course: Course, emulator: Emulator) -> None:
    with course.tree(2, ("2", "own")) as target:
        target.spread(1, 8 * MIB)
        assert all(digest.endswith(f" {8 * MIB}") for digest in target.digests())
        used = [gpu["used_bytes"] for gpu in emulator.status()["gpus"]]
        assert used == [8 * MIB, 8 * MIB]


def test_memory_that_changes_ends_a_measurement(course: Course, medium: Medium) -> None:
    with course.tree(1) as target, course.images(medium) as images:
        target.spread(1, 4 * MIB)
        wanted = target.digests()
        target.change(100, 1)
        with pytest.raises(WrongMemoryError, match="stock: left running, the memory is"):
            course.leave_running_into(images, target, wanted, CONTENDERS[STOCK])


def test_a_plugin_says_which_settings_it_has(
    emulator_environ: dict[str, str], tmp_path: Path
) -> None:
    program = compile_program("hook_cost", tmp_path)
    config = tmp_path / "settings.toml"
    refused = 'staging = "none": must be "drop", "keep" or "auto"'
    refused = f"the plugin of this build does not take {refused}"
    for settings, why in (
        ({"parallel_gpus": 1}, None),
        ({"warp_drive": True}, "the plugin of this build has no setting 'warp_drive'"),
        (
            {"staging": "none"},
            refused,
        ),
    ):
        assert why_refused(program, emulator_environ, settings, config) == why
    broken = emulator_environ | {"GPUSTASIS_OVERRIDES": str(tmp_path / "missing.toml")}
    with pytest.raises(BenchError, match=r"missing\.toml"):
        why_refused(program, broken, {}, config)


def test_a_drain_of_what_lies_on_the_disk_is_refused(course: Course, tmp_path: Path) -> None:
    (tmp_path / "gpustasis-manifest.img").touch()
    with pytest.raises(BenchError, match="has its manifest before the drain"):
        drain(course, tmp_path)


def test_what_a_tmpfs_holds_at_most_is_seen_though_it_is_gone_again(tmpfs: Path) -> None:
    (tmpfs / "pool").mkdir()
    (tmpfs / "pool" / "before").write_bytes(bytes(8 * MIB))
    with InMemory([tmpfs, tmpfs]) as held:
        (tmpfs / "file").write_bytes(bytes(16 * MIB))
        for _ in range(200):
            if held.most >= 24 * MIB:
                break
            subprocess.run(["sleep", "0.01"], check=True)
        (tmpfs / "file").unlink()
    assert 24 * MIB <= held.most < 25 * MIB
    with InMemory([]) as nothing:
        pass
    assert nothing.most == 0


ORPHAN = """
import ctypes, os, sys, time
parent = os.getpid()
if os.fork() == 0:
    ctypes.CDLL(None).prctl(15, b"gpustasis-work", 0, 0, 0)  # PR_SET_NAME
    os.setsid()
    while os.getppid() == parent:  # it outlives it
        time.sleep(0.01)
    while time.process_time() < float(sys.argv[1]):
        pass
    os._exit(0)
time.sleep(2)  # so that its child is seen
"""


def test_processor_time_counts_a_worker_that_outlives_criu(tmp_path: Path) -> None:
    words = [sys.executable, "-I", "-S", "-c", ORPHAN, "0.6"]
    output = tmp_path / "output.txt"
    both = run_timed(words, os.environ, output, 30, with_worker=True)
    assert 0.6 <= both.cpu_seconds < 2
    assert both.peak_rss_bytes > MIB
    alone = run_timed(words, os.environ, output, 30)
    assert alone.cpu_seconds < 0.5
    with pytest.raises(BenchError, match="outlives criu by"):
        run_timed([*words[:-1], "60"], os.environ, output, 30, with_worker=True)
    end_orphans()


def end_orphans() -> None:
    """Children of this process with the worker's name."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            pid, name = int(stat.parent.name), (stat.parent / "comm").read_text().strip()
            parent = int(stat.read_text().rsplit(")", 1)[1].split()[1])
            if name == "gpustasis-work" and parent == os.getpid():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def test_programs_beside_a_drain_say_what_they_have_left_it(
    part: Downtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beside, "_NEIGHBOUR_S", 4.0)
    monkeypatch.setattr(beside, "_DRAIN_SHARE", 2)  # a machine may need long to start a program
    part.pairs = 2
    content = make_content("random", 12 * MIB, 7, tmp_path / "content", None)  # noise alone
    part.begin()
    part.measure_neighbours(content)
    (found,) = part.found["neighbours"]
    assert found["ratio"]["pairs"] == 2 and found["window_seconds"] == 4.0
    limit = found["rate_limit_bytes"]
    assert limit == int(content.gpu_bytes / (2 * 4.0))
    assert 0 < found["window_bytes_per_second"] <= limit * 1.1
    assert 0 < found["window_cpu_seconds"] <= found["drain_cpu_seconds"] < found["drain_seconds"]
    assert f"{found['window_cpu_seconds']:.2f} s of a processor" in downtime_text(
        made_report(part.found)
    )


def test_programs_keep_processors_busy_for_so_long() -> None:
    assert spin(0.2) > 0


def test_downtimes_are_a_part_of_a_run(emulator_environ: dict[str, str], tmp_path: Path) -> None:
    whole = run_bench(
        emulator_environ,
        tmp_path,
        *("--workloads", "random", "--no-compare", "--downtime"),
        *("--scale", "1", "--rates", "staged", "--gpus", "2"),
    )
    assert (whole["complete"], whole["failures"], whole["results"]) == (True, [], [])
    found = whole["downtime"]
    assert (found["medium"], found["scale"], found["rate_sets"]) == ("disk", 1.0, ["staged"])
    assert [(each["gpus"], each["tasks"]) for each in found["shapes"]] == [
        (gpus, tasks) for gpus, tasks in SHAPES if gpus * tasks <= 2
    ]
    assert len(found["model"]) == sum(len(each["contenders"]) for each in found["shapes"])
    names = {bound["name"]: bound for bound in whole["bounds"]}
    eight = names[
        "downtime of 8 tasks with a GPU each over that of one with one, same memory each, ours"
    ]
    assert "8 tasks with a GPU each as ours: not asked for" in eight["not_measured"]
    direct = names["fine-tuning downtime, stock (staged) over ours direct"]
    assert direct["not_measured"]
    page = tmp_path / "page.md"
    compared = f"{BEGIN}\nof another run\n{END}\n"
    page.write_text(f"{compared}{DOWNTIME_BEGIN}\nstale\n{DOWNTIME_END}\n")
    write_page(whole, page, Path("plot.svg"))
    text = page.read_text()
    assert text.startswith(f"{compared}{DOWNTIME_BEGIN}\nTaken on ")
    assert "stale" not in text
    assert text.count("### The model beside the measurements") == 1
    assert text.count("| 2 | 1 | staged | ours |") == 1
    assert f"not measured: {direct['not_measured']}" in text
    assert "plot.svg" not in text  # there is nothing to draw
