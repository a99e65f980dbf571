# SPDX-License-Identifier: Apache-2.0
"""One rank from its start to its end: its command, and the epochs that it takes part in."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from gpustasis.errors import CheckpointError, JobError, StoreError, VerificationError
from gpustasis.jobs import cuda, epochs, verified
from gpustasis.jobs.checkpointing import Checkpointing
from gpustasis.jobs.clock import remove_older
from gpustasis.jobs.ending import ENDING, FORWARDED, Early, Ended, Signal
from gpustasis.jobs.member import Keeper, Outcome, Settings
from gpustasis.jobs.messages import Phase
from gpustasis.jobs.preempting import Preempting, Restart, next_to_try
from gpustasis.jobs.rank import Context, Part, RankWork
from gpustasis.jobs.recovering import Recovering
from gpustasis.jobs.restoring import Restoring
from gpustasis.jobs.safe_point import SEAT_VARIABLE
from gpustasis.jobs.spawning import spawn
from gpustasis.jobs.stopping import Orphans, Root, reap
from gpustasis.jobs.work import Order

log = logging.getLogger(__name__)

_AGAIN_S = 0.2  # before a store is asked again that has not answered
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of linux/prctl.h


class Supervisor:
    """told: is called with what happens, in words. preempting: is told of SIGTERM, before the tasks
    are. recovering: the job is restored when it fails; None: it is not. Its descriptors of the
    keeper's lock and of the tasks live as long as it does."""

    def __init__(
        self,
        context: Context,
        settings: Settings,
        told: Callable[[str], object],
        preempting: Preempting | None = None,
        recovering: Recovering | None = None,
    ) -> None:
        self._context = context
        self._told = told
        self._preempting = preempting
        self._restart: Restart | None = None
        self._recovering = recovering
        self._command: tuple[Sequence[str], Mapping[str, str]] | None = None
        self._work = RankWork(self._part, lambda: context.state.lives)
        place = context.place
        self._keeper = Keeper(
            context.store, context.keys, place.rank, context.world, self._work, settings
        )
        self._root, self._orphans = Root(), Orphans()
        self._status: int | None = None
        self._is_asked_to_end = 0  # by which signal, without tasks
        self._signal = Signal(context)
        self._waits_again = False  # for a restore after one that was not verified
        self._has_settled = False  # tasks that are there: all ranks ask for the next restore
        # What criu restores is this process's child then, and its end is seen.
        if ctypes.CDLL(None, use_errno=True).prctl(_SUBREAPER, 1, 0, 0, 0) != 0:
            raise JobError(f"cannot become a subreaper: {os.strerror(ctypes.get_errno())}")

    def start(
        self, command: Sequence[str], environ: Mapping[str, str], early: Early | None = None
    ) -> int:
        """The rank's command, in a session of its own, with nothing open but what it prints to.
        Its pid. What an earlier keeper has left open is done before: while the store is away that
        takes as long, and signals end the keeper. early: holds them from then on.

        Raises JobError, StoreError."""
        while self._keeper.has_open():
            if early is not None:
                early.let_end()
            outcome = self._keeper.take_part(lambda: True)
            if outcome is not None:
                self._tell(outcome)
        if early is not None:
            early.hold()
        return self._start(command, environ)

    def _start(self, command: Sequence[str], environ: Mapping[str, str]) -> int:
        context = self._context
        if context.gate.is_held():
            raise JobError(
                f"{context.name}: a criu still waits for a decision of epoch {context.state.epoch},"
                " and the store knows of none: end that criu before a command is started"
            )
        if context.state.lives:
            raise JobError(
                f"{context.name} runs already, as process {context.state.pid}: give no command to "
                "be its keeper"
            )
        self._unlock_left()
        environ = {k: value for k, value in environ.items() if k != SEAT_VARIABLE}
        if context.options.safe_point_s:
            context.seat.make(anew=True)
            environ[SEAT_VARIABLE] = str(context.seat.path)
        pid = spawn(command, environ, context.place.log)
        context.note(pid=pid, epoch=0, images="", cuda=False, told=0)
        if self._recovering is not None:
            self._recovering.has_trouble("")  # what was before had it
        return pid

    def settle(self) -> bool:
        """Do what an epoch still asks for that an earlier keeper has left. Whether the rank has
        tasks then. Raises JobError, StoreError."""
        while self._keeper.has_open():
            outcome = self._keeper.take_part(lambda: True)
            if outcome is None:
                continue
            try:
                self._tell(outcome)
            except JobError as exc:  # of tasks that are lost: they are restored, or start afresh
                self._told(str(exc))
                self._is_done_with(outcome)
        self._has_settled = self._context.state.lives
        return self._has_settled

    def run(
        self,
        *,
        restoring: bool,
        restart: int = 0,
        command: tuple[Sequence[str], Mapping[str, str]] | None = None,
        early: Early | None = None,
    ) -> Ended:
        """Until the tasks have ended. restoring: there are none yet, and an epoch brings them.
        restart: the checkpoint that is restored as soon as all ranks wait for that; 0: somebody
        else asks for it. command: that starts them again, if the job is recovered. early: what has
        come before. Raises JobError if that epoch was aborted, and what Keeper.take_part raises."""
        waits = restoring and not self._context.state.lives
        recovering = self._recovering
        self._command = command

        def is_over() -> bool:
            ended = self._has_ended()
            if not ended and self._signal.was_outlived() and recovering is not None:
                recovering.is_told("")
            if recovering is not None:
                return recovering.is_due(ended=ended, waits=waits and not self._is_asked_to_end)
            return ended and (not waits or self._is_asked_to_end != 0)

        before = {number: signal.signal(number, self._forward) for number in FORWARDED}
        if self._preempting is not None:
            self._preempting.listens()
        (early or Early()).reach(self._forward)
        try:
            self._unlock_first(is_over)
            self._verify_left(is_over)
            waits = waits or self._has_to_wait_again()
            if restart:
                self._have_restored(restart)
            while True:
                outcome = self._keeper.take_part(is_over)
                if outcome is not None:
                    done = self._after(outcome)
                elif recovering is None:
                    return Ended(epoch=0, status=self._status, told=self._context.told_at > 0)
                else:
                    done = self._recover(recovering)
                if done is not None:
                    return done
                if self._is_asked_to_end and self._context.state.lives:  # an epoch brought them
                    number, self._is_asked_to_end = self._is_asked_to_end, 0
                    self._forward(number, None)
                # Restored tasks may have ended by now: there is nothing to wait for then.
                is_there = self._context.state.lives or (outcome is not None and outcome.is_back)
                waits = self._has_to_wait_again() or (waits and not is_there)
        finally:
            if self._restart is not None:
                self._restart.stop.set()
            # Too late: whoever tells this keeper to end hears from it how it has.
            for number, handler in before.items():
                signal.signal(number, handler if self._preempting is None else signal.SIG_IGN)
            self._root.close()
            reap()

    def _recover(self, recovering: Recovering) -> Ended | None:
        """What its job's life asks of the rank now; None: it goes on. Raises JobError."""
        try:
            lived = not self._has_ended()
            then = recovering.take(None if lived else self._status, lived=lived)
        except StoreError as exc:
            self._await_store(exc)
            return None
        if recovering.awaits_end and self._preempting is not None:
            self._preempting.over()
        if then.start and self._command is not None:
            self._status = None
            pid, place = self._start(*self._command), self._context.place
            self._told(f"job {place.job}, rank {place.rank}: process {pid}, output in {place.log}")
        if then.failed:
            self._told(f"job {self._context.place.job} has failed: {then.failed}")
            is_well = self._context.told_at > 0 and self._status == 0
            return Ended(epoch=0, status=0 if is_well else self._status or JobError.exit_code)
        return Ended(epoch=0, status=0) if then.done else None

    def _await_store(self, exc: StoreError) -> None:
        log.info("%s waits for the store: %s", self._context.name, exc)
        time.sleep(_AGAIN_S)

    def _unlock_left(self) -> None:
        """What a release that failed has left locked, when no epoch is open. Raises JobError."""
        context = self._context
        if context.gate.is_held():
            return  # the tasks stand
        context.unlock_network()
        context.seat.release()
        if context.state.cuda and context.state.lives:
            if wrong := cuda.unlock_tree(context.state.pid):
                raise JobError(f"{context.name} was left locked: {'; '.join(wrong)}")
            context.note(cuda=False)

    def _unlock_first(self, is_over: Callable[[], bool]) -> None:
        """As soon as the store says that nothing is open, which would do it."""
        context = self._context
        while context.state.cuda or context.state.network or context.seat.is_asked():
            try:
                if not self._keeper.has_open():
                    self._unlock_left()
            except StoreError as exc:
                if is_over():
                    return
                self._await_store(exc)
            except CheckpointError as exc:  # the tasks have a keeper all the same
                self._told(str(exc))
                return
            else:
                return

    def _part(self, order: Order) -> Part:
        if self._recovering is not None:
            self._recovering.enter(order)
            if order.restores:
                self._status = None
        return (Restoring if order.restores else Checkpointing)(self._context, order)

    def _tell(self, outcome: Outcome) -> str:
        """What has become of an epoch, in words. Raises JobError if this rank has not done it."""
        name, epoch = f"job {self._context.place.job}, {self._context.name}", outcome.epoch
        note = f": {epoch.note}" if epoch.phase is Phase.ABORTED else ""
        what = f"{name}, epoch {outcome.number}: {epoch.phase}{note}"
        if outcome.problem:
            if self._recovering is None:
                raise JobError(f"{what}, but: {outcome.problem}")
            what += f", but: {outcome.problem}"
            self._recovering.has_trouble(outcome.problem)
        self._is_done_with(outcome)
        self._told(what)
        return what

    def _is_done_with(self, outcome: Outcome) -> None:
        """Nothing of it is left to undo. Of tasks that were brought back before run(), it may say
        yet that the job is not back: that is done there, or by the next keeper."""
        context = self._context
        if not (outcome.is_back and context.options.check and context.state.lives):
            context.note(epoch=0, images="")

    def _after(self, outcome: Outcome) -> Ended | None:
        """What follows from an epoch; None: the tasks run on."""
        epoch = outcome.epoch
        if outcome.is_back and self._context.options.check:
            self._verify(outcome.number, bool(outcome.problem))
            return None
        what = self._tell(outcome)
        if epoch.restores and epoch.phase is Phase.ABORTED and not self._context.state.lives:
            if self._recovering is None:
                raise JobError(f"{what}; nothing was restored")
            return None
        if not epoch.restores and epoch.leave_running:  # aborted: for want of room, perhaps
            is_made, of_life = epoch.phase is Phase.COMMITTED, self._recovering
            least = 1 if of_life is None else of_life.least_kept(is_made=is_made)
            remove_older(self._context, self._told, least)
        if epoch.phase is Phase.COMMITTED and not epoch.leave_running:
            if self._recovering is not None and not self._recovering.ended_by(outcome.number):
                return None
            return Ended(epoch=outcome.number, status=None)
        return None

    def _verify(self, number: int, problem: bool) -> None:
        """The tasks go on if the job is back, else they are killed. Raises VerificationError if it
        is not, and no older checkpoint is waited for; JobError."""
        context, recovering = self._context, self._recovering

        def gives_up() -> bool:
            has_ended = self._is_asked_to_end != 0  # or its tasks have, upon a signal
            has_ended = has_ended or (context.told_at > 0 and not context.state.lives)
            return has_ended or bool(recovering and recovering.has_moved_on())

        because = verified.await_verdict(context, number, problem=problem, gives_up=gives_up)
        if because:
            verified.end_tasks(context)
            reap()
            context.note(pid=0)
        context.note(epoch=0, images="")
        what = f"{context.name}, epoch {number}: {Phase.COMMITTED}"
        if not because:
            self._told(f"{what}, and {'not known to be ' if because is None else ''}verified")
            return
        what += f", but the job is not back: {because}; its tasks were killed"
        if recovering is not None:
            self._told(what)
            recovering.has_trouble(f"the job is not back: {because}")
            return
        if not context.options.older or context.told_at:
            raise VerificationError(what)
        _, plan = epochs.phase(context.store, context.keys, number)
        after = next_to_try(context, plan.restores)
        if not after:
            raise VerificationError(f"{what}; there is no older whole checkpoint")
        awaited = "the same one again" if after == plan.restores else "an older checkpoint"
        self._told(f"{what}; waits for {awaited}")
        self._waits_again = True
        if self._restart is not None or self._has_settled:
            self._have_restored(after)

    def _have_restored(self, epoch: int) -> None:
        self._restart = Restart(self._context, epoch, self._told)
        self._restart.start()

    def _has_to_wait_again(self) -> bool:
        """For a restore, since the last one did not bring the job back. Once."""
        again, self._waits_again = self._waits_again, False
        return again

    def _verify_left(self, is_over: Callable[[], bool]) -> None:
        """An earlier keeper may have ended before the verdict on a restore of the tasks."""
        while self._context.options.check is not None:
            try:
                left = 0 if self._keeper.has_open() else verified.left_open(self._context)
                # Tasks of an earlier life were stopped: nothing is asked of them any more.
                if left and (self._recovering is None or self._context.state.pid):
                    self._verify(left, problem=False)
            except StoreError as exc:
                if is_over():
                    return
                self._await_store(exc)
            else:
                return

    def _has_ended(self) -> bool:
        """Whether the root has, by now; its status is kept."""
        state = self._context.state
        self._orphans.reap(state.pid)
        if state.pid == 0:
            return True
        if not self._root.has_ended(state.pid, state.start_time, lambda: state.lives):
            self._context.kin.look(state.pid)
            return False
        code = None
        if self._recovering is None and self._root.is_held:
            with suppress(ChildProcessError):
                found, status = os.waitpid(state.pid, os.WNOHANG)
                code = os.waitstatus_to_exitcode(status) if found else None
        if code is None:
            # Not collected: its number, and its session's, are no other's until all is stopped.
            code = self._root.status()
        if code is not None:
            self._status = code if code >= 0 else 128 - code
        return True

    def _forward(self, number: int, _: object) -> None:
        pid, ends = self._context.state.pid, number in ENDING
        if ends:
            self._signal.comes(number)
        if self._recovering is not None and ends:
            name = signal.Signals(number).name
            self._recovering.is_told(f"its keeper was told to end, by {name}")
        if not self._context.state.lives:
            if ends:  # as soon as no epoch is under way, which may bring tasks
                self._is_asked_to_end = number
                self._status = 128 + number
        elif number == signal.SIGTERM and self._preempting and self._preempting.told_to_end():
            return
        else:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
