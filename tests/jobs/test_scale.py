# SPDX-License-Identifier: Apache-2.0
"""Epochs of many ranks on a virtual clock: they are committed, and what each costs the store does
not grow with their number. What is played asks the same of the store as what is real."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import replace

import pytest

from gpustasis.jobs import epochs
from gpustasis.jobs.etcd import Etcd
from gpustasis.jobs.etcd_words import Access
from gpustasis.jobs.member import Keeper, Settings
from gpustasis.jobs.messages import Phase
from gpustasis.jobs.records import Plan
from support.etcd import EtcdCluster
from support.job_ranks import wait_for
from support.job_scale import KEYS, Scale, counted
from support.played_etcd import Rates

RATES = Rates(writes=1000, reads=1700, keeps=2800, events=5000, entries=40_000)
SETTINGS = Settings(writes_per_s=700)
MOVES = 4  # of the lead


class QuickTasks:
    """Of a rank whose tasks need no time."""

    def enter(self, order: object) -> None: ...

    def has_tasks(self) -> bool:
        return True

    def slipped(self) -> str:
        return ""

    def look(self) -> None: ...

    def lock_cuda(self) -> None: ...

    def lock_network(self) -> None: ...

    def dump(self, number: int) -> str:
        return f"record {number}"

    def release(self) -> None: ...

    def finish(self, *, leave_running: bool) -> None: ...

    def stop(self) -> None: ...


@pytest.mark.parametrize("ranks", [16, 64, 256, 1024])
def test_many_ranks_commit(ranks: int) -> None:
    scale = Scale(ranks, RATES, replace(SETTINGS, ttl_s=120))  # no beat falls into the epoch
    load = scale.run()
    assert scale.epoch is not None
    assert scale.epoch.phase is Phase.COMMITTED
    assert load.calls["timeouts"] == 0
    # lease, join, and four steps each; then settled, and the lease's end
    assert load.decided["writes"] == 6 * ranks + MOVES
    assert load.calls["writes"] == 8 * ranks + MOVES
    assert load.decided["reads"] == 3 * ranks
    assert (
        load.decided["events"] == 10 * ranks
    )  # a beginning and four phases; and what the lead sees
    assert scale.decided_s < scale.dump_s + 0.2 + 16 * ranks / RATES.writes


def test_without_turns_many_ranks_drown_the_store() -> None:
    scale = Scale(1024, RATES, replace(SETTINGS, writes_per_s=1e9))
    load = scale.run()
    assert scale.epoch is not None
    assert scale.epoch.phase is Phase.ABORTED
    assert load.decided["timeouts"] > 1024


def test_many_ranks_whose_store_is_late_do_not_drown_it() -> None:
    """Watches that are told of a phase take as much of it as requests do: for some seconds requests
    wait for longer than their clients do. Asked again at once, they would never be fewer."""
    rates = Rates(writes=1000, reads=1200, keeps=1400, events=1350, entries=13_000)
    scale = Scale(4096, rates, Settings(ttl_s=41, store_s=33, writes_per_s=500))
    load = scale.run()
    assert scale.epoch is not None
    assert scale.epoch.phase is Phase.COMMITTED
    assert load.decided["timeouts"] > 100
    assert load.longest_s < 2 * scale.timeout_s


def test_a_keeper_that_is_played_asks_what_a_real_one_asks(etcd: EtcdCluster) -> None:
    ranks = 12
    settings = replace(SETTINGS, ttl_s=120)  # no beat falls into the epoch
    stores = [Etcd(Access(endpoints=etcd.endpoints, timeout_s=20)) for _ in range(ranks)]
    end = time.monotonic() + 60
    # None is missing: a Counter's own answer then is Python, in which another thread may count.
    calls = Counter(dict.fromkeys(("reads", "writes", "keeps", "watches"), 0))
    ends: list[Phase] = []

    def attend(rank: int) -> None:
        keeper = Keeper(stores[rank], KEYS, rank, ranks, QuickTasks(), settings)
        outcome = keeper.take_part(lambda: time.monotonic() > end)
        assert outcome is not None
        ends.append(outcome.epoch.phase)

    threads = [threading.Thread(target=attend, args=(rank,)) for rank in range(ranks)]
    with counted(calls):
        for thread in threads:
            thread.start()
        wait_for(lambda: calls["watches"] == ranks, "keepers that wait")
        store = Etcd(Access(endpoints=etcd.endpoints))
        epochs.begin(store, KEYS, Plan(world=ranks, leave_running=True))
        for thread in threads:
            thread.join()
    for each in (store, *stores):
        each.close()
    assert ends == [Phase.COMMITTED] * ranks
    waiting = {"reads": ranks, "watches": ranks}  # for the epoch
    beginning = {"reads": 1, "writes": 1}
    played = Scale(ranks, RATES, settings).run().calls
    real = calls - Counter(waiting) - Counter(beginning)
    for kind in ("writes", "reads", "watches", "keeps"):
        assert real[kind] == played[kind], (kind, real, played)
