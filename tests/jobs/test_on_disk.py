# SPDX-License-Identifier: Apache-2.0
"""A prune where checkpoints were committed in memory: only those that are on disks by now count."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpustasis._core import MANIFEST_NAME
from gpustasis.jobs import epochs
from gpustasis.jobs.rank import Context
from jobs.test_parents import context, put_epoch  # noqa: F401 - a fixture among them
from jobs.test_pruning import prune, there


def test_one_that_is_in_memory_alone_counts_for_none_that_is_kept(
    context: Context,  # noqa: F811
) -> None:
    """With both of its hosts the job would be lost: the one before them is on a disk."""
    put_epoch(context)
    for _ in range(2):
        put_epoch(context, peer="neighbour:7000")
        assert prune(context) == []
    assert there(context) == [1, 2, 3]
    put_epoch(context)
    assert prune(context, 2) == []  # only 1 and 4 are on a disk
    assert prune(context) == [1, 2, 3]
    assert there(context) == [4]


class Drained:
    """Dumps that are on a disk. unseen: the rank whose directories are on another host."""

    def __init__(self, context: Context, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
        self._context = context
        self._ids: dict[Path, str] = {}
        self.unseen: int | None = None
        monkeypatch.setattr("gpustasis.jobs.dumps.identity_of", self._identity_of)

    def _identity_of(self, place: Path) -> tuple[str, str]:
        is_seen = place.parent.name != f"rank-{self.unseen}"
        return self._ids.get(place, "") if is_seen else "", ""

    def add(self, number: int, rank: int, id_: str = "") -> None:
        place = self._context.place.directory.parent / f"rank-{rank}/epoch-{number:08d}"
        (place / MANIFEST_NAME).touch()
        self._ids[place] = id_ or f"{number}-{rank}"


def test_one_that_is_drained_by_now_counts(
    context: Context,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drained = Drained(context, monkeypatch)
    put_epoch(context)
    number = put_epoch(context, peer="neighbour:7000")
    put_epoch(context, peer="neighbour:7000")
    for rank in (0, 1):
        assert prune(context) == []  # rank 1 is in memory, or what is there is another checkpoint
        drained.add(number, rank, "another")
        assert prune(context) == []
        drained.add(number, rank)
    assert prune(context) == [1]
    assert there(context) == [2, 3]


def test_what_another_host_has_seen_drained_counts(
    context: Context,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each has the directories of its own ranks alone, and would keep all for ever."""
    drained = Drained(context, monkeypatch)
    put_epoch(context)
    number = put_epoch(context, peer="neighbour:7000")
    drained.unseen = 1
    drained.add(number, 0)
    assert prune(context) == []
    drained.unseen = 0
    assert prune(context) == []  # that of rank 1 is in memory still
    drained.add(number, 1)
    drained.unseen = 1
    assert prune(context) == []  # nobody has seen it yet
    drained.unseen = 0
    assert prune(context) == [1]  # who looks last says it too: the others do not see that one
    assert epochs.standing(context.store, context.keys, number).drained == {0, 1}


def test_a_host_says_only_of_its_own_dumps_that_they_are_drained(
    context: Context,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a directory that is shared each host sees all of them."""
    drained = Drained(context, monkeypatch)
    number = put_epoch(context, peer="neighbour:7000")
    drained.add(number, 0)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("gpustasis.jobs.on_disk.socket.gethostname", lambda: "another")
        assert prune(context) == []
        assert not epochs.standing(context.store, context.keys, number).drained
    assert prune(context) == []
    assert epochs.standing(context.store, context.keys, number).drained == {0}
