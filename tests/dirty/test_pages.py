# SPDX-License-Identifier: Apache-2.0
"""What DirtyTracker finds is what a process has written, page by page."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from gpustasis._core import DirtyTracker
from support.dirty_target import HUGE, PAGE, Region, Target, check, found_in, running

KINDS = "psfh"
PAGES = {"p": 96, "s": 64, "f": 48, "h": 2 * HUGE // PAGE}


@pytest.fixture(scope="session")
def program(compile_c: Callable[..., Path], repository: Path) -> Path:
    return compile_c(repository / "tests/programs/dirty_target.c")


def map_region(target: Target, kind: str) -> Region:
    pages = PAGES[kind]
    return Region(kind, target.number("map", kind, pages), pages)


class Bench:
    """A target with some regions, and one step after the other."""

    def __init__(self, target: Target, kinds: list[str]) -> None:
        self.target = target
        self.regions = [map_region(target, kind) for kind in kinds]

    def step(self, name: str, which: int, first: int, count: int) -> None:
        if name == "map":
            self.regions.append(map_region(self.target, KINDS[which % len(KINDS)]))
            return
        if not self.regions:
            return
        region = self.regions[which % len(self.regions)]
        first %= region.pages
        some = range(first, min(first + count, region.pages))
        span = (region.at(first), len(some) * PAGE)
        if name in ("write", "fork", "scatter"):
            chosen = range(first % 7, region.pages, 7 + count) if name == "scatter" else some
            if region.readonly:
                return
            if name == "fork":  # the child writes; the parent's pages stay as they were
                self.target.ask("fork", *map(region.at, chosen))
                region.write_by_another(chosen)
                return
            self.target.ask("write", *map(region.at, chosen))
            region.write(chosen)
        elif name == "read":
            self.target.ask("read", *map(region.at, some))
            region.read(some)
        elif name == "drop" and region.kind == "p":
            self.target.ask("drop", *span)
            region.drop(first, len(some))
        elif name == "protect":
            word = "writable" if region.readonly else "readonly"
            self.target.ask(word, region.address, region.pages * PAGE)
            region.readonly = not region.readonly
        elif name == "unmap":
            self.target.ask("unmap", region.address, region.pages * PAGE)
            self.regions.remove(region)
        elif name == "move" and region.kind == "p":
            region.address = self.target.number("move", region.address, region.pages * PAGE)
            region.vague |= region.populated


STEPS = ("write", "write", "scatter", "read", "drop", "protect", "map", "unmap", "move", "fork")
step = st.tuples(
    st.sampled_from(STEPS), st.integers(0, 9), st.integers(0, 2000), st.integers(1, 40)
)
rounds = st.lists(
    st.tuples(st.lists(step, max_size=12), st.sampled_from(["look", "mark", "remark"])),
    min_size=1,
    max_size=6,
)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=4), plan=rounds)
def test_exactly_what_was_written_is_found(program: Path, kinds: list[str], plan: object) -> None:
    with running(program) as target:
        bench = Bench(target, kinds)
        with DirtyTracker(target.pid) as tracker:
            tracker.mark()
            for steps, after in plan:  # type: ignore[attr-defined]
                for each in steps:
                    bench.step(*each)
                pages = tracker.scan(remark=after == "remark")
                assert pages.backend == tracker.backend
                assert pages.dirty_bytes == sum(length for _, length in pages.ranges)
                assert pages.dirty_bytes <= pages.tracked_bytes
                for region in bench.regions:
                    check(pages, region)
                if after == "mark":
                    tracker.mark()
                if after != "look":
                    for region in bench.regions:
                        region.mark()


def test_before_the_first_mark_everything_counts(program: Path) -> None:
    with running(program) as target:
        region = map_region(target, "p")
        target.ask("write", *map(region.at, range(10)))
        with DirtyTracker(target.pid) as tracker:
            assert found_in(tracker.scan(), region) == set(range(10))
            tracker.mark()
            assert not found_in(tracker.scan(), region)


def test_no_write_is_lost_between_scan_and_mark(program: Path) -> None:
    """Copy what each scan finds while the process goes on writing, as live migration does: once it
    has stopped, the copy is the memory."""
    pages = 2048
    with running(program) as target, open(f"/proc/{target.pid}/mem", "rb", buffering=0) as memory:
        region = Region("p", target.number("map", "p", pages), pages)
        copy = bytearray(pages * PAGE)
        scans = 0
        with DirtyTracker(target.pid, "write-protect") as tracker:

            def take() -> None:
                for page in found_in(tracker.scan(remark=True), region):
                    memory.seek(region.at(page))
                    copy[page * PAGE : (page + 1) * PAGE] = memory.read(PAGE)

            for _ in range(5):
                target.tell("storm", region.address, pages * PAGE, 20_000_000)
                while not target.answered():
                    take()
                    scans += 1
                target.answer()
            take()
        memory.seek(region.address)
        assert copy == memory.read(len(copy))
        assert scans > 10


def test_what_cannot_be_tracked_is_said(program: Path, tmp_path: Path) -> None:
    shared = tmp_path / "file"
    shared.write_bytes(b"x" * 64 * PAGE)
    source = f"""
import mmap, sys
file = open({str(shared)!r}, "r+b")
memory = mmap.mmap(file.fileno(), 0)
for page in range(0, len(memory), 4096): memory[page] = 1
print("ready", flush=True)
sys.stdin.read()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        with DirtyTracker(process.pid) as tracker:
            pages = tracker.scan()
        assert pages.untracked_bytes == 64 * PAGE
        assert pages.tracked_bytes > 1 << 20
    finally:
        process.communicate(b"")
