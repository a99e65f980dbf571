# SPDX-License-Identifier: Apache-2.0
"""The lives of a job that is recovered: how it goes from one that has failed to the next one.

One word in the store decides, as for an epoch: the life. Each write of it names the revision that
it replaces, so of two failures one is taken. No rank of a life may live on in the next one: the
tasks of each are stopped, and that is stored, before an epoch brings them back.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from gpustasis.errors import JobError
from gpustasis.jobs.records import MAX_EPOCH, MAX_WORLD, fields_of, note_of
from gpustasis.jobs.store import Entry

_VERSION = 1
_LONGEST_S = 300.0  # between two restores
_MAX_TEXT = 4096
_MAX_S = 1e12  # of any time: with a larger one nothing can be counted


class Stage(StrEnum):
    """Of a life, in order; the last two are the end of the job."""

    RUNS = "runs"
    LOOKS = "looks"  # what is left of it is kept as evidence
    STOPS = "stops"
    RESTORES = "restores"
    DONE = "done"
    FAILED = "failed"

    @property
    def is_final(self) -> bool:
        return self in {Stage.DONE, Stage.FAILED}


class Way(StrEnum):
    """How far a rank is in a life, in order. HERE: its tasks run, or are about to be started.
    ENDED: they have ended, with status 0. STOPPED: there are none, and none of this life can run
    any more."""

    HERE = "here"
    ENDED = "ended"
    LOOKED = "looked"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What all keepers of a job were told. restarts: how often it is restored at most. afresh: it
    starts again where there is no whole checkpoint. evidence: of a failure it is kept. back_off_s:
    before a restore that follows another one without a checkpoint between; it doubles."""

    restarts: int
    afresh: bool = False
    evidence: bool = False
    back_off_s: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What ended a life. rank: whose. at: when that was noticed, in seconds since 1970, by the
    clock of whoever did; unnoticed_s: since when at most it had been so; held_s: how long of that
    epochs held the rank. hung: the ranks live."""

    rank: int
    reason: str
    at: float
    unnoticed_s: float = 0.0
    held_s: float = 0.0
    hung: bool = False

    @property
    def idle_s(self) -> float:
        """How long it could have made progress, and has made none."""
        return self.unnoticed_s - self.held_s

    @property
    def slack_s(self) -> float:
        """Of the last sign of progress: keepers look now and then, and hosts' clocks differ."""
        return min(7.0, 2 + self.idle_s / 10)

    def hung_at(self, moment: float) -> bool:
        """Whether it hung then already, for all that is known."""
        return self.hung and self.at - self.unnoticed_s + self.slack_s < moment


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """run: unlike that of any other start of the job. begun: restarts that have begun. in_a_row:
    those of them since a checkpoint was restored that had not failed. epoch: that keeps the
    evidence, or restores; 0: none yet. restored: the checkpoint that is or was brought back; 0:
    none. ended: the newest epoch when all ranks had ended well, in this start of the job or an
    earlier one; 0: they never have."""

    run: str
    number: int
    stage: Stage
    world: int
    terms: Terms
    begun: int = 0
    in_a_row: int = 0
    epoch: int = 0
    restored: int = 0
    ended: int = 0
    failure: Failure | None = None
    revision: int = 0

    @property
    def is_start(self) -> bool:
        """Whether the job waits for its first restore, and nothing of it has failed yet."""
        return self.begun == 0 and self.stage in {Stage.STOPS, Stage.RESTORES}

    def back_off_s(self) -> float:
        """From the failure until the job is restored."""
        if self.in_a_row < 2:
            return 0.0
        return float(min(_LONGEST_S, self.terms.back_off_s * 2 ** min(self.in_a_row - 2, 20)))

    def why(self) -> str:
        return self.failure.reason if self.failure else ""

    def failed(self, failure: Failure, *, looks: bool = True) -> Life:
        """After a failure: the tasks are stopped, and restored as often as is allowed. looks: they
        are worth a look before."""
        again = replace(
            self, failure=failure, epoch=0, begun=self.begun + 1, in_a_row=self.in_a_row + 1
        )
        if self.begun >= self.terms.restarts:
            reason = failure.reason
            if self.terms.restarts:
                reason += f"; it was restarted {self.begun} times already"
            return self.given_up(replace(failure, reason=reason))
        return replace(again, stage=Stage.LOOKS if looks and self.terms.evidence else Stage.STOPS)

    def given_up(self, failure: Failure, told_at: float = math.inf) -> Life:
        """Its tasks are stopped, for good. That they hung stays known, unless they did since a
        keeper was told to end: at this time, in seconds since 1970."""
        before = self.failure
        if before is not None and before.hung and self.stage in {Stage.LOOKS, Stage.STOPS}:
            reason = failure.reason
            if before.reason not in reason:
                reason += f"; {before.reason}"
            failure = replace(before, reason=reason, hung=before.hung_at(told_at))
        return replace(self, stage=Stage.FAILED, failure=failure)

    def restoring(self, epoch: int, checkpoint: int, *, is_marked: bool = False) -> Life:
        """is_marked: the checkpoint has failed before."""
        in_a_row = self.in_a_row if is_marked or checkpoint == self.restored else 1
        return replace(
            self, stage=Stage.RESTORES, epoch=epoch, restored=checkpoint, in_a_row=in_a_row
        )

    def next(self) -> Life:
        """It runs again."""
        return replace(self, number=self.number + 1, stage=Stage.RUNS, epoch=0, failure=None)

    def not_back(self, failure: Failure) -> Life:
        """The epoch was committed, and a rank has said that it is not back."""
        return self.next().failed(failure, looks=False)

    def done(self, newest: int) -> Life:
        """All ranks have ended well. newest: the newest epoch."""
        return replace(self, stage=Stage.DONE, ended=newest)

    def not_restored(self, failure: Failure) -> Life:
        """The epoch was aborted. What it had made may be left somewhere: it is another life."""
        return replace(self, number=self.number + 1).failed(failure, looks=False)

    def to_text(self) -> str:
        value = asdict(self) | {"version": _VERSION}
        del value["revision"]
        if self.failure is not None:
            value["failure"]["reason"] = note_of(self.failure.reason)
        return json.dumps(value)


