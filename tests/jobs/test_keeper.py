# SPDX-License-Identifier: Apache-2.0
"""Keepers, in this process, whose store says or does what a store should not, or says it late."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpustasis.errors import JobError
from gpustasis.jobs import epochs
from gpustasis.jobs.local import Local
from gpustasis.jobs.member import Keeper, Outcome, Settings
from gpustasis.jobs.messages import Epoch, Join, Limits, Move, Phase, Report, Step
from gpustasis.jobs.records import Keys, Plan, phase_text
from gpustasis.jobs.seat import Seat
from gpustasis.jobs.server import Server
from gpustasis.jobs.store import MAX_VALUE_BYTES, Put, Snapshot
from support.job_ranks import ANSWER_S, wait_for

KEYS = Keys("job")
SETTINGS = Settings(limits=Limits(lock_network_s=5), ttl_s=4, store_s=2)


class Tasks:
    """What is done with a rank's tasks, in order; hold: what waits until it is to end early."""

    def __init__(self, hold: str = "", record: str = "record") -> None:
        self.done: list[str] = []
        self.record = record
        self._hold = hold
        self._stopped = threading.Event()

    def _do(self, action: str) -> None:
        self.done.append(action)
        if action == self._hold:
            assert self._stopped.wait(60)

    def enter(self, order: object) -> None: ...

    def has_tasks(self) -> bool:
        return True

    def slipped(self) -> str:
        return ""

    def look(self) -> None:
        self._do("look")

    def lock_cuda(self) -> None:
        self._do("lock-cuda")

    def lock_network(self) -> None:
        self._do("lock-network")

    def dump(self, number: int) -> str:
        self._do(f"dump {number}")
        return self.record

    def release(self) -> None:
        self._do("release")

    def finish(self, *, leave_running: bool) -> None:
        self._do(f"finish, leave running: {leave_running}")

    def stop(self) -> None:
        self._stopped.set()


class Late(Local):
    """A store whose answers come late: meanwhile() is called before one is returned."""

    meanwhile: Callable[[], None] | None = None

    def read(self, *keys: str) -> Snapshot:
        snapshot = super().read(*keys)
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        return snapshot


@pytest.fixture
def server(tmp_path: Path, journal: Path) -> Iterator[Server]:
    server = Server(tmp_path / "store", journal)
    yield server
    server.close()


@pytest.fixture
def store(server: Server, tmp_path: Path) -> Iterator[Late]:
    store = Late(tmp_path / "store", ANSWER_S)
    yield store
    store.close()


def keeper_of(store: Local, rank: int, world: int, tasks: Tasks) -> Keeper:
    return Keeper(store, KEYS, rank, world, tasks, SETTINGS)


def take_part(keeper: Keeper, timeout_s: float = 60) -> Outcome | None:
    end = time.monotonic() + timeout_s
    return keeper.take_part(lambda: time.monotonic() > end)


def joined(store: Local, rank: int, world: int, number: int) -> tuple[Seat, Epoch]:
    """A rank without a keeper."""
    seat = Seat(store, KEYS, number, rank, f"rank {rank}")
    found = seat.take(60)
    assert found.world == world
    applied, epoch = seat.write(Join(found.epoch.revision))
    assert applied
    return seat, epoch


@pytest.mark.parametrize("leave_running", [False, True])
def test_a_commit_without_this_ranks_record_is_obeyed_by_no_keeper(
    leave_running: bool, store: Late
) -> None:
    plan = Plan(world=1, leave_running=leave_running)
    number = epochs.begin(store, KEYS, plan)
    joined(store, 0, 1, number)
    store.write([], [Put(KEYS.phase(number), phase_text(plan, Phase.COMMITTED, "x"))])
    tasks = Tasks()
    for _ in range(2):
        with pytest.raises(JobError, match="committed without this rank's dump"):
            take_part(keeper_of(store, 0, 1, tasks))
    assert tasks.done == []


