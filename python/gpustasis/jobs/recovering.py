# SPDX-License-Identifier: Apache-2.0
"""What a keeper does between epochs when its job is recovered: it reports that its tasks have
failed, stops them, and waits to be restored. guard.py has what it says to the store meanwhile."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence

from gpustasis.errors import JobError, StoreError
from gpustasis.jobs.ending import Dying, Next
from gpustasis.jobs.evidence import keep_stacks
from gpustasis.jobs.guard import Guard
from gpustasis.jobs.hanging import Watcher
from gpustasis.jobs.lives import Life, Stage, Way
from gpustasis.jobs.rank import Context
from gpustasis.jobs.stopping import stop
from gpustasis.jobs.store import Require
from gpustasis.jobs.work import Order

log = logging.getLogger(__name__)

_ENDS_WITHIN_S = 60.0  # after a signal; whoever sent it may kill it earlier
_AGAIN_S = 0.2
_ALL = 1 << 30  # checkpoints
_NOTICED_S = 0.2  # a keeper looks so often whether its tasks have ended


class Recovering:
    """Of one rank. can_start: there is a command. watcher: looks for hanging tasks; None: nobody
    does."""

    def __init__(
        self,
        context: Context,
        guard: Guard,
        watcher: Watcher | None,
        told: Callable[[str], object],
    ) -> None:
        self._context = context
        self._guard = guard
        self._watcher = watcher
        self._told = told
        self._said: tuple[int, Way] | None = None  # in which life, how far
        self._reported = -1
        self._run = ""
        self._trouble = ""  # of an epoch: the tasks are not as they should be
        self._made: list[float] = []  # when, checkpoints that may be of a job that hangs
        self._known_since = (0, 0.0)  # in which life, and from when on they are known
        self.can_start = False
        self.asked = ""  # why the keeper was told to end
        self._told_at = math.inf  # when it first was, in seconds since 1970
        self._asked_at = 0.0  # when that was first waited for
        self._dying = Dying()
        self._found = 0  # the life of which another keeper has said that tasks are here
        self.ended_well = False  # all ranks have, by themselves
        self.awaits_end = False  # of its tasks: the job has ended, and they have time for it

    def begin(self, *, new: bool, can_start: bool, newest: bool = False) -> bool:
        """Have a seat. Whether the command is to be started: else what is left of an earlier life
        goes first. newest: a job that is started goes on from its newest checkpoint. Raises
        JobError, StoreError."""
        context, self.can_start = self._context, can_start
        if context.state.lives and context.state.life == 0:
            raise JobError(
                f"{context.name} runs, as process {context.state.pid}, and was started without "
                "--restarts: its keeper must be, too"
            )
        # Whoever is this rank's keeper now: tasks of an earlier life must not be beside others.
        self._stop_before(self._guard.newest())
        life = self._guard.begin(new=new, newest=newest, starts=can_start)
        self._run = life.run
        self._require_known(life)
        self._stop_before(life.number)
        found = self._guard.standing(life.number)
        if found is not None:
            self._said = (life.number, found.way)
            self._found = life.number if found.way is Way.HERE else 0
        may_start = can_start and life.stage is Stage.RUNS and not context.state.lives
        if may_start and found is None:
            return self._claim(life)
        if context.state.lives and context.state.life == life.number and found is None:
            self._say(life, Way.HERE)
        return False

    def _stop_before(self, number: int) -> None:
        """Its root may have ended, and not what it has started."""
        state = self._context.state
        if not state.pid or not 0 < state.life < number:
            return
        were_there = self._stop()
        self._guard.say(state.life, Way.STOPPED)
        if were_there:
            self._told(
                f"job {self._context.place.job}: {self._context.name} is stopped: it was of life "
                f"{state.life}, and this is life {number}"
            )

    def _leave(self, life: Life) -> None:
        """To who has begun this life, which is none of this keeper's."""
        before = self._context.state.life
        self._stop()
        if 0 < before < life.number:
            self._guard.say(before, Way.STOPPED)

    def _claim(self, life: Life) -> bool:
        """Before the tasks are made: from then on only this place knows when they have ended."""
        self._context.life = life.number
        return self._say(life, Way.HERE)

    def _require_known(self, life: Life) -> None:
        if self._context.state.life > life.number:
            raise JobError(
                f"job {self._context.place.job}: this rank's tasks are of life "
                f"{self._context.state.life}, and the store says that the job is in life "
                f"{life.number}: the store has lost what it held; the tasks are left as they are. "
                f"If none of them lives, remove {self._context.place.run} and start again"
            )

    def close(self) -> None:
        """The seat is free with it."""
        self._guard.close()

    def enter(self, order: Order) -> None:
        """An epoch was joined: what it makes belongs to the next life if that is what it was begun
        for. That is stored before anything is made. Raises JobError."""
        if self._watcher is not None and self._context.state.lives:
            self._watcher.is_held(self._context.state.pid)
        if not order.restores:
            return
        while True:
            try:
                life = self._guard.read()
                number = life.number
                if life.stage is Stage.RESTORES and life.epoch == order.number:
                    number += 1
                self._context.life = number
                said = self._guard.say(number, Way.HERE)
            except StoreError as exc:
                log.info("%s waits for the store: %s", self._context.name, exc)
                time.sleep(_AGAIN_S)
            else:
                if not said and not order.joined:
                    raise JobError(
                        f"{self._context.name} cannot be restored in life {number}: it has been in "
                        "that life already"
                    )
                self._said = (number, Way.HERE)
                self._found, self._trouble = 0, ""
                return

    def may_checkpoint(self) -> Sequence[Require] | None:
        """For a checkpoint by the clock: what has to hold when it is begun. None: none is begun,
        since the job does not run, or this rank may hang."""
        if self._watcher is not None and self._watcher.is_quiet:
            return None
        return self._guard.as_it_runs()

    def least_kept(self, *, is_made: bool) -> int:
        """How many checkpoints have to stay at least, so that one of them is from before a hang
        that nobody has noticed yet. is_made: one was just committed."""
        if self._watcher is None:
            return 1
        now, life = self._watcher.free_s(), self._guard.life
        if self._known_since[0] != life.number:
            self._known_since = (life.number, now)
        since = now - self._watcher.noticed_after_s
        self._made = [*(made for made in self._made if made > since), *([now] if is_made else [])]
        # What this life came from may have hung already; nor does a new keeper know what was made.
        # And of one that has failed nobody has looked yet which of them are no good.
        is_known = self._known_since[1] <= since and life.stage is Stage.RUNS
        return len(self._made) + 1 if is_known else _ALL

    def has_trouble(self, problem: str) -> None:
        """An epoch has left the tasks as they should not be."""
        self._trouble = problem

    def is_told(self, why: str) -> None:
        """To end. Empty: that counts no more."""
        first = self._told_at if self.asked else time.time()
        self.asked, self._told_at = why, first if why else math.inf

    def has_moved_on(self) -> bool:
        """Whether the job does not wait any more for ranks that were restored."""
        life = self._guard.life
        waits = life.run == self._run and life.stage in {Stage.RESTORES, Stage.RUNS}
        return not waits or bool(self._guard.unseated)

    def is_due(self, *, ended: bool, waits: bool) -> bool:
        """Whether something is to be done before another epoch. ended: the root has. waits: there
        are no tasks yet, until somebody restores the job. If there were some in this life, by what
        is noted here or was said elsewhere, that they have ended is to be said."""
        life, state = self._guard.life, self._context.state
        were_there = self._found == life.number or (state.pid and state.life == life.number)
        waits = waits and not were_there
        if life.run != self._run or life.stage.is_final or self._guard.unseated:
            return True
        if self.asked and ended and life.stage is not Stage.RESTORES:
            return True
        match life.stage:
            case Stage.RUNS if self._is_other(life):
                return True
            case Stage.RUNS:
                failed = ended and not waits and not self._has_said(life, Way.ENDED)
                trouble = bool(self._trouble) and not waits  # else it is of an earlier start
                failed = failed or trouble or self._hangs(ended)
                return failed and self._reported != life.number
            case Stage.LOOKS:
                return not self._has_said(life, Way.LOOKED)
            case Stage.STOPS:
                return not self._has_said(life, Way.STOPPED)
            case _:
                return False

    def _is_other(self, life: Life) -> bool:
        """Whether the tasks, or what was said of them, are of another life."""
        return self._said is not None and self._said[0] != life.number

    def _has_said(self, life: Life, way: Way) -> bool:
        ways = list(Way)
        return (
            self._said is not None
            and self._said[0] == life.number
            and ways.index(self._said[1]) >= ways.index(way)
        )

    def _hangs(self, ended: bool) -> bool:
        watcher = self._watcher
        return watcher is not None and not ended and bool(watcher.look(self._context.state.pid))

    def take(self, status: int | None, *, lived: bool = False) -> Next:
        """Do what is due. status: of the tasks, if they have ended; lived: not all threads
        of their root had. Raises JobError; StoreError: then it is asked again."""
        context, guard = self._context, self._guard
        if guard.unseated:
            self._stop()
            raise JobError(f"{guard.unseated}; its tasks here are stopped")
        life = guard.read()
        if life.run != self._run:
            if self._still_ends():
                time.sleep(_AGAIN_S)
                return Next()
            self._leave(life)
            raise JobError(f"job {context.place.job} was started anew meanwhile")
        self._require_known(life)
        if (lived and self._dying.goes_on(context)) or self._was_told_to_end(life, status):
            return Next()
        match life.stage:
            case Stage.RUNS if self._is_other(life):
                return self._follow(life)
            case Stage.RUNS:
                self._report(life, status)
            case Stage.LOOKS:
                self._look(life)
            case Stage.STOPS | Stage.FAILED if self._still_ends():
                time.sleep(_AGAIN_S)
            case Stage.STOPS:
                self._make_way(life)
            case Stage.FAILED | Stage.DONE:
                self._stop()
                if guard.standing(life.number) is not None:  # else another place may have it
                    self._say(life, Way.STOPPED)  # so that it may be started elsewhere
                is_done = life.stage is Stage.DONE
                self.ended_well = is_done and life.failure is None
                return Next(done=is_done, failed="" if is_done else life.why() or "no reason")
            case _:
                pass
        return Next()

    def _still_ends(self) -> bool:
        """Its tasks were told to end, too, or have agreed with another rank's to do so, and may
        need as long to do it well."""
        state = self._context.state
        if not state.lives or not (
            self.asked or self._asked_at or self._guard.was_told(state.life)
        ):
            return False
        self.awaits_end = bool(self.asked)
        self._asked_at = self._asked_at or time.monotonic()
        return time.monotonic() - self._asked_at < _ENDS_WITHIN_S

    def _was_told_to_end(self, life: Life, status: int | None) -> bool:
        """A job one of whose keepers was told to end is not restored, and has not come to its end
        either, even if its tasks ended well upon that: they may have had more to do. Those of the
        others may have agreed with them to end: they are not stopped at once. Whether that was all
        that was to be done."""
        if not self.asked or life.stage.is_final or life.stage is Stage.RESTORES:
            return False
        if life.stage is Stage.RUNS and self._context.state.lives:
            return False
        if status == 0:  # also if another rank was seen to end before
            self._guard.told(life.number)
        self._guard.give_up(f"{self._context.name}: {self.asked}", self._told_at)
        return True

    def _follow(self, life: Life) -> Next:
        """Another life has begun, and this rank did not come into it by an epoch."""
        context = self._context
        if context.state.lives and context.state.life == life.number:
            self._say(life, Way.HERE)
            return Next()
        self._stop()
        self._trouble = ""
        if life.restored == 0 and self._guard.standing(life.number) is None:
            if self.can_start:
                return Next(start=self._claim(life))
            self._guard.give_up(f"{context.name}: its keeper has no command to start it with")
            return Next()
        self._said = (life.number, Way.HERE)
        self._guard.report(
            life.number, f"{context.name} has no tasks in this life", unnoticed_s=0.0
        )
        return Next()

    def _report(self, life: Life, status: int | None) -> None:
        context, guard, watcher = self._context, self._guard, self._watcher
        if status == 0:  # which an epoch that was under way has taken for trouble
            self._trouble = ""
            self._say(life, Way.ENDED)
            return
        if self._trouble:
            guard.report(life.number, f"{context.name}: {self._trouble}", unnoticed_s=0.0)
        elif watcher is not None and context.state.lives and watcher.reason:
            guard.report(
                life.number,
                f"{context.name} {watcher.reason}",
                unnoticed_s=watcher.silent_s,
                held_s=watcher.held_s,
                hung=True,
                told_at=self._told_at,
            )
        else:
            how = "its status is not known" if status is None else f"with status {status}"
            guard.report(life.number, f"{context.name} has ended, {how}", unnoticed_s=_NOTICED_S)
        self._reported = life.number

    def _look(self, life: Life) -> None:
        keep_stacks(self._context, life)
        self._say(life, Way.LOOKED)

    def _make_way(self, life: Life) -> None:
        """For an epoch that restores."""
        if self._guard.standing(life.number) is None:  # what was before may run where it was
            self._guard.require_none_before(life.number)
        self._stop()
        self._say(life, Way.STOPPED)
        if not life.is_start:
            name = self._context.name
            self._told(f"job {self._context.place.job}: {name} is stopped: {life.why()}")

    def _say(self, life: Life, way: Way) -> bool:
        applied = self._guard.say(life.number, way)
        self._said = (life.number, way)
        return applied

    def _stop(self) -> bool:
        """None of the tasks of any life up to now; whether there were some. Raises JobError if one
        does not end."""
        context = self._context
        if context.gate.is_held():
            raise JobError(
                f"{context.name}: a criu still waits for a decision: end it before its tasks can "
                "be stopped"
            )
        state = context.state
        were_there = stop(state.pid, state.start_time, context.kin.known)
        context.unlock_network()
        context.note(pid=0, cuda=False)
        self._trouble, self._asked_at = "", 0.0
        if self._watcher is not None:
            self._watcher.forget()
        return were_there

    def ended_by(self, epoch: int) -> bool:
        """A checkpoint has ended the tasks, as it should. False: those of an earlier start of the
        job, whose keepers had left it open. Raises JobError."""
        while True:
            try:
                life = self._guard.read()
                if life.run == self._run and self._guard.standing(life.number) is None:
                    return False  # this rank has had no tasks in this start of the job
                self._guard.end(f"ended by the checkpoint of epoch {epoch}", self._run)
                self._stop()
                if self._guard.life.run == self._run:
                    self._say(self._guard.life, Way.STOPPED)
            except StoreError as exc:
                log.info("%s waits for the store: %s", self._context.name, exc)
                time.sleep(_AGAIN_S)
            else:
                return True