_LIFE = [name for name in Life.__dataclass_fields__ if name != "revision"]


def life_of(key: str, entry: Entry) -> Life:
    """Raises JobError."""
    value = fields_of(key, entry, "version", *(name for name in _LIFE if name != "ended"), ended=0)
    del value["version"]
    try:
        failure = value.pop("failure")
        life = Life(
            **value | {"stage": Stage(value["stage"]), "terms": Terms(**value["terms"])},
            failure=None if failure is None else Failure(**failure),
            revision=entry.revision,
        )
        _require_numbers(life)
        _require_terms(life.terms)
        if life.failure is not None:
            _require_failure(life.failure)
        elif life.stage not in {Stage.RUNS, Stage.DONE}:
            raise ValueError(f"there is no failure, and it is at {life.stage}")
    except (TypeError, ValueError) as exc:
        raise JobError(f"{key} cannot be used: {exc}") from exc
    return life


def _require_numbers(life: Life) -> None:
    if not isinstance(life.run, str) or not 0 < len(life.run) <= _MAX_TEXT:
        raise ValueError("run is no text")
    for name in ("number", "begun", "in_a_row", "epoch", "restored", "ended"):
        if type(getattr(life, name)) is not int or not 0 <= getattr(life, name) <= MAX_EPOCH:
            raise ValueError(f"{name} is no number")
    if type(life.world) is not int or not 1 <= life.world <= MAX_WORLD:
        raise ValueError(f"world must be 1 to {MAX_WORLD}")


def _require_terms(terms: Terms) -> None:
    if type(terms.restarts) is not int or terms.restarts < 0:
        raise ValueError("restarts is no number")
    if type(terms.afresh) is not bool or type(terms.evidence) is not bool:
        raise ValueError("afresh or evidence is neither true nor false")
    if not isinstance(terms.back_off_s, int | float) or not 0 <= terms.back_off_s < _MAX_S:
        raise ValueError("back_off_s is no number")


