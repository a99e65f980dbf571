# SPDX-License-Identifier: Apache-2.0
"""Whatever a store looks like and whoever uses it: after a prune every kept checkpoint is whole."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from random import Random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpustasis._core import CorruptDataError
from gpustasis.errors import ImageError
from gpustasis.image.directory import share
from gpustasis.image.prune import Action, Rules, choose, prune
from support.chains import contents, is_whole, make_link, memory_of
from support.job import TIMEOUT_S

FIRST = 1_800_000_000
WORDS = ["0", "A", "B", "c", "d", "E"]


@st.composite
def stores(draw: st.DrawFn) -> list[tuple[int | None, list[str], int, bool]]:
    """Checkpoints in order: which earlier one is the parent, pages, minutes later, finished."""
    made: list[tuple[int | None, list[str], int, bool]] = []
    for number in range(draw(st.integers(1, 7))):
        parent = draw(st.none() | st.integers(0, number - 1)) if number else None
        pages = draw(st.lists(st.sampled_from(WORDS), min_size=1, max_size=3))
        later = draw(st.integers(0, 2000))
        made.append((parent, pages, later, draw(st.integers(0, 5)) > 0))
    return made


rules_of_any_kind = st.builds(
    Rules,
    last=st.none() | st.integers(1, 4),
    within=st.none() | st.integers(1, 60).map(lambda hours: timedelta(hours=hours)),
    hourly=st.none() | st.integers(1, 3),
    daily=st.none() | st.integers(1, 3),
).filter(lambda rules: not rules.empty)


def build(store: Path, plan: list[tuple[int | None, list[str], int, bool]]) -> dict[str, datetime]:
    """The finished ones with their times."""
    now = FIRST
    times = {}
    for number, (parent, pages, later, finished) in enumerate(plan):
        now += 60 * later
        below = None if parent is None else store / f"n{parent}"
        directory = store / f"n{number}"
        images = {7: memory_of(pages)}
        make_link(directory, images, parent=below, taken=now, finished=finished)
        if finished:
            times[directory.name] = datetime.fromtimestamp(now, UTC).astimezone()
    return times


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    plan=stores(), rules=rules_of_any_kind, used=st.sets(st.integers(0, 6)), rename=st.booleans()
)
def test_no_prune_breaks_what_it_keeps(
    tmp_path: Path,
    plan: list[tuple[int | None, list[str], int, bool]],
    rules: Rules,
    used: set[int],
    rename: bool,
) -> None:
    store = Path(tempfile.mkdtemp(dir=tmp_path))
    times = build(store, plan)
    before = {path.name: contents(path) for path in store.iterdir()}
    with ExitStack() as held:
        users = {f"n{number}" for number in used} & set(before)
        for name in sorted(users):
            held.enter_context(share(store / name))
        would = prune(store, rules, dry_run=True)
        done = prune(store, rules)
    left = {path.name for path in store.iterdir()}
    for name in left:  # nothing hidden either
        assert is_whole(store / name)
        assert contents(store / name) == before[name]
    must_stay = set(choose(times, rules)) | users | (set(before) - set(times))
    assert must_stay <= left
    removed = {v.entry.name for v in done.verdicts if v.action is Action.REMOVED}
    assert removed == set(before) - left
    # Nothing is kept without a reason that holds.
    needed = set(must_stay)
    for number in range(len(plan) - 1, -1, -1):
        parent = plan[number][0]
        if f"n{number}" in needed and parent is not None:
            needed.add(f"n{parent}")
    assert left == needed
    if not users:
        assert {v.entry.name: v.action for v in would.verdicts} == {
            v.entry.name: v.action for v in done.verdicts
        }
    shutil.rmtree(store)


def dump_forever(store: Path, seed: int, rounds: int, enough: Path) -> None:
    """As the plugin does it: lock the parent, look whether it is still there, then read it. A child
    of the test; its exit status says what came of it. It ends once `enough` is there, too: who
    prunes may have no processor for long."""
    random = Random(seed)
    for number in count():
        if number >= rounds and enough.exists():
            return
        parents = sorted(path for path in store.glob("n*") if (path / "inventory.img").exists())
        parent = random.choice(parents)
        name = f"n-{seed}-{number}"
        try:
            with share(parent):
                pages = [random.choice(WORDS) for _ in range(3)]
                make_link(store / name, {7: memory_of(pages)}, parent=parent)
        except (ImageError, CorruptDataError, OSError):
            # The parent was pruned before the lock: nothing may have come of the dump.
            if (store / name / "inventory.img").exists():
                os._exit(3)
            shutil.rmtree(store / name, ignore_errors=True)


def test_dumps_that_build_on_candidates_meanwhile(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    make_link(store / "n0", {7: memory_of(["A", "B", "c"])})
    enough = tmp_path / "enough"
    dumpers = []
    for seed in range(3):
        pid = os.fork()
        if pid == 0:
            try:
                dump_forever(store, seed, 40, enough)
                os._exit(0)
            finally:
                os._exit(4)
        dumpers.append(pid)
    prunes = removed = 0
    deadline = time.monotonic() + TIMEOUT_S
    running = set(dumpers)
    try:
        while running:
            done = prune(store, Rules(last=2))
            prunes += 1
            removed += sum(verdict.action is Action.REMOVED for verdict in done.verdicts)
            if (prunes > 3 and removed > 3) or time.monotonic() > deadline:
                enough.touch()
            for pid in list(running):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    running.remove(pid)
                    assert os.waitstatus_to_exitcode(status) == 0
    finally:
        enough.touch()  # a prune that fails leaves none of them at work
        for pid in running:
            os.waitpid(pid, 0)
    left = [path for path in store.iterdir() if (path / "inventory.img").exists()]
    assert [path.name for path in left if not is_whole(path)] == []
    assert prunes > 3
    assert removed > 3
