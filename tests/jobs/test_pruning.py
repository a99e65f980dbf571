# SPDX-License-Identifier: Apache-2.0
"""A prune beside what goes on at the same time: epochs that begin, other prunes, ranks that are not
back yet, and who reads a dump without asking the store."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpustasis._core import ARENA_MARKER, SEALED_NAME
from gpustasis.errors import JobError
from gpustasis.image import directory
from gpustasis.image.directory import share
from gpustasis.jobs import epochs, kept, neighbour
from gpustasis.jobs.epochs import Standing
from gpustasis.jobs.exchange import Settings
from gpustasis.jobs.member import Outcome
from gpustasis.jobs.messages import Phase
from gpustasis.jobs.owner import OWNER
from gpustasis.jobs.rank import Context
from gpustasis.jobs.records import Keys, Plan, phase_text, settled_text
from gpustasis.jobs.store import Answer, Put, Require, Store
from gpustasis.jobs.supervise import Supervisor
from gpustasis.jobs.verified import tell_once
from jobs.test_bring_back import record_of
from jobs.test_parents import context, put_epoch  # noqa: F401 - a fixture among them
from support.chains import make_link, memory_of
from support.inventory import write_inventory
from support.local_checkpoints import make_local

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


def test_what_is_built_on_another_goes_before_it(
    context: Context,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of two that are only in memory the other could not be given up before."""
    for parents in ((0, 0), (1, 1), (0, 0)):
        put_epoch(context, *parents)
    asked: list[str] = []
    monkeypatch.setattr(neighbour, "give_up", lambda place: asked.append(place.name))
    assert prune(context) == [1, 2]
    assert asked == ["epoch-00000002"] * 2 + ["epoch-00000001"] * 2
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


def sealed(place: Path) -> None:
    make_whole(place)
    (place / SEALED_NAME).touch()


def make_whole(place: Path) -> None:
    make_link(place, {7: memory_of(["A"])})


def named(place: Path) -> None:
    """With the images that its inventory names in no arena any more."""
    write_inventory(place, f"checkpoint-{32 * 'a'}")


def damaged(place: Path) -> None:
    (place / "inventory.img").write_bytes(b"x")


@pytest.mark.parametrize("is_owned", [False, True])
@pytest.mark.parametrize("made", [make_whole, named, sealed])
def test_another_jobs_checkpoint_is_left_alone(
    context: Context,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
    made: Callable[[Path], None],
    is_owned: bool,
) -> None:
    """Two jobs were given one directory, and each has an epoch of that number. Its own dump has
    gone long ago, and each prune looks for it again."""
    put_epoch(context)
    put_epoch(context)
    assert prune(context) == [1]
    if not is_owned:
        (context.place.directory / OWNER).unlink()
    tell_once.cache_clear()
    place = context.place.images(1)
    place.mkdir(mode=0o700)
    made(place)
    before = sorted(os.listdir(place))
    for _ in range(2):
        assert prune(context) == []
        assert sorted(os.listdir(place)) == before
    assert caplog.text.count(f"{place} is left alone by the prune of epoch 1, job job: ") == 1
    assert "is another checkpoint" in caplog.text


@pytest.mark.parametrize("made", [lambda _: None, damaged])
@pytest.mark.parametrize(
    ("owner", "stays"), [("", "nothing says that"), ("other", "belongs to job other"), ("job", "")]
)
def test_what_cannot_be_told_apart_goes_where_nobody_else_dumps(
    context: Context,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
    made: Callable[[Path], None],
    owner: str,
    stays: str,
) -> None:
    """An empty directory may be another job's, whose dump is about to begin."""
    put_epoch(context)
    put_epoch(context)
    assert prune(context) == [1]
    (context.place.directory / OWNER).unlink()
    if owner:
        (context.place.directory / OWNER).write_text(f"{owner}\n")
    tell_once.cache_clear()
    place = context.place.images(1)
    place.mkdir(mode=0o700)
    made(place)
    assert prune(context) == ([] if stays else [1])
    assert place.exists() == bool(stays)
    assert stays in caplog.text


@pytest.mark.parametrize("is_lost", ["memory", "all but the inventory", "nothing"])
def test_a_dump_that_is_lost_is_known_and_removed(
    context: Context,  # noqa: F811
    arena: Path,
    is_lost: str,
) -> None:
    images = context.place.images(1)
    stored = make_local(images, arena)
    record = record_of(images, "", "")
    (context.place.directory / OWNER).unlink()
    if is_lost != "nothing":
        shutil.rmtree(stored)
    if is_lost == "all but the inventory":
        (images / ARENA_MARKER).unlink()
    assert kept._remove(record, 1, "job", set()) == [str(images)]
    assert not images.exists()
    assert not stored.exists()


def test_what_gpustasis_has_stored_is_no_dump_that_criu_has_made_alone(
    context: Context,  # noqa: F811
) -> None:
    """The record of such a dump has no id."""
    (context.place.directory / OWNER).unlink()
    places = [context.place.images(number) for number in (1, 2)]
    places[0].mkdir(mode=0o700)
    write_inventory(places[0])
    make_whole(places[1])
    records = [
        replace(record_of(places[1], "", ""), directory=str(place), id="") for place in places
    ]
    removed = [kept._remove(one, number, "job", set()) for number, one in enumerate(records, 1)]
    assert removed == [[str(places[0])], []]
    assert places[1].exists()