def _require_failure(failure: Failure) -> None:
    if type(failure.rank) is not int or not isinstance(failure.reason, str):
        raise ValueError("failure has no rank or reason")
    for one in (failure.at, failure.unnoticed_s, failure.held_s):
        if not isinstance(one, int | float) or not -_MAX_S < one < _MAX_S:  # nor is NaN
            raise ValueError("failure has no time")
    if type(failure.hung) is not bool:
        raise ValueError("hung is neither true nor false")


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Where a keeper of a rank is. boot: of its host, as the kernel names it. machine: with the
    host's name the host itself, through boots; empty: it cannot be told. run: where the keeper
    notes which tasks there are, and sees them."""

    host: str
    boot: str
    machine: str
    run: str

    def is_mine(self, mine: Where) -> bool:
        """Whether a keeper here that finds no task of the rank knows that none is left there."""
        if self.boot == mine.boot:
            return self.run == mine.run
        # It was booted again. Boards of one kind may all have the same UUID.
        is_known = self.machine != "" and self.host != ""
        return is_known and (self.machine, self.host) == (mine.machine, mine.host)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Of one rank in one life. by: who said it: "keeper", or "fence" for a person, or a program,
    that has made sure of it."""

    way: Way
    where: Where
    by: str = "keeper"
    revision: int = 0

    @property
    def may_run(self) -> bool:
        """Whether nobody has said that its tasks have ended."""
        return self.way in {Way.HERE, Way.LOOKED}


def standing_text(standing: Standing) -> str:
    """The value of its key."""
    value = asdict(standing) | {"version": _VERSION}
    del value["revision"]
    return json.dumps(value)


def standing_of(key: str, entry: Entry) -> Standing:
    """Raises JobError."""
    value = fields_of(key, entry, "version", "way", "where", "by")
    try:
        return Standing(
            way=Way(value["way"]),
            where=_where(value["where"]),
            by=str(value["by"])[:_MAX_TEXT],
            revision=entry.revision,
        )
    except (TypeError, ValueError) as exc:
        raise JobError(f"{key} cannot be used: {exc}") from exc


def keeper_text(name: str, where: Where, *, starts: bool = True) -> str:
    """name: of the keeper, unlike every other one. starts: it has a command."""
    return json.dumps({"version": _VERSION, "name": name, "where": asdict(where), "starts": starts})


def keeper_starts(key: str, entry: Entry) -> bool:
    """Whether it can start its rank. Raises JobError."""
    return _keeper_fields(key, entry)["starts"] is True


def keeper_of(key: str, entry: Entry) -> tuple[str, Where]:
    """Raises JobError."""
    value = _keeper_fields(key, entry)
    try:
        return str(value["name"]), _where(value["where"])
    except (TypeError, ValueError) as exc:
        raise JobError(f"{key} cannot be used: {exc}") from exc


def _keeper_fields(key: str, entry: Entry) -> dict[str, Any]:
    return fields_of(key, entry, "version", "name", "where", starts=True)


def _where(value: Mapping[str, Any]) -> Where:
    where = Where(**value)
    if not all(isinstance(one, str) and len(one) <= _MAX_TEXT for one in asdict(where).values()):
        raise ValueError("where is no text")
    return where


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """What ended a life, and what came of it. seconds: from when the failure was noticed until all
    ranks ran again. epoch: that brought them back; 0: they were started afresh. restored: the
    checkpoint."""

    life: int
    rank: int
    reason: str
    at: float
    unnoticed_s: float
    seconds: float
    epoch: int
    restored: int


def recovery_text(recovery: Recovery) -> str:
    """The value of its key."""
    return json.dumps(asdict(recovery) | {"version": _VERSION})


def recovery_of(key: str, entry: Entry) -> Recovery:
    """Raises JobError."""
    value = fields_of(key, entry, "version", *Recovery.__dataclass_fields__)
    del value["version"]
    for name, found in value.items():
        wanted = str if name == "reason" else (int, float)
        is_wanted = isinstance(found, wanted) and not isinstance(found, bool)
        if not is_wanted or (name != "reason" and not -_MAX_S < found < _MAX_S):
            raise JobError(f"{key}: {name} {found!r} cannot be used")
    return Recovery(**value)
