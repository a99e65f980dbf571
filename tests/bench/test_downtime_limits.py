# SPDX-License-Identifier: Apache-2.0
"""What downtimes and restores could be at best on a machine with the made-up bandwidths LIMITS."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from bench.test_downtime_bounds import MIB, made_up
from gpustasis_bench.bench.bounds import WRITING
from gpustasis_bench.bench.contenders import (
    OURS,
    OURS_BOTH,
    OURS_DIRECT,
    OURS_KEPT,
    OURS_RAM,
    STAGED,
    STOCK,
    variants,
)
from gpustasis_bench.bench.downtime_bounds import evaluate_downtime
from support.bench import made_report

DOWN, UP = "the driver, to the host", "the driver, back"
DISK = "the disk, while the driver hands memory over"
STORING = "storing, while the driver hands memory over"
READING = "reading back, while the driver takes memory"
COPYING = "copying back, while the driver takes memory"
FILLING = "the driver, back: the emulator fills GPU memory"


def by_name(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in evaluate_downtime(report)}


def test_the_best_that_can_be_is_what_the_model_makes_of_the_machine() -> None:
    report = made_report(made_up())
    bounds = by_name(report)
    first = bounds["fine-tuning downtime, stock over ours ram"]
    size = 2048 * MIB
    # All threads read, hash, and write over pages that are there; one fills the file of the GPU.
    both = 1 / (1 / 10e9 + 1 / 80e9 + 1 / 7e9)
    down, up = size / 2e9, size / 2.5e9
    assert first["parts"]["storing"] == pytest.approx(size / both, abs=1e-3)
    assert first["in_turn"] == pytest.approx(3.0 / (down + size / both + up), abs=1e-2)
    assert first["least_of"] == "the driver, to the host"
    without = bounds["the same, without the driver's time"]
    assert without["in_turn"] == pytest.approx(1.5 / (size / both), abs=1e-2)
    (row,) = (
        each
        for each in report["downtime"]["model"]
        if (each["tasks"], each["contender"]) == (8, STOCK)
    )
    # 256 MiB at rates divided by 16, eight times; CRIU with one thread; 0.1 s of its own
    assert row["predicted_seconds"] == pytest.approx(
        0.1 + 8 * 16 * 256 * MIB * (1 / 2e9 + 1 / 7e9) + 8 * 256 * MIB / 2.5e9, rel=1e-3
    )
    assert {each.rates for each in variants(Path("arena")) if each.name == STOCK} == {STAGED}


def test_the_best_of_a_restore_is_the_bytes_the_processors_and_the_driver() -> None:
    """Of 2 GiB in eight tasks, at the rates of LIMITS and of a driver divided by 16."""
    report = copy.deepcopy(made_report(made_up()))
    report["limits"]["tmpfs"]["write"]["2"] = 4.5e9
    bounds = by_name(report)
    size = 2048 * MIB
    writing, filling_of_eight, back = size / 4e9, size / 4.5e9, 16 * 256 * MIB / 7e9
    assert filling_of_eight < back  # all within the driver's time
    common = {
        WRITING: pytest.approx(writing, abs=1e-3),
        "the driver, back": pytest.approx(back, abs=1e-3),
    }
    # A disk works while processors do, and takes as long as in the same rounds; what is in memory
    # is written from there.
    cold = bounds["restore of 8 tasks with a GPU each, stock (staged) over ours"]
    assert cold["parts"] == common | {"all but the bytes": 0.2, "reading from disk": 2.0}
    assert writing < 2.0
    assert cold["in_turn"] == pytest.approx(16.0 / (0.2 + 2.0 + back), rel=1e-3)
    assert cold["least_of"] == "reading from disk"
    assert cold["best"] == 8.0
    warm = bounds[
        "restore from memory of 8 tasks with a GPU each, stock (staged, page cache) over ours ram"
    ]
    assert warm["parts"] == common | {"all but the bytes": 0.15}
    assert warm["in_turn"] == pytest.approx(14.0 / (0.15 + writing + back), rel=1e-3)
    # Of one GPU that is not slowed down, filling takes longer, into one file of a tmpfs. The
    # restore from the disk took 2 s.
    filling = size / 2.5e9
    assert filling > size / 7e9
    again = bounds["restore from memory over one from the disk, fine-tuning, ours ram"]
    assert again["in_turn"] == pytest.approx((size / 4e9 + filling) / 2.0, rel=1e-3)
    # Without staging it is hashed and copied onto the GPUs, by all processors, while the driver
    # takes it.
    both = bounds[
        "restore from memory of 8 tasks with a GPU each, stock (staged, page cache) over ours "
        "direct+ram"
    ]
    copying = size / 8e9 + size / 80e9 + size / 4.5e9
    assert 16 * 256 * MIB / 11e9 < filling_of_eight < copying
    assert both["parts"] == {
        "all but the bytes": 0.15,
        "copying back, while the driver takes memory": pytest.approx(copying, abs=1e-4),
    }
    assert both["in_turn"] == pytest.approx(14.0 / (0.15 + copying), rel=1e-3)
    # They never lie in the task, and come from the disk meanwhile.
    direct = bounds["restore of 8 tasks with a GPU each, stock (staged) over ours direct"]
    assert WRITING not in direct["parts"]
    assert 16 * 256 * MIB / 11e9 < 2.0
    assert direct["in_turn"] == pytest.approx(16.0 / (0.2 + 2.0), rel=1e-3)


def test_what_another_setting_saves_is_no_limit() -> None:
    """Nor is our own overhead in a restore, where stock has less."""
    whole = made_up()
    for shape in whole["shapes"]:
        shape["fixed_restore_seconds"] = dict.fromkeys(shape["fixed_restore_seconds"], 0.9)
        shape["fixed_restore_seconds"][STOCK] = 0.2
    bounds = by_name(made_report(whole))
    dump = bounds["dump of 8 tasks with a GPU each, stock (staged) over ours"]
    assert "dropping the pages" not in dump["parts"]
    restore = bounds["restore of 8 tasks with a GPU each, stock (staged) over ours"]
    assert restore["parts"]["all but the bytes"] == 0.2


def test_the_best_of_a_dump_to_the_disk_stores_as_long_as_writing_took_in_its_rounds() -> None:
    bounds = by_name(made_report(made_up()))
    for name, part in (
        (OURS, "storing"),
        (OURS_DIRECT, DISK),
    ):  # what is direct is stored meanwhile
        dump = bounds[f"dump of 8 tasks with a GPU each, stock (staged) over {name}"]
        assert dump["parts"][part] == 3.0
        assert ("storing" in dump["parts"]) == (name == OURS)
        assert dump["in_turn"] == pytest.approx(16.0 / sum(dump["parts"].values()), rel=1e-3)
    direct = bounds[f"fine-tuning downtime, stock (staged) over {OURS_DIRECT}"]
    assert direct["parts"][DISK] == 0.7
    in_memory = bounds[f"dump of 8 tasks with a GPU each, stock (staged) over {OURS_RAM}"]
    assert in_memory["parts"]["storing"] < 1.0


@pytest.mark.parametrize(
    ("writing", "reads", "limit", "seconds"),
    [
        # 2 GiB: copied off the GPU at 8 GB/s, hashed at 80, tried with LZ4 at 30; driver: 9.
        (0.4, 8e9, DISK, 0.4),
        (0.3, 8e9, STORING, 0.36686),  # 0.26844 + 0.02684 + 0.07158
        (0.2, 90e9, DOWN, 0.23861),  # 0.02386 + 0.02684 + 0.07158 to store it
    ],
)
def test_a_direct_dump_is_held_up_by_the_slowest_of_driver_processors_and_disk(
    writing: float, reads: float, limit: str, seconds: float
) -> None:
    whole = made_up()
    whole["contents"][0]["contenders"][OURS_DIRECT]["writing_seconds"] = writing
    report = copy.deepcopy(made_report(whole))
    report["limits"]["tmpfs"]["read"]["2"] = reads
    found = by_name(report)[f"fine-tuning downtime, stock (staged) over {OURS_DIRECT}"]
    first, *_ = found["parts"].items()
    assert first == (limit, pytest.approx(seconds, abs=1e-4))
    assert len(found["parts"]) == 2
    assert found["in_turn"] == pytest.approx(3.0 / sum(found["parts"].values()), abs=1e-3)


@pytest.mark.parametrize(
    ("reading", "writes", "limit", "seconds"),
    [
        # 2 GiB: copied onto the GPU, hashed at 80 GB/s, 0.02684 s; driver: 11 GB/s.
        (0.9, (2.5e9, 3.5e9), READING, 0.9),
        (0.3, (2.5e9, 3.5e9), FILLING, 0.85899),  # one file; by all processors 0.64041
        (0.3, (4e9, 4e9), COPYING, 0.56371),  # 0.53687 + 0.02684
        (0.1, (90e9, 90e9), UP, 0.19523),  # 0.02386 + 0.02684
    ],
)
def test_the_way_back_is_held_up_by_the_slowest_of_driver_processors_one_file_and_disk(
    reading: float, writes: tuple[float, float], limit: str, seconds: float
) -> None:
    whole = made_up()
    whole["contents"][0]["contenders"][OURS_DIRECT]["reading_seconds"] = reading
    report = copy.deepcopy(made_report(whole))
    report["limits"]["tmpfs"]["write"] = dict(zip("12", writes, strict=True))
    found = by_name(report)[f"fine-tuning downtime, stock (staged) over {OURS_DIRECT}"]
    *_, last = found["parts"].items()
    assert last == (limit, pytest.approx(seconds, abs=1e-4))


@pytest.mark.parametrize(("writing", "seconds"), [(0.4, 0.4), (0.2, 0.31317)])
def test_storing_is_held_up_by_the_slower_of_disk_and_processors(
    writing: float, seconds: float
) -> None:
    """2 GiB: read at 10 GB/s, hashed at 80, tried with LZ4 at 30."""
    whole = made_up()
    whole["shapes"][1]["contenders"][OURS]["writing_seconds"] = writing
    bounds = by_name(made_report(whole))
    found = bounds[f"dump of 8 tasks with a GPU each, stock (staged) over {OURS}"]
    assert found["parts"]["storing"] == pytest.approx(seconds, abs=1e-4)


def test_a_direct_dump_into_memory_is_held_up_by_the_slower_of_driver_and_storing() -> None:
    title = f"fine-tuning downtime, stock (staged) over {OURS_BOTH}"
    for rate, limit, seconds in (
        (1e9, STORING, 2.14748 + 0.02386 + 0.01193),
        (90e9, DOWN, 0.23861),  # 0.02386 + 0.02386 + 0.01193
    ):
        report = copy.deepcopy(made_report(made_up()))
        report["limits"]["tmpfs"]["rewrite"] = {"1": rate / 2, "2": rate}
        report["limits"]["tmpfs"]["read"]["2"] = report["limits"]["xxh3"] = 90e9
        report["limits"]["lz4_random"] = 1e6  # nothing is compressed before its drain
        first, *_ = by_name(report)[title]["parts"].items()
        assert first == (limit, pytest.approx(seconds, abs=1e-4))


@pytest.mark.parametrize(
    ("tasks", "gpus", "name", "parts", "in_turn"),
    [
        # 256 MiB each at rates divided by 16; the disk took 3 s.
        (8, 1, OURS, {DOWN: 2.14748, "storing": 3.0, UP: 0.61357}, 0.5761),
        # One task's driver fills one file after the other: 2 GiB at 2.5 GB/s.
        (1, 8, OURS, {DOWN: 2.14748, "storing": 3.0, UP: 0.85899}, 0.6006),
        # Read at 10 GB/s, hashed at 80, written at 7.
        (8, 1, OURS_RAM, {DOWN: 2.14748, "storing": 0.54837, UP: 0.61357}, 0.3309),
        # 8 GB/s off the GPUs, 80, 7; back at 8, 80 and 3.5, by the processors.
        (1, 8, OURS_BOTH, {STORING: 0.60206, COPYING: 0.90884}, 0.1511),
    ],
)
def test_the_least_that_many_take_over_one(
    tasks: int, gpus: int, name: str, parts: dict[str, float], in_turn: float
) -> None:
    """One took 10 s."""
    what = f"{tasks} tasks with a GPU each" if tasks > 1 else f"a task with {gpus} GPUs"
    title = f"downtime of {what} over that of one with one, same memory each, {name}"
    found = by_name(made_report(made_up()))[title]
    assert found["parts"] == pytest.approx(parts, abs=1e-4)
    slowest = max(parts, key=lambda part: parts[part])
    assert (found["least_of"], found["best"]) == (slowest, pytest.approx(parts[slowest] / 10, 1e-2))
    assert found["in_turn"] == pytest.approx(in_turn, abs=1e-3)


@pytest.mark.parametrize(
    ("name", "new", "parts", "seconds"),
    [
        (OURS, (0, 0), {}, 0.24159),
        (OURS, (3 * 10**8, 27 * 10**7), {"LZ4": 0.01, "writing": 0.18}, 0.25159),
        (OURS_KEPT, (3 * 10**8, 6 * 10**8), {"LZ4": 0.01, "writing": 0.4}, 0.4),  # the disk
        (OURS_RAM, (3 * 10**8, 27 * 10**7), {"writing": 0.03857}, 0.28016),
    ],
)
def test_the_least_of_a_second_checkpoint_has_what_is_new_in_it(
    name: str, new: tuple[int, int], parts: dict[str, float], seconds: float
) -> None:
    """2 GiB are read at 10 GB/s and hashed at 80; LZ4 at 30; to the disk at 1.5, to memory at 7. A
    full one took 2 s. Without the figures of what is new that is left out."""
    whole = made_up()
    one = dict(whole["second"][0]["contenders"][name])
    if any(new):
        one["new_plain_bytes"], one["new_stored_bytes"] = new
    whole["second"][0]["contenders"][name] = one
    found = by_name(made_report(whole))[
        "second QLoRA checkpoint, downtime of a full one over incremental, "
        f"{name}, without the driver's time"
    ]
    expected = {"reading the process": 0.21475, "hashing it": 0.02684}
    expected |= {f"{part} what is new".replace("LZ4", "LZ4 of"): parts[part] for part in parts}
    assert found["parts"] == pytest.approx(expected, abs=1e-4)
    slowest = max(expected, key=lambda part: expected[part])
    assert found["least_of"] == slowest
    assert found["best"] == pytest.approx(2 / expected[slowest], rel=1e-3)
    assert found["in_turn"] == pytest.approx(2 / seconds, rel=1e-3)


def test_zeros_of_a_content_are_read_and_handed_over_alone() -> None:
    """Of 2 GiB 0.5 are zeros."""
    whole = made_up()
    whole["contents"][0]["nonzero_bytes"] = 1536 * MIB
    bounds = by_name(made_report(whole))
    staged = bounds["fine-tuning downtime, stock over ours ram"]
    # Down all at 2 GB/s; all read at 10, hashed at 80, the rest written at 7, and at 2.5 back.
    looked = 0.02684
    assert staged["parts"] == {
        DOWN: pytest.approx(1.07374, abs=1e-4),
        "storing": pytest.approx(0.21475 + looked + 0.23009, abs=1e-4),
        UP: pytest.approx(0.64425, abs=1e-4),
    }
    direct = bounds[f"fine-tuning downtime, stock (staged) over {OURS_BOTH}"]
    # All off the GPU at 8 GB/s; the rest from memory at 8, hashed at 80, onto the GPU at 3.5.
    assert direct["parts"] == {
        STORING: pytest.approx(0.26844 + looked + 0.23009, abs=1e-4),
        COPYING: pytest.approx(0.20133 + 0.02013 + 0.46018, abs=1e-4),
    }
    warm = bounds["restore from memory over one from the disk, fine-tuning, ours ram"]
    assert warm["parts"] == {
        "all but the bytes": 0.0,
        WRITING: pytest.approx(0.40265, abs=1e-4),
        FILLING: pytest.approx(0.64425, abs=1e-4),
    }
    assert warm["in_turn"] == pytest.approx((0.40265 + 0.64425) / 2.0, abs=1e-3)
    assert warm["best"] == pytest.approx(0.64425 / 2.0, abs=1e-3)
