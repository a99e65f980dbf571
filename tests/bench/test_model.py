# SPDX-License-Identifier: Apache-2.0
"""The model of the downtime: simple cases by hand, and what must hold for all rates."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpustasis_bench.bench.model import (
    CARDS,
    PUBLISHED_WAYS,
    Host,
    Rates,
    Shape,
    Way,
    host_of,
    predict,
    predictions,
    published_dumps,
)

EVEN = Host(
    read=20,
    hash=20,
    check=20,
    memory=10,
    memory_back=10,
    storage=5,
    read_back=4,
    criu=2,
    drop=20,
    refill=25,
    fixed=1,
)
RATES = Rates(down=2, up=8)
MACHINE = {
    "read_process": {"1": 6.0, "2": 10.0},
    "write_process": {"1": 2.0, "2": 4.0},
    "memcpy": {"1": 9.0, "2": 14.0},
    "drop": {"1": 15.0},
    "xxh3": 60.0,
    "lz4_random": 30.0,
    "tmpfs": {
        "write": {"1": 2.5, "2": 3.5},
        "rewrite": {"1": 5.0, "2": 7.0},
        "read": {"1": 6.0, "2": 8.0},
    },
    "disk": {"write": {"8": 1.5}, "read": {"8": 3.0}},
}
SPEEDS = st.floats(min_value=0.1, max_value=1e4)
WAYS = st.builds(
    Way,
    in_turn=st.booleans(),
    externalized=st.booleans(),
    direct=st.booleans(),
    in_memory=st.booleans(),
    keeps=st.booleans(),
)
SHAPES = st.builds(
    Shape,
    tasks=st.integers(1, 8),
    gpus=st.integers(1, 8),
    size=st.floats(min_value=0, max_value=1e6),
    filled_share=st.floats(min_value=0, max_value=1),
)
HOSTS = st.builds(
    Host,
    **{
        field.name: SPEEDS
        for field in dataclasses.fields(Host)
        if field.name not in ("fixed", "stage", "unstage", "map_down", "map_up", "filled")
    },
    stage=SPEEDS,
    unstage=SPEEDS,
    map_down=SPEEDS,
    map_up=SPEEDS,
    filled=SPEEDS,
    fixed=st.floats(min_value=0, max_value=10),
)
ALL_RATES = st.builds(Rates, down=SPEEDS, up=SPEEDS)


def test_one_gpu_by_hand() -> None:
    """100 bytes: stock 1 + 50 + 50 + 12.5; ours stores at 5, drops at 20, refills at 25."""
    one = Shape(tasks=1, gpus=1, size=100)
    stock = predict(Way(in_turn=True, externalized=False), one, RATES, EVEN)
    assert stock.downtime == pytest.approx(1 + 50 + 50 + 12.5)
    ours = predict(Way(), one, RATES, EVEN)
    assert ours.downtime == pytest.approx(1 + 50 + 20 + 5 + 4 + 12.5)
    assert ours.dump == pytest.approx(1 + 50 + 20 + 5)
    ram = predict(Way(in_memory=True, keeps=True), one, RATES, EVEN)
    assert ram.downtime == pytest.approx(1 + 50 + 20 + 12.5)  # 20, 20 and 10, one after the other
    direct = predict(Way(direct=True), one, RATES, EVEN)
    assert direct.downtime == pytest.approx(1 + 50 + 25)  # the copy hides storing; reading is 4
    quick = predict(Way(direct=True), one, Rates(down=100, up=100), EVEN)
    assert quick.downtime == pytest.approx(1 + 20 + 25)  # storing hides the copy
    both = predict(Way(direct=True, in_memory=True), one, Rates(down=100, up=100), EVEN)
    assert both.downtime == pytest.approx(1 + 15 + 15)  # nothing of the task's is read


def test_eight_gpus_side_by_side_and_in_turn() -> None:
    one, eight = (Shape(tasks=tasks, gpus=1, size=100) for tasks in (1, 8))
    apart = predict(Way(), eight, RATES, EVEN)
    assert apart.down == predict(Way(), one, RATES, EVEN).down
    assert apart.up == predict(Way(), one, RATES, EVEN).up
    turns = predict(Way(in_turn=True), eight, RATES, EVEN)
    assert (turns.down, turns.up) == (8 * apart.down, 8 * apart.up)
    assert turns.store == apart.store
    of_one_task = predict(Way(in_turn=True), Shape(tasks=1, gpus=8, size=100), RATES, EVEN)
    assert of_one_task == predict(Way(), eight, RATES, EVEN)


def test_the_host_limits_a_driver_that_is_its_processors() -> None:
    slow = dataclasses.replace(EVEN, stage=1, unstage=1)
    found = predict(Way(), Shape(tasks=4, gpus=1, size=100), RATES, slow)
    assert (found.down, found.up) == (400, 400)


def test_only_what_goes_to_the_disk_at_once_is_tried_with_lz4() -> None:
    """Direct memory: a byte takes 1/20 + 1/5 of a second down, 1/20 + 1/50 up; with memory at both
    ends instead of the disk 1/20 + 1/50 + 1/10. Out of a task it takes 1/20 + 1/50 + 1/10."""
    host = dataclasses.replace(EVEN, hash=5, check=50, map_down=20, map_up=20, read_back=100)
    one, quick = Shape(tasks=1, gpus=1, size=100), Rates(down=1000, up=1000)
    disk = predict(Way(direct=True), one, quick, host)
    assert (disk.down, disk.up) == pytest.approx((25, 7))
    memory = predict(Way(direct=True, in_memory=True), one, quick, host)
    assert (memory.down, memory.up) == pytest.approx((17, 17))
    assert predict(Way(in_memory=True), one, quick, host).store == pytest.approx(17)
    assert predict(Way(), one, quick, host).store == pytest.approx(25)


def test_one_thread_fills_a_gpu_while_the_others_hash() -> None:
    """Of 100 bytes the processors take 1/20 + 1/20 a byte: 10 s. One file after the other takes
    1/4 a byte, and they do the rest meanwhile."""
    host = dataclasses.replace(EVEN, map_up=20, read_back=100)
    one, quick = Shape(tasks=1, gpus=1, size=100), Rates(down=1000, up=1000)
    for filled, seconds in ((4, 25), (50, 10)):
        slow = dataclasses.replace(host, filled=filled)
        assert predict(Way(direct=True), one, quick, slow).up == pytest.approx(seconds)
    assert predict(Way(), one, quick, dataclasses.replace(host, filled=4)).up == 0.1  # of staging


def test_zeros_are_looked_at_and_go_nowhere() -> None:
    """Of 100 bytes 40 are not zero."""
    host = dataclasses.replace(EVEN, hash=5, check=50, stage=4, unstage=4)
    shape = Shape(tasks=1, gpus=1, size=100, filled_share=0.4)
    quick = Rates(down=1000, up=1000)
    staged = predict(Way(), shape, quick, dataclasses.replace(host, storage=1000))
    assert staged.store == pytest.approx(100 / 20 + 60 / 50 + 40 / 5)
    assert (staged.down, staged.drop) == (25, 5)  # all of it lies in the task
    assert (staged.refill, staged.up) == pytest.approx((40 / 25, 10))
    assert predict(Way(), shape, RATES, host).up == 12.5  # the driver copies zeros, too
    ram = predict(Way(in_memory=True), shape, quick, host)
    assert ram.store == pytest.approx(100 / 20 + 60 / 50 + 40 / 50 + 40 / 10)
    host = dataclasses.replace(host, storage=0.5, read_back=2, filled=1, map_down=20, map_up=20)
    direct = predict(Way(direct=True), shape, quick, host)
    assert (direct.down, direct.up) == (80, 40)  # 40 bytes to the disk, and into a GPU
    quick = dataclasses.replace(host, storage=1000, read_back=1000, filled=1000)
    direct = predict(Way(direct=True), shape, Rates(down=2, up=2), quick)
    assert (direct.down, direct.up) == (50, 20)  # onto zeros only the rest is copied
    direct = predict(Way(direct=True), shape, Rates(down=1000, up=1000), quick)
    assert direct.down == pytest.approx(100 / 20 + 60 / 50 + 40 / 5)
    assert direct.up == pytest.approx(40 / 20 + 40 / 50)


@given(way=WAYS, shape=SHAPES, rates=ALL_RATES, host=HOSTS)
def test_nothing_that_gets_faster_makes_a_job_wait_longer(
    way: Way, shape: Shape, rates: Rates, host: Host
) -> None:
    before = predict(way, shape, rates, host).downtime
    assert before >= host.fixed
    for name in ("down", "up"):
        faster = dataclasses.replace(rates, **{name: 2 * getattr(rates, name)})
        assert predict(way, shape, faster, host).downtime <= before
    for field in dataclasses.fields(Host):
        if field.name != "fixed":
            quick = dataclasses.replace(host, **{field.name: 2 * getattr(host, field.name)})
            assert predict(way, shape, rates, quick).downtime <= before
    larger = dataclasses.replace(shape, size=2 * shape.size)
    assert predict(way, larger, rates, host).downtime >= before


@given(shape=SHAPES, rates=ALL_RATES, host=HOSTS, way=WAYS)
def test_one_after_the_other_never_takes_less_time(
    way: Way, shape: Shape, rates: Rates, host: Host
) -> None:
    apart, turns = (dataclasses.replace(way, in_turn=each) for each in (False, True))
    assert (
        predict(apart, shape, rates, host).downtime <= predict(turns, shape, rates, host).downtime
    )


@given(shape=SHAPES, rates=ALL_RATES, host=HOSTS, scale=st.sampled_from([2.0, 8.0, 64.0]))
def test_less_memory_at_rates_divided_alike_takes_the_driver_the_same_time(
    shape: Shape, rates: Rates, host: Host, scale: float
) -> None:
    free = dataclasses.replace(host, stage=float("inf"), unstage=float("inf"))
    small = dataclasses.replace(shape, size=shape.size / scale)
    real, scaled = (
        predict(Way(), shape, rates, free),
        predict(Way(), small, rates.divided(scale), free),
    )
    assert scaled.down == pytest.approx(real.down)
    assert scaled.up == pytest.approx(real.up)
    assert scaled.store == pytest.approx(real.store / scale)


@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_what_is_no_rate_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=r"down is .* a rate is greater than 0"):
        Rates(down=value, up=1)
    with pytest.raises(ValueError, match="storage is"):
        dataclasses.replace(EVEN, storage=value)


def test_what_is_no_job_is_refused() -> None:
    with pytest.raises(ValueError, match="is no job"):
        Shape(tasks=0, gpus=1, size=1)
    with pytest.raises(ValueError, match="0 to 1 of its bytes"):
        Shape(tasks=1, gpus=1, size=1, filled_share=1.1)
    with pytest.raises(ValueError, match="not negative"):
        dataclasses.replace(EVEN, fixed=-1)


def test_the_machine_of_a_run() -> None:
    host = host_of(MACHINE, "disk", "tmpfs", 0.2, Shape(tasks=8, gpus=1, size=1.0), Way())
    assert (host.read, host.hash, host.check) == (10.0, 40.0, 120.0)
    assert (host.map_down, host.map_up) == (8.0, 3.5)  # the emulator's GPU memory is such a file
    assert (host.memory, host.memory_back, host.criu) == (7.0, 8.0, 2.5)
    assert (host.storage, host.read_back) == (1.5, 3.0)
    assert (host.drop, host.refill, host.stage, host.unstage) == (15.0, 4.0, 4.0, 3.5)
    assert (host.filled, host.fixed) == (3.5, 0.2)


@pytest.mark.parametrize(
    ("tasks", "gpus", "in_turn", "unstage", "filled"),
    [
        (1, 1, False, 2.5, 2.5),
        (1, 8, False, 2.5, 3.5),  # the task's driver fills one GPU after the other
        (8, 1, False, 3.5, 3.5),
        (8, 1, True, 2.5, 3.5),
    ],
)
def test_to_each_file_of_a_gpu_one_thread_at_a_time_writes(
    tasks: int, gpus: int, in_turn: bool, unstage: float, filled: float
) -> None:
    """All processors copy, in any case, to as many files as there are, and to the one image."""
    shape = Shape(tasks=tasks, gpus=gpus, size=1.0)
    host = host_of(MACHINE, "disk", "tmpfs", 0.2, shape, Way(in_turn=in_turn))
    assert (host.unstage, host.filled) == (unstage, filled)
    assert (host.map_up, host.memory) == (3.5, 7.0)


def test_predictions_name_their_sources_and_what_is_not_of_the_gpu() -> None:
    found = predictions()
    assert [(each["gpu"], each["gpus"]) for each in found] == [
        (name, gpus) for name in ("A100", "H100", "B200") for gpus in (1, 8)
    ]
    for each in found:
        assert set(each["seconds"]) == set(PUBLISHED_WAYS)
        assert each["source"]
        assert each["seconds"]["ours direct"] < each["seconds"]["stock"]
    assert {each.name for each in CARDS if each.assumed} == {"H100", "B200"}
    a100 = found[0]["seconds"]
    # 3 s + 76 GB: at 2 GB/s, by CRIU in 17 s, at 7 GB/s
    assert a100["stock"] == pytest.approx(3 + 38 + 17 + 76 / 7, abs=0.1)


def test_dumps_that_others_have_measured_are_met() -> None:
    for each in published_dumps():
        assert 0.9 < each["ratio"] < 1.1, each["what"]
