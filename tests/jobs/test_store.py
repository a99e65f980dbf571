# SPDX-License-Identifier: Apache-2.0
"""What the protocol needs of a store, of each of the two."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable

import pytest

from gpustasis.jobs.store import Change, LeaseGone, Put, Require, Store, Watch

NewStore = Callable[[], Store]
SOON_S = 20


def changes_of(watch: Watch, count: int) -> list[Change]:
    deadline = time.monotonic() + SOON_S
    found: list[Change] = []
    while len(found) < count and time.monotonic() < deadline:
        found += watch.wait(0.2)
    return found


def test_what_is_written_is_read(new_store: NewStore, top: str) -> None:
    store = new_store()
    before = store.read(top)
    assert before.entries == {}
    answer = store.write([], [Put(f"{top}a", "1"), Put(f"{top}b", 'ö"\n')])
    assert answer.applied
    assert answer.revision > before.revision
    found = new_store().read(top)
    assert {key: entry.value for key, entry in found.entries.items()} == {
        f"{top}a": "1",
        f"{top}b": 'ö"\n',
    }
    assert {entry.revision for entry in found.entries.values()} == {answer.revision}


def test_several_entries_are_read_at_one_revision(new_store: NewStore, top: str) -> None:
    store = new_store()
    store.write([], [Put(f"{top}a", "1"), Put(f"{top}b/1", "2"), Put(f"{top}b/2", "3")])
    store.write([], [Put(f"{top}bc", "no"), Put(f"{top}c", "no")])
    found = store.read(f"{top}a", f"{top}b/", f"{top}missing")
    assert sorted(found.entries) == [f"{top}a", f"{top}b/1", f"{top}b/2"]


def test_a_transaction_is_applied_whole_or_not_at_all(new_store: NewStore, top: str) -> None:
    store = new_store()
    first = store.write([Require(f"{top}a", 0)], [Put(f"{top}a", "1")])
    assert first.applied
    assert not store.write([Require(f"{top}a", 0)], [Put(f"{top}a", "2")]).applied
    requires = [Require(f"{top}a", first.revision), Require(f"{top}b", first.revision)]
    assert not store.write(requires, [Put(f"{top}a", "3"), Put(f"{top}b", "3")]).applied
    assert {key: e.value for key, e in store.read(top).entries.items()} == {f"{top}a": "1"}
    requires[1] = Require(f"{top}b", 0)
    assert store.write(requires, [Put(f"{top}a", "4"), Put(f"{top}b", "4")]).applied


def test_of_many_who_want_the_same_one_gets_it(new_store: NewStore, top: str) -> None:
    won: list[int] = []
    barrier = threading.Barrier(8)

    def want(number: int) -> None:
        store = new_store()
        barrier.wait()
        if store.write([Require(f"{top}a", 0)], [Put(f"{top}a", str(number))]).applied:
            won.append(number)

    threads = [threading.Thread(target=want, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [new_store().read(f"{top}a").entries[f"{top}a"].value] == [str(won[0])]
    assert len(won) == 1


def test_an_entry_goes_with_its_lease(new_store: NewStore, top: str) -> None:
    store = new_store()
    kept, left = store.grant(4), store.grant(2)
    begin = time.monotonic()
    store.write([], [Put(f"{top}kept", "", kept), Put(f"{top}left", "", left), Put(f"{top}a", "")])
    # For longer than `kept` would last if nobody kept it.
    while f"{top}left" in store.read(top).entries or time.monotonic() < begin + 6:
        assert time.monotonic() < begin + SOON_S
        store.keep(kept)
        time.sleep(0.1)
    assert sorted(store.read(top).entries) == [f"{top}a", f"{top}kept"]
    with pytest.raises(LeaseGone):
        store.keep(left)
    with pytest.raises(LeaseGone):
        store.write([], [Put(f"{top}left", "", left)])
    store.revoke(kept)
    store.revoke(kept)
    assert sorted(store.read(top).entries) == [f"{top}a"]


def test_an_entry_that_is_written_without_its_lease_stays(new_store: NewStore, top: str) -> None:
    store = new_store()
    lease = store.grant(60)
    store.write([], [Put(f"{top}a", "1", lease)])
    store.write([], [Put(f"{top}a", "2")])
    store.revoke(lease)
    assert store.read(f"{top}a").entries[f"{top}a"].value == "2"


def test_a_watch_says_every_change_once_and_in_order(new_store: NewStore, top: str) -> None:
    store, other = new_store(), new_store()
    after = store.write([], [Put(f"{top}w/early", "0")]).revision
    lease = other.grant(60)
    other.write([], [Put(f"{top}w/1", "a", lease)])
    watch = store.watch(f"{top}w/", after)
    other.write([], [Put(f"{top}x", "no")])
    other.write([], [Put(f"{top}w/2", "b"), Put(f"{top}w/3", "c")])
    other.write([], [Put(f"{top}w/2", "d")])
    other.revoke(lease)
    found = changes_of(watch, 5)
    assert [(c.key.removeprefix(top), c.entry and c.entry.value) for c in found] == [
        ("w/1", "a"),
        ("w/2", "b"),
        ("w/3", "c"),
        ("w/2", "d"),
        ("w/1", None),
    ]
    revisions = [change.revision for change in found]
    assert revisions == sorted(revisions)
    assert revisions[0] == after + 1
    assert watch.wait(0.2) == []


def test_a_watch_of_one_entry(new_store: NewStore, top: str) -> None:
    store = new_store()
    watch = store.watch(f"{top}a", store.read(top).revision)
    store.write([], [Put(f"{top}ab", "no")])
    store.write([], [Put(f"{top}a", "yes")])
    assert [change.key for change in changes_of(watch, 1)] == [f"{top}a"]


def test_a_signal_does_not_prolong_a_wait(new_store: NewStore, top: str) -> None:
    """Nor does a handler that takes longer than the rest of it: keepers are told to end so."""
    store, other = new_store(), new_store()
    watch = store.watch(f"{top}w/", store.read(top).revision)
    before = signal.signal(signal.SIGALRM, lambda *_: time.sleep(0.3))
    waker = threading.Timer(SOON_S, lambda: other.write([], [Put(f"{top}w/a", "1")]))
    waker.start()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.15)
        assert watch.wait(0.2) == []
    finally:
        waker.cancel()
        signal.signal(signal.SIGALRM, before)
        watch.close()


def test_a_client_is_closed_with_its_watches(new_store: NewStore, top: str) -> None:
    before = set(threading.enumerate())
    store = new_store()
    store.watch(top, store.read(top).revision)
    store.close()
    left = set(threading.enumerate()) - before
    assert not [thread.name for thread in left if "watch" in thread.name]


def test_many_entries_are_read_at_once(new_store: NewStore, top: str) -> None:
    """As of one revision. etcd takes 128 operations at a time."""
    store = new_store()
    names = [f"{top}many/{number}" for number in range(300)]
    for start in range(0, 300, 100):
        assert store.write([], [Put(name, name) for name in names[start : start + 100]]).applied
    found = store.read(*names, f"{top}none")
    assert {key: entry.value for key, entry in found.entries.items()} == {n: n for n in names}
    assert found.revision == store.read(names[0]).revision


def test_all_that_begin_alike_are_read_at_one_revision(new_store: NewStore, top: str) -> None:
    """etcd is asked for 1,024 at a time: what is written meanwhile is in none of the answers."""
    store = new_store()
    names = [f"{top}many/{number:04}" for number in range(2500)]
    for start in range(0, len(names), 100):
        store.write([], [Put(name, name) for name in names[start : start + 100]])
    over = threading.Event()
    changes: list[str] = []
    some = (names[0], names[1200], names[-1])

    def change(writer: Store) -> None:
        changes.append(str(len(changes)))
        writer.write([], [Put(name, changes[-1]) for name in some])

    def change_on() -> None:
        writer = new_store()
        while not over.is_set():
            change(writer)

    change(store)
    thread = threading.Thread(target=change_on)
    thread.start()
    deadline = time.monotonic() + 3 * SOON_S
    reads = 0
    try:
        while reads < 20 or len(changes) < 20:
            assert time.monotonic() < deadline, (reads, len(changes))
            found = store.read(f"{top}many/").entries
            reads += 1
            assert sorted(found) == names
            assert len({found[name] for name in some}) == 1
    finally:
        over.set()
        thread.join()
