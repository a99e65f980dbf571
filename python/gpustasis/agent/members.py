# SPDX-License-Identifier: Apache-2.0
"""The agent as the keeper of one rank that lives in a container."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from gpustasis import policy
from gpustasis.agent import containers
from gpustasis.agent.config import Config
from gpustasis.criu.find import Criu
from gpustasis.errors import CheckpointError, EngineError, JobError, StoreError
from gpustasis.jobs import epochs, kept
from gpustasis.jobs.contained import (
    FIRST,
    PRE_DUMP,
    Contained,
    ContainedRestore,
    Engine,
    why_over,
)
from gpustasis.jobs.dumps import record_of, seal_of
from gpustasis.jobs.member import Keeper, Settings
from gpustasis.jobs.messages import Limits, Phase
from gpustasis.jobs.place import STATE_DIRECTORY, place_of
from gpustasis.jobs.rank import Context, Options, Part, RankWork, unlock_cuda
from gpustasis.jobs.records import Keys, Plan, number_of
from gpustasis.jobs.stopping import tree_pids
from gpustasis.jobs.store import Put, Store
from gpustasis.jobs.visits import Visit, Visits
from gpustasis.jobs.work import Order
from gpustasis.runtimes import freezer

log = logging.getLogger(__name__)

_AGAIN_S = 1.0
_LOOK_S = 1.0  # how often it is looked whether an epoch is over that this keeper is not in
_RUN = Path(STATE_DIRECTORY)
_ENGINES = Criu(program=Path("criu"), root=None, version=(), origin="the container's engine")


class EnginesPause:
    """A contained.Pause."""

    def __init__(self, container: str) -> None:
        self._container = container
        self._lifted: list[Path] = []

    def lift(self) -> None:
        self._lifted = self._groups()
        for group in reversed(self._lifted):
            freezer.thaw(group)

    def put_back(self) -> None:
        groups, self._lifted = self._lifted, []
        for group in groups:
            freezer.freeze(group)

    def is_on(self) -> bool:
        return bool(self._groups())

    def _groups(self) -> list[Path]:
        try:
            return freezer.frozen_groups(self._container)
        except EngineError:  # it has none that could be frozen, or has ended
            return []


class Member:
    """Of the rank that containers are, one after the other. Raises CheckpointError if another
    keeper is this rank's on this host."""

    def __init__(self, config: Config, store: Store, rank: policy.Rank) -> None:
        self.visits = Visits()
        self._config = config
        self._rank = rank
        self._containers: set[str] = set()
        self._over = threading.Event()
        self._looked: dict[int, float] = {}  # of visits, by criu
        place = place_of(rank.job, rank.rank, config.store / "ranks" / rank.job, _RUN)
        place.make()
        self._held = place.only_keeper()
        limits = Limits(
            look_s=config.jobs_look_limit,
            lock_cuda_s=config.jobs_cuda_limit,
            lock_network_s=config.jobs_network_limit,
            dump_s=config.jobs_dump_limit,
        )
        settings = Settings(limits=limits, ttl_s=round(config.jobs_ttl), store_s=config.jobs_away)
        options = Options(criu=_ENGINES, cuda_timeout_ms=int(config.jobs_cuda_limit * 500))
        self._store, self._keys = store, Keys(rank.job)
        self._named = ", ".join(config.jobs_store) or str(config.jobs_socket)
        self._context = context = Context(place, rank.world, store, self._keys, options)
        work = RankWork(self._part, lambda: context.state.lives)
        self._keeper = Keeper(store, self._keys, rank.rank, rank.world, work, settings)
        threading.Thread(target=self._run, daemon=True, name=self._name).start()

    @property
    def _name(self) -> str:
        return f"job {self._rank.job}, rank {self._rank.rank}"

    def require(self, rank: policy.Rank, container: str) -> None:
        """Raises JobError if this container says something else of the job."""
        if rank.world != self._rank.world:
            raise JobError(
                f"{self._name}: container {container} is one of {rank.world} ranks, and another "
                f"one of {self._rank.world}"
            )
        self._containers.add(container)

    def keep_only(self, containers: set[str]) -> None:
        """Those that are there still."""
        self._containers &= containers

    def stop(self) -> None:
        """As soon as no epoch is under way."""
        self._over.set()

    # What a script wants.

    def arrives(self, visit: Visit) -> None:
        """Have it answered, by and by."""
        if visit.action in FIRST:
            # Before the keeper sees it, which may have the epoch go on at once.
            self._have_epoch(visit)
        self.visits.add(visit)

    def _have_epoch(self, visit: Visit) -> None:
        """Have it be in one; or it is refused."""
        try:
            restores = 0 if visit.action == PRE_DUMP else self._dumped_by(visit)
            visit.epoch = self._epoch(visit, restores)
        except StoreError as exc:
            reason = (
                f"the store {self._named} cannot be reached: {exc}; start it, or name another one: "
                "jobs_store in the agent's configuration"
            )
            visit.answer(yes=False, reason=reason)
        except (CheckpointError, OSError) as exc:
            visit.answer(yes=False, reason=str(exc))

    def look_after(self, visit: Visit) -> None:
        """Refuse it if its epoch is over, and this keeper was not in it."""
        now = time.monotonic()
        if not visit.epoch or now < self._looked.get(visit.criu, 0.0) + _LOOK_S:
            return
        self._looked[visit.criu] = now
        try:
            epoch, _ = epochs.phase(self._store, self._keys, visit.epoch)
        except CheckpointError:
            return  # the keeper knows how long a store may be away
        if epoch.phase.is_final and not self._keeper_is_in(visit.epoch):
            visit.answer(yes=False, reason=why_over(self._context, visit.epoch))

    def _keeper_is_in(self, number: int) -> bool:
        return self._context.state.epoch == number

    def _epoch(self, visit: Visit, restores: int) -> int:
        """The number of the one that this criu is in: one that another rank's has begun, or a new
        one. Raises JobError, StoreError."""
        store, keys = self._store, self._keys
        while True:
            newest = number_of(keys.newest, store.read(keys.newest).entries.get(keys.newest))
            if newest:
                epoch, plan = epochs.phase(store, keys, newest)
                if not epoch.phase.is_final:
                    if plan.restores != restores or epoch.phase is not Phase.LOOK:
                        kind = "a restore" if plan.restores else "a checkpoint"
                        raise JobError(
                            f"epoch {newest}, {kind}, is in phase {epoch.phase} and not decided"
                        )
                    return newest
            plan = Plan(
                world=self._rank.world,
                leave_running=visit.leaves_running or restores > 0,
                restores=restores,
            )
            put = Put(keys.awaited(newest + 1), "1")
            try:
                return epochs.begin(store, keys, plan, number=newest + 1, puts=[put])
            except JobError as exc:  # another rank's criu was first
                log.info("%s: %s", self._name, exc)

    def _dumped_by(self, visit: Visit) -> int:
        """The whole checkpoint of the job that these images are of. Raises JobError, StoreError."""
        size, digest = seal_of(visit.images)
        for found in reversed(kept.all_epochs(self._store, self._keys)):
            if found.is_whole and found.plan.world == self._rank.world:
                record = record_of(found.records[self._rank.rank], f"epoch {found.number}")
                if (record.bytes, record.digest) == (size, digest):
                    return found.number
        raise JobError(
            f"the images of container {visit.container} are of no whole checkpoint of the job"
        )

    # The keeper.

    def _part(self, order: Order) -> Part:
        if order.restores:
            return ContainedRestore(self._context, order, self.visits)
        marks = Path(policy.POLICY_DIRECTORY)
        engine = Engine(ask=self._ask_engine, pause=EnginesPause, marks=marks)
        return Contained(self._context, order, self.visits, engine)

    def _ask_engine(self, order: Order, stop: Callable[[], bool]) -> None:
        """For the container that is this rank now. Raises CheckpointError."""
        if not self._containers:
            raise JobError("it has no container on this node")
        archive = self._context.place.directory / f"epoch-{order.number:08d}.tar"
        failed: list[CheckpointError] = []
        for container in sorted(self._containers):
            try:
                containers.engine_of(container)
            except CheckpointError as exc:  # one that has ended by a checkpoint, say
                failed.append(exc)
                continue
            containers.dump_rank(
                container, self._config, archive, leave_running=order.leave_running, stop=stop
            )
            return
        raise failed[-1]

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                self._unlock_left()
                outcome = self._keeper.take_part(self._over.is_set)
            except (CheckpointError, OSError) as exc:
                log.error("%s: %s", self._name, exc)  # noqa: TRY400 - told in words
                self._over.wait(_AGAIN_S)
                continue
            if outcome is None:
                return
            epoch = outcome.epoch
            what = f"{self._name}, epoch {outcome.number}: {epoch.phase}"
            if epoch.phase is Phase.ABORTED:
                what += f": {epoch.note}"
            if outcome.problem:
                log.error("%s, but: %s", what, outcome.problem)
            else:
                log.info("%s", what)
                self._context.note(epoch=0, images="")
            self.visits.refuse(why_over(self._context, outcome.number), outcome.number)

    def _unlock_left(self) -> None:
        """What an agent before this one has left locked, if no epoch is open. Raises
        CheckpointError."""
        context = self._context
        if not (context.state.cuda or context.state.network) or self._keeper.has_open():
            return
        context.unlock_network()
        if context.state.lives and (wrong := unlock_cuda(tree_pids(context.state.pid))):
            raise JobError(f"{self._name} was left locked: {'; '.join(wrong)}")
        context.note(cuda=False)