@pytest.mark.parametrize(
    ("kind", "text"),
    [("records", "an older epoch of this number"), ("settled", "is not decided")],
)
def test_what_was_left_of_an_older_epoch_of_the_number_is_not_taken(
    kind: str, text: str, store: Late
) -> None:
    number = epochs.begin(store, KEYS, Plan(world=2, leave_running=False))
    key = KEYS.record(number, 1) if kind == "records" else KEYS.settled(number, 1)
    store.write([], [Put(key, "old")])
    tasks = Tasks()
    with pytest.raises(JobError, match=text):
        take_part(keeper_of(store, 1, 2, tasks))
    assert tasks.done == []
    if kind == "records":  # its tasks run: nobody else may be this rank
        epoch, _ = epochs.phase(store, KEYS, number)
        assert epoch.phase is Phase.ABORTED
        assert epoch.note.endswith("and its tasks run")


def test_a_store_that_answers_and_takes_nothing_does_not_leave_a_rank_locked(
    server: Server, tmp_path: Path
) -> None:
    ranks = [Tasks(), Tasks(hold="lock-network")]
    stores = [Local(tmp_path / "store", ANSWER_S) for _ in ranks]
    keepers = [keeper_of(stores[rank], rank, 2, tasks) for rank, tasks in enumerate(ranks)]
    threads = [threading.Thread(target=take_part, args=(keeper,)) for keeper in keepers]
    for thread in threads:
        thread.start()
    store = Local(tmp_path / "store", ANSWER_S)
    number = epochs.begin(store, KEYS, Plan(world=2, leave_running=True))
    wait_for(lambda: all("lock-network" in tasks.done for tasks in ranks), "locks")
    whole, server.tree._file = server.tree._file, open("/dev/full", "ab", buffering=0)  # noqa: SIM115
    wait_for(lambda: all(tasks.done[-1] == "release" for tasks in ranks), "release", 20)
    assert epochs.phase(store, KEYS, number)[0].phase is Phase.LOCK_NETWORK  # it still answers
    server.tree._file.close()
    server.tree._file, server.tree._broken = whole, ""
    assert epochs.decision(store, KEYS, number, 20).phase is Phase.ABORTED
    for thread in threads:
        thread.join()
    for each in (store, *stores):
        each.close()


@pytest.mark.parametrize("record", ["x" * MAX_VALUE_BYTES + "x", "\udc80"], ids=["large", "bytes"])
def test_a_record_that_no_store_takes_aborts_the_epoch(record: str, store: Late) -> None:
    number = epochs.begin(store, KEYS, Plan(world=1, leave_running=True))
    tasks = Tasks(record=record)
    outcome = take_part(keeper_of(store, 0, 1, tasks))
    assert outcome is not None
    assert outcome.epoch.phase is Phase.ABORTED
    assert outcome.epoch.note.startswith("the dump's record ")
    assert tasks.done[-2:] == [f"dump {number}", "release"]


def test_what_the_lead_was_told_outlasts_an_older_reading(store: Late, tmp_path: Path) -> None:
    number = epochs.begin(store, KEYS, Plan(world=2, leave_running=True))
    lead, epoch = joined(store, 0, 2, number)
    lead.write(Report(epoch.revision, Step.READY))
    other_store = Local(tmp_path / "store", ANSWER_S)
    other, _ = joined(other_store, 1, 2, number)
    found = lead.read()
    (watch,) = lead.watches(found.revision)

    def meanwhile() -> None:
        other.write(Report(epoch.revision, Step.READY))
        changes = list(watch.wait(20))
        assert [change.key for change in changes] == [KEYS.member(number, 1)]
        assert all([*lead.events(change)] for change in changes)

    store.meanwhile = meanwhile
    lead.read()
    assert lead.next_move(epoch, 2) == Move(epoch.revision, Phase.LOCK_CUDA)
    watch.close()
    other_store.close()


def test_a_keeper_that_looks_for_an_epoch_does_not_read_its_ranks(
    store: Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = epochs.begin(store, KEYS, Plan(world=4, leave_running=True))
    for rank in (0, 2, 3):
        joined(store, rank, 4, number)
    read = store.read
    sizes = []

    def counted(*keys: str) -> Snapshot:
        snapshot = read(*keys)
        sizes.append(len(snapshot.entries))
        return snapshot

    monkeypatch.setattr(store, "read", counted)
    epochs.abort(store, KEYS, number, "enough")
    assert take_part(Keeper(store, KEYS, 1, 4, Tasks(), SETTINGS), 1) is None
    epochs.decision(store, KEYS, number, 1)
    epochs.begin(store, KEYS, Plan(world=4, leave_running=True))
    assert len(sizes) >= 5
    assert max(sizes) <= 2
