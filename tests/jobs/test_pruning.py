# SPDX-License-Identifier: Apache-2.0
"""A prune beside what goes on at the same time: epochs that begin, other prunes, ranks that are not
back yet, and who reads a dump without asking the store."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpustasis.errors import JobError
from gpustasis.image import directory
from gpustasis.image.directory import share
from gpustasis.jobs import epochs, kept
from gpustasis.jobs.epochs import Standing
from gpustasis.jobs.exchange import Settings
from gpustasis.jobs.member import Outcome
from gpustasis.jobs.messages import Phase
from gpustasis.jobs.rank import Context
from gpustasis.jobs.records import Keys, Plan, phase_text, settled_text
from gpustasis.jobs.store import Answer, Put, Require, Store
from gpustasis.jobs.supervise import Supervisor
from jobs.test_parents import context, put_epoch  # noqa: F401 - a fixture among them

MEANWHILE = "an epoch has begun meanwhile"


def prune(context: Context, keep_last: int = 1) -> list[int]:  # noqa: F811
    """The epochs of which something was done."""
    return [one.epoch for one in kept.prune(context.store, context.keys, keep_last)]


def there(context: Context) -> list[int]:  # noqa: F811
    """Epochs of which each rank's dump is there."""
    top = context.place.directory.parent
    found = [sorted(path.name for path in top.glob(f"rank-{rank}/epoch-*")) for rank in (0, 1)]
    assert found[0] == found[1]
    return [int(name[len("epoch-") :]) for name in found[0]]


def put_restore(context: Context, restores: int, *settled: str) -> int:  # noqa: F811
    """A committed epoch that has restored this one; what ranks have said of it since."""
    plan, keys = Plan(world=2, leave_running=True, restores=restores), context.keys
    number = epochs.begin(context.store, keys, plan)
    puts = [Put(keys.phase(number), phase_text(plan, Phase.COMMITTED))]
    puts += [Put(keys.settled(number, rank), settled_text(t)) for rank, t in enumerate(settled)]
    context.store.write([], puts)
    return number


def before_marking(
    context: Context,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    happens: Callable[[], object],
) -> None:
    """Have that happen when a prune is about to say that this epoch is pruned."""
    write, key = context.store.write, context.keys.pruned(number)
    happened: list[str] = []

    def late(requires: Sequence[Require], puts: Sequence[Put]) -> Answer:
        if puts and puts[0].key == key and not happened:
            happened.append(key)
            happens()
        return write(requires, puts)

    monkeypatch.setattr(context.store, "write", late)


@pytest.mark.parametrize("was_pruned", [True, False])
def test_what_is_about_to_be_restored_keeps_all_that_it_is_built_on(
    context: Context,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    was_pruned: bool,
) -> None:
    put_epoch(context)
    put_epoch(context, 1, 1)
    if was_pruned:
        assert prune(context) == [1]
    put_epoch(context)
    plan = Plan(world=2, leave_running=True, restores=2)
    begin = lambda: epochs.begin(context.store, context.keys, plan)  # noqa: E731
    before_marking(context, monkeypatch, 2, begin)
    with pytest.raises(JobError, match=MEANWHILE):
        prune(context)
    assert there(context) == [1, 2, 3]


def test_epochs_that_were_read_at_two_moments_are_no_reason_to_remove_anything(
    context: Context,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prune is slow: another checkpoint is made, and pruned for, on another host meanwhile. What
    the first one has read shows no checkpoint that stays."""
    for parents in ((0, 0), (1, 1), (2, 2)):
        put_epoch(context, *parents)
    assert prune(context) == [1, 2]
    standing = epochs.standing
    made: list[int] = []

    def slow(store: Store, keys: Keys, number: int) -> Standing:
        if not made:
            made.append(put_epoch(context, 3, 3))
            store.write([], [Put(keys.pruned(3), "1")])
        return standing(store, keys, number)

    monkeypatch.setattr(epochs, "standing", slow)
    with pytest.raises(JobError, match=MEANWHILE):
        prune(context)
    assert there(context) == [1, 2, 3, 4]


def test_what_another_prune_has_marked_meanwhile_is_removed_all_the_same(
    context: Context,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Keepers on several hosts prune at the same time, after the same checkpoint."""
    for _ in range(3):
        put_epoch(context)
    mark = Put(context.keys.pruned(1), "1")
    before_marking(context, monkeypatch, 1, lambda: context.store.write([], [mark]))
    assert prune(context) == [1, 2]
    assert there(context) == [3]


def test_a_dump_in_use_is_left_to_the_next_prune(context: Context) -> None:  # noqa: F811
    """Who replays or copies one, or builds a dump of its own on it, asks no store."""
    for _ in range(3):
        put_epoch(context)
    place = context.place.images(1)
    with share(place), pytest.raises(JobError, match=f"{place} is in use"):
        prune(context)
    assert list(place.iterdir()) == [place / "inventory.img"]
    assert not context.place.images(2).exists()
    prune(context)
    assert there(context) == [3]


def test_where_no_directory_can_be_locked_dumps_go_all_the_same(
    context: Context,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on NFS."""
    put_epoch(context)
    put_epoch(context)

    def flock(*_: object) -> None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    monkeypatch.setattr(directory, "fcntl", SimpleNamespace(flock=flock, LOCK_EX=0, LOCK_NB=0))
    assert prune(context) == [1]
    assert there(context) == [2]


@pytest.mark.parametrize(
    ("settled", "gone"),
    [((), []), (("",), []), (("", "it was not verified"), []), (("", ""), [1])],
)
def test_until_a_job_is_back_an_older_checkpoint_stays(
    context: Context,  # noqa: F811
    settled: Sequence[str],
    gone: list[int],
) -> None:
    """If it is not verified, that one is restored in its place."""
    put_epoch(context)
    put_epoch(context)
    put_restore(context, 2, *settled)
    another = epochs.begin(context.store, context.keys, Plan(world=2, leave_running=True))
    epochs.abort(context.store, context.keys, another, "a rank is not back")
    assert prune(context) == gone


def test_what_was_restored_before_the_newest_checkpoint_is_back(
    context: Context,  # noqa: F811
    tmp_path: Path,
) -> None:
    put_epoch(context)
    put_restore(context, 1)
    put_epoch(context)
    assert prune(context) == [1]
    assert not list(tmp_path.glob("kept/rank-*/epoch-00000001"))


def test_after_an_epoch_that_was_aborted_what_is_not_needed_goes(
    context: Context,  # noqa: F811
) -> None:
    """There may be no room for another checkpoint, and nothing else would make some."""
    for _ in range(4):
        put_epoch(context)
    context.options = replace(context.options, keep_last=2)
    number = epochs.begin(context.store, context.keys, Plan(world=2, leave_running=True))
    epoch = epochs.abort(context.store, context.keys, number, "there is no room")
    stay = [1 << 30]
    made: list[bool] = []

    def least_kept(*, is_made: bool) -> int:
        made.append(is_made)
        return stay[0]

    recovering: Any = SimpleNamespace(least_kept=least_kept)
    supervisor = Supervisor(context, Settings(), lambda _: None, recovering=recovering)
    for least, left in ((1 << 30, [1, 2, 3, 4]), (3, [2, 3, 4]), (1, [3, 4])):
        stay[0] = least
        assert supervisor._after(Outcome(number, epoch, "")) is None
        assert there(context) == left
    assert made == [False] * 3
