# SPDX-License-Identifier: Apache-2.0
"""A job that is recovered, played: keepers with the code that runs, on hosts whose tasks, stores
and clock are played here, with faults at random. No rank may run twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

from gpustasis.errors import CheckpointError, JobError, StoreError
from gpustasis.jobs import epochs, steering
from gpustasis.jobs.guard import Guard
from gpustasis.jobs.lead import digest_of
from gpustasis.jobs.lives import Terms, Where
from gpustasis.jobs.messages import Phase
from gpustasis.jobs.rank import Context
from gpustasis.jobs.records import Keys, Plan, phase_text, settled_text
from gpustasis.jobs.recovering import Recovering
from gpustasis.jobs.store import Answer, Change, Put, Require, Snapshot, Unreachable
from gpustasis.jobs.tree import Tree
from gpustasis.jobs.work import Order

WORLD = 2
KEYS = Keys("job")
TERMS = Terms(restarts=1000, back_off_s=0.0)
TTL_S = 4
_ANSWER_LOST = 0.03  # of writes: applied, and nobody hears of it


class PlayedWatch:
    """Never waits."""

    def __init__(self, store: PlayedStore, key: str, after: int) -> None:
        self._store, self._key, self._after = store, key, after

    def wait(self, _: float) -> Sequence[Change]:
        """What there is."""
        self._store.reach()
        changes, self._after = self._store.tree.changes(self._key, self._after)
        return changes

    def close(self) -> None:
        """Nothing is held."""


class PlayedStore:
    """A store.Store, as one host reaches it."""

    def __init__(self, tree: Tree, host: Host, random: Random) -> None:
        self.tree = tree
        self._host = host
        self._random = random

    def reach(self) -> None:
        """Raises Unreachable if the host is cut off."""
        if self._host.is_cut:
            raise Unreachable("cut off")

    def read(self, *keys: str) -> Snapshot:
        """As Store.read."""
        self.reach()
        return self.tree.read(keys)

    def write(self, requires: Sequence[Require], puts: Sequence[Put]) -> Answer:
        """As Store.write."""
        self.reach()
        answer = self.tree.write(requires, puts)
        if self._random.random() < _ANSWER_LOST:
            raise Unreachable("no answer")
        return answer

    def grant(self, ttl_s: int) -> int:
        """As Store.grant."""
        self.reach()
        return self.tree.grant(ttl_s)

    def keep(self, lease: int) -> None:
        """As Store.keep."""
        self.reach()
        self.tree.keep(lease)

    def revoke(self, lease: int) -> None:
        """As Store.revoke."""
        self.reach()
        self.tree.revoke(lease)

    def watch(self, key: str, after: int) -> PlayedWatch:
        """As Store.watch."""
        self.reach()
        return PlayedWatch(self, key, after)

    def close(self) -> None:
        """Nothing is held."""


class PlayedGuard(Guard):
    """Without a thread: the player calls turn()."""

    def _serve(self) -> None:
        """Nothing goes on by itself."""

    def crash(self) -> None:
        """Its lease is left to end."""
        self._lease = 0


@dataclass(eq=False)
class Host:
    """Of one rank. pid: of its tasks; 0: there are none. held: the epoch whose criu holds them."""

    rank: int
    where: Where
    pid: int = 0
    life: int = 0
    held: int = 0
    status: int | None = None
    is_cut: bool = False
    is_off: bool = False
    keeper: Recovering | None = None
    guard: PlayedGuard | None = None
    joined: set[int] = field(default_factory=set)
    rests_until: int = 0

    @property
    def runs(self) -> bool:
        return self.pid > 0 and not self.held


class Player:
    """steps: that were taken, to be told if one is wrong. counts: what has come of them."""

    def __init__(self, journal: Path, random: Random, clock: list[float]) -> None:
        self.tree = Tree(journal, lambda: clock[0])
        self.clock = clock
        self.random = random
        self.terms = replace(TERMS, evidence=random.random() < 0.5)
        self.steps: list[str] = []
        self.counts: Counter[str] = Counter()
        self._contexts: dict[Host, Any] = {}
        self._pids, self.tick = 100, 0
        self.hosts = [
            Host(rank, Where(host=f"{name}{rank}", boot=f"{name}{rank}", machine="", run="r"))
            for rank in range(WORLD)
            for name in ("a", "b")
        ]
        self._checkpoint()

    def close(self) -> None:
        self.tree.close()

    def _checkpoint(self) -> None:
        plan = Plan(world=WORLD, leave_running=True)
        number = epochs.begin(cast("Any", self.tree_store()), KEYS, plan)
        self._decide(number, plan, {rank: f"{rank}" for rank in range(WORLD)})

    def tree_store(self) -> PlayedStore:
        """Which always answers."""
        store = PlayedStore(self.tree, self.hosts[0], self.random)
        store.reach = lambda: None  # type: ignore[method-assign]
        store.write = self.tree.write  # type: ignore[method-assign]
        return store

    def _decide(self, number: int, plan: Plan, records: dict[int, str]) -> None:
        text = phase_text(plan, Phase.COMMITTED, digest_of(records))
        written = [Put(KEYS.record(number, rank), one) for rank, one in records.items()]
        self.tree.write([], [*written, Put(KEYS.phase(number), text)])

    # What may happen.

    def step(self) -> None:
        """Anything, and nothing wrong has come of it. Raises AssertionError."""
        self.tick += 1
        host = self.random.choice(self.hosts)
        moves = {
            self._turn: 30,
            self._take: 40,
            self._join: 40,
            self._settle: 40,
            self._start: 20,
            self._pass_time: 6,
            self._crash: 0.7,
            self._kill: 0.6,
            self._power: 0.2,
            self._cut: 0.4,
            self._heal: 1,
            self._commit: 40,
            self._abort: 2,
            self._fence: 1,
        }
        move = self.random.choices(list(moves), list(moves.values()))[0]
        while not move(host):
            host = self.random.choice(self.hosts)
            move = self.random.choices(list(moves), list(moves.values()))[0]
        self.steps.append(f"{move.__name__} {host.where.host}")
        for rank in range(WORLD):
            running = [one.where.host for one in self.hosts if one.rank == rank and one.runs]
            assert len(running) < 2, f"rank {rank} runs on {running}: {self.steps[-60:]}"

    def _turn(self, host: Host) -> bool:
        if host.guard is not None:
            host.guard.turn()
        return host.guard is not None

    def _take(self, host: Host) -> bool:
        if host.keeper is None or host.held:  # first it does what the epoch asks for
            return False
        if not host.keeper.is_due(ended=host.pid == 0, waits=False):
            return False
        try:
            then = host.keeper.take(None if host.pid else host.status)
        except StoreError:
            return True
        except JobError:
            self._close(host)
            return True
        if then.start:
            self._make(host)
        if then.done or then.failed:
            self._close(host)
        return True

    def _make(self, host: Host) -> None:
        assert host.keeper is not None
        assert host.pid == 0, f"{host.where.host} has tasks: {self.steps[-60:]}"
        self._pids += 1
        host.pid, host.life = self._pids, self._contexts[host].life
        host.status = None
        self.counts["made"] += 1

    def _epoch(self) -> tuple[int, Phase, Plan] | None:
        """The newest that restores."""
        store = cast("Any", self.tree_store())
        number = int(self.tree.read([KEYS.newest]).entries[KEYS.newest].value)
        epoch, plan = epochs.phase(store, KEYS, number)
        return (number, epoch.phase, plan) if plan.restores else None

    def _join(self, host: Host) -> bool:
        """Be the rank in an epoch that restores, unless somebody is; and make its tasks."""
        found = self._epoch()
        if found is None or host.keeper is None or host.pid or host.is_cut:
            return False
        number, phase, plan = found
        taken = any(number in one.joined for one in self.hosts if one.rank == host.rank)
        if phase.is_final or taken or host.keeper.is_due(ended=True, waits=False):
            return False
        try:
            host.keeper.enter(Order(number, leave_running=True, restores=plan.restores))
        except JobError:
            self._close(host)
        else:
            host.joined.add(number)
            self._make(host)
            host.held = number
        return True

    def _commit(self, _: Host) -> bool:
        found = self._epoch()
        if found is None or found[1].is_final:
            return False
        number, _phase, plan = found
        if len({one.rank for one in self.hosts if one.held == number}) < WORLD:
            return False
        self._decide(number, plan, {rank: f"{rank}" for rank in range(WORLD)})
        self.counts["committed"] += 1
        return True

    def _abort(self, _: Host) -> bool:
        found = self._epoch()
        if found is None or found[1].is_final:
            return False
        epochs.abort(cast("Any", self.tree_store()), KEYS, found[0], "why not")
        self.counts["aborted"] += 1
        return True

    def _settle(self, host: Host) -> bool:
        """The keeper does what was decided."""
        if not host.held or host.keeper is None or host.is_cut:
            return False
        epoch, _ = epochs.phase(cast("Any", self.tree_store()), KEYS, host.held)
        if not epoch.phase.is_final:
            return False
        if epoch.phase is Phase.ABORTED:
            host.pid = 0
        self.tree.write([], [Put(KEYS.settled(host.held, host.rank), settled_text(""))])
        host.held = 0
        return True

    def guard_of(self, host: Host) -> PlayedGuard:
        """A new one, which has not begun."""
        store = cast("Any", PlayedStore(self.tree, host, self.random))
        place = (store, KEYS, host.rank, WORLD, self.terms, host.where)
        return PlayedGuard(*place, ttl_s=TTL_S, told=lambda _: None)

    def _start(self, host: Host) -> bool:
        if host.keeper is not None or host.is_off or self.tick < host.rests_until:
            return False
        guard = self.guard_of(host)
        keeper = Recovering(self._context(host), guard, None, lambda _: None)
        host.keeper, host.guard = keeper, guard
        has_command = self.random.random() < 0.7
        newest = self.random.random() < 0.5  # else the command is started
        try:
            if keeper.begin(new=has_command, can_start=has_command, newest=newest):
                self._make(host)
        except CheckpointError:
            self._close(host)
        return True

    def _context(self, host: Host) -> Context:
        def note(**words: Any) -> None:
            if words.get("pid") == 0:
                assert host.pid == 0, "tasks were forgotten that live"

        class State:
            """Of the host's tasks."""

            cuda = False
            lives = property(lambda _: host.pid > 0)
            pid = property(lambda _: host.pid)
            life = property(lambda _: host.life)
            start_time = property(lambda _: id(host))

        context = SimpleNamespace(
            name=f"rank {host.rank}",
            place=SimpleNamespace(job="job", rank=host.rank, run=Path("/run/played")),
            state=State(),
            kin=SimpleNamespace(known={}),
            life=0,
            gate=SimpleNamespace(is_held=lambda: bool(host.held)),
            unlock_network=lambda: None,
            note=note,
        )
        self._contexts[host] = context
        return cast("Context", context)

    def stop(self, pid: int, start_time: int, _: object) -> None:
        """As stopping.stop."""
        for host in self.hosts:
            if host.pid == pid and id(host) == start_time:
                assert not host.held, "what criu holds was stopped"
                host.pid = 0
                self.counts["stopped"] += 1

    def _close(self, host: Host) -> None:
        assert host.keeper is not None
        with suppress(CheckpointError):
            host.keeper.close()
        host.keeper = host.guard = None

    def _crash(self, host: Host) -> bool:
        """The keeper; its tasks are left as they are."""
        if host.guard is None:
            return False
        host.guard.crash()
        host.keeper = host.guard = None
        host.rests_until = self.tick + self.random.choice([0, 50, 300])
        return True

    def _kill(self, host: Host) -> bool:
        if not host.runs:
            return False
        status = self.random.choice([137, 137, 137, 137, 0])
        host.pid, host.status = 0, status if host.keeper is not None else None
        return True

    def _power(self, host: Host) -> bool:
        """All that runs on the host ends, criu too; or it is switched off for good."""
        if host.guard is not None:
            self._crash(host)
        host.pid = host.held = 0
        is_last = any(one.is_off for one in self.hosts if one.rank == host.rank)
        host.is_off = self.random.random() < 0.05 and not is_last
        return True

    def _cut(self, host: Host) -> bool:
        host.is_cut = True
        return True

    def _heal(self, host: Host) -> bool:
        was_cut, host.is_cut = host.is_cut, False
        return was_cut

    def _fence(self, host: Host) -> bool:
        """Somebody says so of a rank whose host has no task of it, and makes none: it is true."""
        if any(one.pid for one in self.hosts if one.rank == host.rank):
            return False
        with suppress(JobError):
            steering.fence(cast("Any", self.tree_store()), KEYS, host.rank)
            self.counts["fenced"] += 1
        return True

    def _pass_time(self, _: Host) -> bool:
        self.clock[0] += self.random.choice([0.3, 1.0, 3.0])
        return True
