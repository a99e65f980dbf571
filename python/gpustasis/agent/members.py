# SPDX-License-Identifier: Apache-2.0
"""The agent as the keeper of one rank that lives in a container."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection
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
from gpustasis.jobs.cuda import unlock_cuda
from gpustasis.jobs.dumps import record_of, seal_of
from gpustasis.jobs.member import Keeper, Settings
from gpustasis.jobs.messages import Limits, Phase
from gpustasis.jobs.network import Lock
from gpustasis.jobs.pace import Pace
from gpustasis.jobs.place import STATE_DIRECTORY, Place, place_of
from gpustasis.jobs.rank import Context, Options, Part, RankWork
from gpustasis.jobs.records import Keys, Plan, number_of
from gpustasis.jobs.stopping import tree_pids
from gpustasis.jobs.store import Put, Store
from gpustasis.jobs.visits import Visit, Visits
from gpustasis.jobs.work import Order
from gpustasis.runtimes import freezer

log = logging.getLogger(__name__)

_AGAIN_S = 1.0
_LOOK_S = 1.0  # how often it is looked whether an epoch is over that this keeper is not in
_END_S = 2.0  # for a keeper that waits for nothing
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
    keeper is this rank's on this host.

    container: the first that is known. leave: asked when nothing needs this keeper; it closes it,
    or finds that something does. A keeper that stays would take the rank's place from the one where
    its next container is, maybe on another host. visitors: scripts that wait, or are about to;
    whoever counts them sees to it that leave is not under way.
    """

    def __init__(
        self,
        config: Config,
        store: Store,
        rank: policy.Rank,
        container: str,
        leave: Callable[[Member], bool],
    ) -> None:
        self.visits = Visits()
        self.visitors = 0
        self._config = config
        self._rank = rank
        self._leave = leave
        self._containers = {container}
        self._asked: dict[str, int] = {}  # containers whose engines were asked, and for what epoch
        self._ended = 0  # the epoch that this keeper was in last
        self._over = threading.Event()
        place = _place_of(config, rank)
        place.make()
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
        self._held = place.only_keeper()
        try:
            self._context = context = Context(place, rank.world, store, self._keys, options)
        except CheckpointError:
            self.close()
            raise
        if context.state.lives:  # what is left locked is so in their network
            context.lock = Lock(rank.job, rank.rank, context.state.pid)
            if context.state.network:
                context.lock.hold()
        work = RankWork(self._part, lambda: context.state.lives)
        self._keeper = Keeper(store, self._keys, rank.rank, rank.world, work, settings)
        before = Pace(rank.rank, rank.world, settings.writes_per_s).limits(limits)
        self._patience_s = settings.ttl_s + settings.store_s + before.look_s
        self._patience_s += before.lock_cuda_s + before.lock_network_s
        self._asks = place.run / "asks"  # names the container whose engine is being asked
        if self._asks.exists():
            threading.Thread(target=self._resume_left, daemon=True).start()
        self._thread = threading.Thread(target=self._run, daemon=True, name=self._name)
        self._thread.start()

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
        if self.stops:
            raise JobError(f"{self._name}: its keeper is about to end; try again")
        self._containers.add(container)

    @property
    def known(self) -> frozenset[str]:
        """Containers that are this rank, as they say."""
        return frozenset(self._containers)

    @property
    def stops(self) -> bool:
        """After stop()."""
        return self._over.is_set()

    def drop(self, ended: Collection[str]) -> None:
        """Containers that have no process."""
        self._containers.difference_update(ended)

    @property
    def is_needed(self) -> bool:
        return bool(self.visitors or self._containers)

    def is_of_another_world(self, rank: policy.Rank, container: str) -> bool:
        """And none of its containers runs any more."""
        if rank.world == self._rank.world:
            return False
        return not (self.visitors or containers.running(self._containers - {container}))

    def stop(self) -> None:
        """As soon as no epoch is under way."""
        self._over.set()

    def has_stopped(self) -> bool:
        """Whether it has, after a moment."""
        self._thread.join(_END_S)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Another one may be this rank's keeper. It has stopped, or is about to."""
        os.close(self._held)

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
            self._require_only(visit.container)
            restores = 0
            if visit.action == PRE_DUMP:
                self._require_in_time(visit.container)
            else:
                restores = self._dumped_by(visit)
            visit.epoch = self._epoch(visit, restores)
            visit.since = time.monotonic()
        except StoreError as exc:
            reason = (
                f"the store {self._named} cannot be reached: {exc}; start it, or name another one: "
                "jobs_store in the agent's configuration"
            )
            visit.answer(yes=False, reason=reason)
        except (CheckpointError, OSError) as exc:
            visit.answer(yes=False, reason=str(exc))

    def _require_only(self, container: str) -> None:
        """Raises JobError if there is another one: nobody could say which of them is the rank."""
        if others := containers.running(self._containers - {container}):
            raise JobError(
                f"{self._name}: container {container} and {' and '.join(sorted(others))}, which "
                "runs, say that they are this rank: a rank is one container"
            )

    def _require_in_time(self, container: str) -> None:
        """Raises JobError if its engine was asked for an epoch that is over: whoever had begun that
        one was told that every rank runs on."""
        if asked := self._asked.get(container):
            epoch, _ = epochs.phase(self._store, self._keys, asked)
            if epoch.phase.is_final:
                raise JobError(f"the engine has begun too late: {why_over(self._context, asked)}")

    def look_after(self, visit: Visit) -> None:
        """Refuse it if its epoch is over, and this keeper was not in it; or if neither has come
        about for so long that something is wrong here, or with the store."""
        now = time.monotonic()
        if not visit.epoch or now < visit.looked + _LOOK_S or self._keeper_is_in(visit.epoch):
            return
        visit.looked = now
        try:
            epoch, _ = epochs.phase(self._store, self._keys, visit.epoch)
            if epoch.phase.is_final:
                visit.answer(yes=False, reason=why_over(self._context, visit.epoch))
            elif now > visit.since + self._patience_s:
                reason = f"{self._name}: its keeper has not come to epoch {visit.epoch}"
                visit.answer(yes=False, reason=reason)
                epochs.abort(self._store, self._keys, visit.epoch, reason)
        except CheckpointError as exc:  # the keeper, if it is in it, knows how long that may be
            if now > visit.since + self._patience_s:
                visit.answer(yes=False, reason=f"epoch {visit.epoch} is given up: {exc}")

    def _keeper_is_in(self, number: int) -> bool:
        """Then it answers: there may be something to undo."""
        return self._context.state.epoch == number and self._ended != number

    def _epoch(self, visit: Visit, restores: int) -> int:
        """The number of the one that this criu is in: one that another rank's has begun, or a new
        one. Raises JobError, StoreError."""
        store, keys = self._store, self._keys
        tried = -1
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
            except JobError as exc:  # another rank's criu was first, if there is a newer one now
                if tried == newest:
                    raise
                tried = newest
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
        here = sorted(containers.running(self._containers))
        if not here:
            raise JobError("it has no container on this node that runs")
        container = here[0]
        self._require_only(container)
        archive = self._context.place.directory / f"epoch-{order.number:08d}.tar"
        self._asked[container] = order.number
        self._asks.write_text(container)
        try:
            containers.dump_rank(
                container, self._config, archive, leave_running=order.leave_running, stop=stop
            )
        finally:
            self._asks.unlink(missing_ok=True)
            del self._asked[container]

    def _resume_left(self) -> None:
        """The engine's call was cut off with the agent before this one: it leaves the container
        paused, and what is locked cannot be unlocked before that has ended."""
        while not self._over.is_set():
            container = self._asks.read_text()
            try:
                if containers.running({container}):
                    containers.resume_rank(container, self._config)
                self._asks.unlink(missing_ok=True)
            except (CheckpointError, OSError) as exc:
                log.error("%s: %s", self._name, exc)  # noqa: TRY400 - told in words
                self._over.wait(_AGAIN_S)
            else:
                return

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                self._unlock_left()
                outcome = self._keeper.take_part(lambda: self._over.is_set() or not self.is_needed)
            except Exception as exc:  # whatever it is, the rank has a keeper
                ours = isinstance(exc, CheckpointError | OSError)
                log.error("%s: %s", self._name, exc, exc_info=not ours)  # noqa: TRY400 - or in words
                self._over.wait(_AGAIN_S)
                continue
            if outcome is None:
                if self._has_left():
                    self._over.wait(_AGAIN_S)
                elif self._over.is_set() or self._leave(self):
                    return
                continue
            epoch = outcome.epoch
            what = f"{self._name}, epoch {outcome.number}: {epoch.phase}"
            if epoch.phase is Phase.ABORTED:
                what += f": {epoch.note}"
            if outcome.problem:
                log.error("%s, but: %s", what, outcome.problem)
            else:
                log.info("%s", what)
                self._context.note(epoch=0, images="")
            self._ended = outcome.number
            self.visits.refuse(why_over(self._context, outcome.number), outcome.number)

    def _has_left(self) -> bool:
        """Whether there may be something of an epoch to do, which only the store knows."""
        if not self._context.state.epoch:
            return False
        try:
            return self._keeper.has_open()
        except CheckpointError:
            return True

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


def has_left(config: Config, rank: policy.Rank) -> bool:
    """Whether an agent before this one may not have come to the end of an epoch. Raises
    JobError."""
    return _place_of(config, rank).load().epoch != 0


def _place_of(config: Config, rank: policy.Rank) -> Place:
    return place_of(rank.job, rank.rank, config.store / "ranks" / rank.job, _RUN)
