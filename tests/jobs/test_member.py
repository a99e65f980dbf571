# SPDX-License-Identifier: Apache-2.0
"""Four ranks as processes, with a real etcd or the local store; keepers killed and cut off in each
phase. A part of the cases, unless GPUSTASIS_KEEPERS=whole: `ci/soak keepers` runs all."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpustasis.errors import JobError
from gpustasis.jobs import epochs, exchange
from gpustasis.jobs.etcd import Etcd
from gpustasis.jobs.etcd_words import Access
from gpustasis.jobs.local import Local
from gpustasis.jobs.member import Keeper
from gpustasis.jobs.messages import Join, Phase
from gpustasis.jobs.records import Plan
from gpustasis.jobs.seat import Seat
from gpustasis.jobs.server import Server
from gpustasis.jobs.store import Put
from gpustasis.jobs.work import Order
from support.etcd import EtcdCluster
from support.job_ranks import ANSWER_S, KEYS, Job, Proxy, job_of, wait_for

WORLD = 4
ACTIONS = ("look", "lock-cuda", "lock-network", "dump")
LEAD, OTHER = 0, 2
WHOLE = os.environ.get("GPUSTASIS_KEEPERS") == "whole"


def part(cases: Iterable[Any]) -> list[Any]:
    """Of all cases those that are run: each third of them, or all."""
    return list(cases)[:: 1 if WHOLE else 3]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[EtcdCluster]:
    cluster = EtcdCluster(tmp_path)
    try:
        cluster.wait()
        yield cluster
    finally:
        cluster.close()


@contextmanager
def etcd_job(
    cluster: EtcdCluster, directory: Path, places: dict[int, str] | None = None
) -> Iterator[Job]:
    url = cluster.endpoints[0]
    store = Etcd(Access(endpoints=(url,)))
    with job_of(directory, store, [(places or {}).get(r, url) for r in range(WORLD)]) as job:
        yield job
    store.close()


@pytest.mark.parametrize("leave_running", [False, True])
@pytest.mark.parametrize("kind", ["etcd", "local"])
def test_a_job_is_committed(
    kind: str,
    leave_running: bool,
    tmp_path: Path,
    journal: Path,
    request: pytest.FixtureRequest,
) -> None:
    if kind == "etcd":
        with etcd_job(request.getfixturevalue("cluster"), tmp_path) as job:
            committed(job, leave_running=leave_running)
        return
    server = Server(tmp_path / "store", journal)
    store = Local(tmp_path / "store", ANSWER_S)
    with job_of(tmp_path, store, [str(tmp_path / "store")] * WORLD) as job:
        committed(job, leave_running=leave_running)
    store.close()
    server.close()


def committed(job: Job, *, leave_running: bool) -> None:
    job.start_all()
    number = job.begin(leave_running=leave_running)
    now = job.end(number)
    assert now.epoch.phase is Phase.COMMITTED, now
    job.require_uniform(now)
    if leave_running:
        again = job.end(job.begin())
        assert (again.number, again.epoch.phase) == (number + 1, Phase.COMMITTED), again
        job.require_uniform(again)


@pytest.mark.parametrize(
    ("action", "moment", "rank"),
    part(itertools.product(ACTIONS, ("begin", "end"), (LEAD, OTHER))),
)
def test_a_keeper_that_dies_aborts_the_epoch(
    action: str, moment: str, rank: int, cluster: EtcdCluster, tmp_path: Path
) -> None:
    with etcd_job(cluster, tmp_path) as job:
        job.start_all({rank: f"{action}:{moment}"})
        now = job.end(job.begin())
        assert (tmp_path / f"fault-{rank}").exists()
        assert now.epoch.phase is Phase.ABORTED, now
        job.require_uniform(now)
        last = job.end(job.begin())  # nothing of it is left in the way
        assert last.epoch.phase is Phase.COMMITTED, last
        job.require_uniform(last)


@pytest.mark.parametrize("rank", [LEAD, OTHER])
@pytest.mark.parametrize("leave_running", [False, True])
def test_a_keeper_that_dies_after_the_decision_does_what_was_decided(
    leave_running: bool, rank: int, cluster: EtcdCluster, tmp_path: Path
) -> None:
    with etcd_job(cluster, tmp_path) as job:
        job.start_all({rank: "finish:begin"})
        now = job.end(job.begin(leave_running=leave_running))
        assert (tmp_path / f"fault-{rank}").exists()
        assert now.epoch.phase is Phase.COMMITTED, now
        job.require_uniform(now)


@pytest.mark.parametrize("action", ACTIONS)
def test_a_rank_that_says_no_aborts_the_epoch(
    action: str, cluster: EtcdCluster, tmp_path: Path
) -> None:
    with etcd_job(cluster, tmp_path) as job:
        job.start_all({OTHER: f"{action}:begin:no"})
        now = job.end(job.begin())
        assert now.epoch.phase is Phase.ABORTED
        assert now.epoch.note == f"rank {OTHER} says no at {action}:begin"
        job.require_uniform(now)


def test_a_rank_that_never_joins_aborts_the_epoch(cluster: EtcdCluster, tmp_path: Path) -> None:
    with etcd_job(cluster, tmp_path) as job:
        for rank in range(WORLD - 1):
            job.start(rank)
        now = job.end(job.begin())
        assert (now.epoch.phase, now.epoch.note) == (Phase.ABORTED, "phase look took too long")
        job.require_uniform(now)


@pytest.mark.parametrize(
    ("action", "rank"), part(itertools.product((*ACTIONS, "finish"), (LEAD, OTHER)))
)
def test_a_rank_that_is_cut_off(
    action: str, rank: int, cluster: EtcdCluster, tmp_path: Path
) -> None:
    proxy = Proxy(int(cluster.endpoints[0].rpartition(":")[2]))
    try:
        with etcd_job(cluster, tmp_path, {rank: proxy.url}) as job:
            job.start_all()
            number = job.begin()
            job.wait_at(rank, action, number)
            proxy.cut()
            wait_for(lambda: job.standing(number).epoch.phase.is_final, "decision")
            decided = job.standing(number)
            others = set(range(WORLD)) - {rank}
            if decided.epoch.phase is Phase.ABORTED:
                wait_for(lambda: others <= job.standing(number).settled, "the others")
            proxy.mend()
            now = job.end(number)
            assert now.epoch == decided.epoch
            job.require_uniform(now)
    finally:
        proxy.close()


@pytest.mark.parametrize("action", part(ACTIONS))
def test_a_store_that_dies_and_comes_back(
    action: str, cluster: EtcdCluster, tmp_path: Path
) -> None:
    late = [WORLD - 1] if action == "look" else []  # without it no epoch gets beyond that
    with etcd_job(cluster, tmp_path) as job:
        job.start_all(but=late)
        number = job.begin()
        wait_for(lambda: any(job.has_begun(r, action) for r in range(WORLD)), action)
        cluster.servers[0].kill()
        if action != "dump":  # nobody has sent a record: all run on, without being told
            left = {"release:end", ""}  # "": it had not joined
            if action == "lock-network":  # on a busy machine one may be bound by now: it waits
                left.add("dump:end")
            wait_for(lambda: {job.at(rank) for rank in range(WORLD)} <= left, "release")
        cluster.servers[0].start()
        for rank in late:
            job.start(rank)
        now = job.end(number)
        job.require_uniform(now)


def test_bound_ranks_wait_however_long_the_store_is_away(
    cluster: EtcdCluster, tmp_path: Path
) -> None:
    with etcd_job(cluster, tmp_path) as job:
        job.start_all({OTHER: "dump:begin:stop"})
        number = job.begin()
        bound = set(range(WORLD)) - {OTHER}
        wait_for(lambda: set(job.standing(number).records) == bound, "records")
        cluster.servers[0].kill()
        time.sleep(11)  # more than twice as long as a rank waits that is not bound
        assert {job.at(rank) for rank in bound} == {"dump:end"}
        assert {job.states()[rank] for rank in bound} == {"T"}
        cluster.servers[0].start()
        keeper = job.keepers[OTHER]
        assert keeper is not None
        keeper.send_signal(signal.SIGCONT)
        job.require_uniform(job.end(number))


def test_all_keepers_die_at_once(cluster: EtcdCluster, tmp_path: Path) -> None:
    with etcd_job(cluster, tmp_path) as job:
        job.start_all()
        number = job.begin()
        job.wait_at(LEAD, "dump", number)
        for keeper in job.keepers:
            assert keeper is not None
            keeper.send_signal(signal.SIGKILL)
            keeper.wait()
        job.require_uniform(job.end(number))


def test_two_epochs_at_once_there_are_not(cluster: EtcdCluster, tmp_path: Path) -> None:
    with etcd_job(cluster, tmp_path) as job:
        number = job.begin()
        with pytest.raises(JobError, match=rf"epoch {number} is in phase look and not decided"):
            job.begin()
        epoch = epochs.abort(job.store, KEYS, number, "enough")
        assert (epoch.phase, epoch.note) == (Phase.ABORTED, "enough")
        assert job.begin() == number + 1


def test_a_job_of_another_size_is_refused(cluster: EtcdCluster, tmp_path: Path) -> None:
    with etcd_job(cluster, tmp_path) as job:
        job.start(1)
        number = epochs.begin(job.store, KEYS, Plan(world=2, leave_running=True))
        wait_for(lambda: job.standing(number).epoch.phase.is_final, "decision")
        now = job.standing(number)
        assert now.epoch.note == "rank 1 was started with --world 4, and this is for 2"
        job.require_uniform(now)


def test_one_of_two_keepers_of_a_rank_joins(cluster: EtcdCluster) -> None:
    store = Etcd(Access(endpoints=cluster.endpoints))
    number = epochs.begin(store, KEYS, Plan(world=1, leave_running=True))
    seats = [Seat(store, KEYS, number, 0, name) for name in ("one", "other")]
    join = Join(seats[0].take(60).epoch.revision)
    seats[1].take(60)
    assert [seat.write(join)[0] for seat in (*seats, *seats)] == [True, False, True, False]
    for seat in seats:
        seat.leave()
    store.close()


class Idle:
    """A Work (jobs.work.Work) with nothing to do."""

    def enter(self, order: Order) -> None: ...

    def has_tasks(self) -> bool:
        return True

    def look(self) -> None: ...

    def lock_cuda(self) -> None: ...

    def lock_network(self) -> None: ...

    def dump(self, number: int) -> str:
        return "{}"

    def release(self) -> None: ...

    def finish(self, *, leave_running: bool) -> None: ...

    def stop(self) -> None: ...

    def slipped(self) -> str:
        return ""


def test_a_keeper_waits_for_nothing_when_an_epoch_is_over(
    tmp_path: Path, journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "_IDLE_S", 30.0)
    server, store = Server(tmp_path / "store", journal), Local(tmp_path / "store", ANSWER_S)
    settings = exchange.Settings(ttl_s=1000)
    keepers = [Keeper(store, KEYS, rank, 2, Idle(), settings) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            number = epochs.begin(store, KEYS, Plan(world=2, leave_running=True))
            outcomes = [pool.submit(one.take_part, lambda: False) for one in keepers]
            for outcome in outcomes:
                found = outcome.result(15)
                assert found is not None
                assert (found.number, found.epoch.phase) == (number, Phase.COMMITTED)
    store.close()
    server.close()


def test_records_that_were_exchanged_are_seen(cluster: EtcdCluster, tmp_path: Path) -> None:
    with etcd_job(cluster, tmp_path) as job:
        job.start_all()
        number = job.begin()
        assert job.end(number).is_whole
        job.store.write([], [Put(KEYS.record(number, OTHER), '{"count": 0}')])
        assert not job.standing(number).is_whole
