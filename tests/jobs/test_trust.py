# SPDX-License-Identifier: Apache-2.0
"""What others write to the store, or put in a directory, decides nothing that root does."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gpustasis.errors import JobError
from gpustasis.jobs import epochs, kept, preempting, verified
from gpustasis.jobs.dumps import record_of, seal_of
from gpustasis.jobs.epochs import Standing
from gpustasis.jobs.rank import Context
from gpustasis.jobs.records import Keys, Plan
from gpustasis.jobs.replay import replay
from gpustasis.jobs.store import Put, Store
from jobs.test_left import whole
from jobs.test_undoing import KEYS, NO_CRIU, context, server  # noqa: F401 - fixtures


@pytest.mark.parametrize("which", [0, 2])
def test_no_address_of_a_record_is_a_command_for_nft(
    which: int,
    context: Context,  # noqa: F811
) -> None:
    """`ipaddress` takes any text after a "%"."""
    whole(context)
    value = json.loads(context.store.read(KEYS.record(1, 0)).entries[KEYS.record(1, 0)].value)
    connection = ["::1", 1, "::1", 2]
    value["network"]["connections"] = [connection]
    assert record_of(json.dumps(value), "rank 0").network.connections
    connection[which] = "::1%x }\nflush ruleset\n"
    with pytest.raises(JobError, match="has a scope"):
        record_of(json.dumps(value), "rank 0")


def test_no_directory_is_made_of_a_name_that_no_job_may_have(tmp_path: Path) -> None:
    words = ["job", "run", "--rank", "0", "--world", "1", "-D", tmp_path / "kept", "--store", "/no"]
    words += ["--run-directory", tmp_path / "run", "--job", "../elsewhere", "--", "true"]
    ended = subprocess.run(
        [sys.executable, "-m", "gpustasis", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == JobError.exit_code
    assert "job name '../elsewhere'" in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_dump_that_others_can_change_is_not_replayed(
    context: Context,  # noqa: F811
) -> None:
    """Its digest comes out of the store, as its place does."""
    place = whole(context)
    size, digest = seal_of(place)
    text = context.store.read(KEYS.record(1, 0)).entries[KEYS.record(1, 0)].value
    record = replace(record_of(text, "rank 0"), bytes=size, digest=digest)
    place.chmod(0o777)
    with pytest.raises(JobError, match=f"{place}, which the store names, is not restored"):
        replay("job", [(0, record)], NO_CRIU, runs=False)


def test_no_start_goes_on_from_what_was_kept_as_evidence(context: Context) -> None:  # noqa: F811
    """It holds a job that had failed."""
    for _ in range(3):
        whole(context)
    assert preempting.to_restore(context) == 3
    for number, found in ((3, 2), (2, 1)):
        context.store.write([], [Put(KEYS.evidence(number), "1")])
        assert preempting.to_restore(context) == found
    older = kept.next_older(context.store, KEYS, epochs.standing(context.store, KEYS, 3))
    assert older is not None and older.number == 1


def test_a_prune_removes_no_good_checkpoint_for_one_that_did_not_bring_the_job_back(
    context: Context,  # noqa: F811
) -> None:
    places = [whole(context) for _ in range(4)]
    plan = Plan(world=1, leave_running=True, restores=4)
    restore = epochs.begin(context.store, KEYS, plan)
    epochs.abort(context.store, KEYS, restore, "of no interest")
    verified._store(context.store, KEYS, restore, 4, "rank 0 is not back")
    kept.prune(context.store, KEYS, 2)
    assert [place.exists() for place in places] == [False, True, True, True]
    kept.prune(context.store, KEYS, 1)
    assert [place.exists() for place in places] == [False, False, True, True]
    places += [whole(context), whole(context)]
    kept.prune(context.store, KEYS, 2)
    assert [place.exists() for place in places] == [False] * 4 + [True] * 2


def test_the_newest_ones_stay_where_none_is_good(context: Context) -> None:  # noqa: F811
    places = [whole(context) for _ in range(2)]
    for number in (1, 2):
        verified._store(context.store, KEYS, 10 + number, number, "rank 0 is not back")
    kept.prune(context.store, KEYS, 1)
    assert all(place.exists() for place in places)


def test_a_prune_leaves_alone_what_others_can_change(context: Context) -> None:  # noqa: F811
    """They could make it a link to a directory of root's while it is removed."""
    place = whole(context)
    whole(context)
    place.parent.chmod(0o777)
    with pytest.raises(JobError, match=f"{place} is left alone: "):
        kept.prune(context.store, KEYS, 1)
    assert len(list(place.iterdir())) == 3


def test_a_prune_removes_nothing_that_is_being_restored_by_now(
    context: Context,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = whole(context)
    whole(context)
    all_epochs = kept.all_epochs

    def and_then_one_begins(store: Store, keys: Keys) -> list[Standing]:
        found = all_epochs(store, keys)
        epochs.begin(store, keys, Plan(world=1, leave_running=True, restores=1))
        return found

    monkeypatch.setattr(kept, "all_epochs", and_then_one_begins)
    with pytest.raises(JobError, match="an epoch has begun meanwhile"):
        kept.prune(context.store, KEYS, 1)
    assert place.exists()
