# SPDX-License-Identifier: Apache-2.0
"""What is stored of a job, and where. Whatever is read is checked: others write there too.

TOP/NAME/newest               the number of the newest epoch
TOP/NAME/ranks/R              the epoch that rank R has joined last
TOP/NAME/epochs/E/phase       the epoch: the one word that decides
TOP/NAME/epochs/E/members/R   how far rank R says it has come, for as long as its lease lives
TOP/NAME/epochs/E/records/R   the record of its dump
TOP/NAME/epochs/E/settled/R   it has done what was decided
TOP/NAME/epochs/E/pruned      its dumps are removed, or are about to be
TOP/NAME/epochs/E/drained/R   the dump of rank R is on a disk (on_disk.py)
TOP/NAME/epochs/E/said/...    how the ranks have agreed on a safe point (safe_point.py)
TOP/NAME/epochs/E/back        the restored job is back, or not (verified.py)
TOP/NAME/epochs/E/unverified  of a checkpoint: why it did not bring the job back
TOP/NAME/epochs/E/evidence    it holds a job that had failed: never restored unless it is named
TOP/NAME/epochs/E/awaited     its ranks are containers, whose engines were asked one by one
TOP/NAME/epochs/E/in-between  by the clock: a rank's dump may be built on its last one (parents.py)
TOP/NAME/addresses/R          where rank R is, so that the others know whose connections are whose

Of a job that is recovered (lives.py):

TOP/NAME/life                 the life that the job is in: the one word that decides
TOP/NAME/told                 the last life in which a rank's tasks ended well upon a signal
TOP/NAME/lives/L/R            how far rank R is in life L
TOP/NAME/keepers/R            the keeper of rank R, for as long as its lease lives
TOP/NAME/recoveries/L         what ended life L, and how long it took until the job ran again
TOP/NAME/starts/L             the same of life L in which nothing had run: the job was started
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from gpustasis.errors import JobError
from gpustasis.jobs.messages import Epoch, Phase, Step
from gpustasis.jobs.store import MAX_VALUE_BYTES, Entry
from gpustasis.jobs.work import Excuse

TOP = "/gpustasis/jobs"
MAX_WORLD = 1 << 20
MAX_EPOCH = 10**8 - 1
MAX_NOTE = 4096  # characters
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one job. Raises JobError if it may not have this name."""

    job: str
    top: str = TOP

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.job):
            raise JobError(
                f"job name {self.job!r}: must be 1 to 128 letters, digits, '.', '_' and '-'"
            )

    @property
    def newest(self) -> str:
        return f"{self.top}/{self.job}/newest"

    def rank(self, rank: int) -> str:
        return f"{self.top}/{self.job}/ranks/{rank}"

    def epoch(self, number: int) -> str:
        """The beginning of its keys."""
        return f"{self.top}/{self.job}/epochs/{number:08d}/"

    def phase(self, number: int) -> str:
        return f"{self.epoch(number)}phase"

    def member(self, number: int, rank: int) -> str:
        return f"{self.epoch(number)}members/{rank}"

    def record(self, number: int, rank: int) -> str:
        return f"{self.epoch(number)}records/{rank}"

    def pruned(self, number: int) -> str:
        return f"{self.epoch(number)}pruned"

    def drained(self, number: int, rank: int) -> str:
        return f"{self.epoch(number)}drained/{rank}"

    def round(self, number: int, name: str) -> str:
        """The beginning of the keys of what the ranks say in one round of a safe point."""
        return f"{self.epoch(number)}said/{name}/"

    def said(self, number: int, name: str, rank: int) -> str:
        return f"{self.round(number, name)}{rank}"

    def largest(self, number: int, name: str) -> str:
        return f"{self.epoch(number)}said/largest-{name}"

    def addresses(self, rank: int) -> str:
        return f"{self.top}/{self.job}/addresses/{rank}"

    def settled(self, number: int, rank: int) -> str:
        return f"{self.epoch(number)}settled/{rank}"

    def evidence(self, number: int) -> str:
        return f"{self.epoch(number)}evidence"

    def awaited(self, number: int) -> str:
        return f"{self.epoch(number)}awaited"

    def in_between(self, number: int) -> str:
        """Of a checkpoint by the clock: when it was begun, in seconds since 1970."""
        return f"{self.epoch(number)}in-between"

    def said_by(self, kind: str, rank: int | None = None) -> str:
        """What a rank has said beside epochs, "ended" or "waiting" (preempting.py); None: the
        beginning of those of all ranks."""
        return f"{self.top}/{self.job}/{kind}/{'' if rank is None else rank}"

    @property
    def told(self) -> str:
        """The last life in which tasks of any rank ended well upon a signal. One key: all ranks
        read it, and again and again."""
        return f"{self.top}/{self.job}/told"

    @property
    def life(self) -> str:
        return f"{self.top}/{self.job}/life"

    def in_life(self, number: int, rank: int | None = None) -> str:
        """Of a rank; None: the beginning of those of all ranks."""
        return f"{self.top}/{self.job}/lives/{number:08d}/{'' if rank is None else rank}"

    def keeper(self, rank: int | None = None) -> str:
        """As in_life."""
        return f"{self.top}/{self.job}/keepers/{'' if rank is None else rank}"

    def recovery(self, number: int | None = None) -> str:
        """Of the end of a life; None: the beginning of all."""
        return f"{self.top}/{self.job}/recoveries/{'' if number is None else f'{number:08d}'}"

    def started(self, number: int) -> str:
        """Of a life in which the job was started, from a checkpoint or afresh."""
        return f"{self.top}/{self.job}/starts/{number:08d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What stays the same of an epoch. world: how many ranks must be in it. restores: the epoch
    that it brings back; 0: it is a checkpoint."""

    world: int
    leave_running: bool
    restores: int = 0


def note_of(text: str) -> str:
    """An error, say, in one line: it is shown in tables, and within other errors."""
    lines = (line.strip() for line in text.split("\n"))
    return "; ".join(line for line in lines if line)[:MAX_NOTE]


def phase_text(plan: Plan, phase: Phase, note: str = "") -> str:
    """The value of the phase key."""
    return json.dumps(
        {
            "version": _VERSION,
            "phase": phase,
            "world": plan.world,
            "leave_running": plan.leave_running,
            "restores": plan.restores,
            "note": note_of(note),
        }
    )


def epoch_of(key: str, entry: Entry) -> tuple[Epoch, Plan]:
    """Raises JobError."""
    value = fields_of(key, entry, "version", "phase", "world", "leave_running", "restores", "note")
    phase, world, leave, note = (value[n] for n in ("phase", "world", "leave_running", "note"))
    restores = value["restores"]
    if not isinstance(world, int) or isinstance(world, bool) or not 1 <= world <= MAX_WORLD:
        raise JobError(f"{key}: world {world!r}: must be 1 to {MAX_WORLD}")
    if not isinstance(leave, bool) or not isinstance(note, str) or len(note) > MAX_NOTE:
        raise JobError(f"{key}: leave_running or note is not what it should be")
    if phase not in list(Phase):
        raise JobError(f"{key}: phase {phase!r} is not known")
    if type(restores) is not int or not 0 <= restores <= MAX_EPOCH or (restores and not leave):
        raise JobError(f"{key}: restores {restores!r}: no epoch, or its job would not run on")
    plan = Plan(world=world, leave_running=leave, restores=restores)
    return Epoch(Phase(phase), entry.revision, leave, note, restores), plan


def member_text(step: Step, keeper: str) -> str:
    """keeper: who runs the rank's side, unlike every other one."""
    return json.dumps({"version": _VERSION, "step": step, "keeper": keeper})


def member_of(key: str, entry: Entry) -> tuple[Step, str]:
    """Raises JobError."""
    value = fields_of(key, entry, "version", "step", "keeper")
    if value["step"] not in list(Step) or not isinstance(value["keeper"], str):
        raise JobError(f"{key}: step {value['step']!r} is not known")
    return Step(value["step"]), value["keeper"]


def storable(record: str) -> str:
    """A record. Raises JobError if no store would take it: its rank would be bound, and stay so."""
    try:
        size = len(record.encode())
    except UnicodeEncodeError as exc:
        raise JobError(f"the dump's record is not UTF-8: {exc}") from exc
    if size > MAX_VALUE_BYTES:
        raise JobError(f"the dump's record has {size} bytes: at most {MAX_VALUE_BYTES}")
    return record


def settled_text(problem: str, excuse: Excuse = Excuse.NONE) -> str:
    """problem: what went wrong with what was decided, and its excuse."""
    value = {"version": _VERSION, "problem": note_of(problem)}
    return json.dumps(value | ({"excuse": excuse} if excuse else {}))


def settled_of(key: str, entry: Entry) -> str:
    """What went wrong; empty: nothing. Raises JobError."""
    return settlement_of(key, entry)[0]


def settlement_of(key: str, entry: Entry) -> tuple[str, Excuse]:
    """The same, and its excuse. Raises JobError."""
    value = fields_of(key, entry, "version", "problem", excuse="")
    problem, excuse = value["problem"], value["excuse"]
    if not isinstance(problem, str) or not isinstance(excuse, str):
        raise JobError(f"{key}: problem or excuse is no text")
    # A newer build may know more of them: none is held against the checkpoint.
    return problem, Excuse(excuse) if excuse in list(Excuse) else Excuse.OTHER


def addresses_of(key: str, entry: Entry) -> dict[str, Any]:
    """Where a rank has said that it is: `host`, `addresses`. Raises JobError."""
    try:
        value = json.loads(entry.value)
        if not isinstance(value["host"], str) or not isinstance(value["addresses"], list):
            raise TypeError("host is no text, or addresses no list")
    except (ValueError, KeyError, TypeError, RecursionError) as exc:
        raise JobError(f"{key} cannot be used: {exc!r}") from exc
    return dict(value)


def number_of(key: str, entry: Entry | None) -> int:
    """The epoch that is named there; 0: none. Raises JobError."""
    if entry is None:
        return 0
    if not re.fullmatch(r"[1-9][0-9]{0,7}", entry.value):
        raise JobError(f"{key}: {entry.value[:20]!r} is no number of an epoch")
    return int(entry.value)


def usable_number(key: str, entry: Entry | None) -> int:
    """The same; 0 also if what is there cannot be used: others write there, too."""
    try:
        return number_of(key, entry)
    except JobError:
        return 0


def rank_of(key: str, world: int) -> int | None:
    """The rank that a key ends in; None: no rank of this world."""
    last = key.rpartition("/")[2]
    if not re.fullmatch(r"0|[1-9][0-9]{0,6}", last) or int(last) >= world:
        return None
    return int(last)


def fields_of(key: str, entry: Entry, *names: str, **defaults: Any) -> dict[str, Any]:
    """An object with exactly these, of this version; those that have a default may be missing.
    Raises JobError."""
    try:
        value = json.loads(entry.value)
    except (ValueError, RecursionError) as exc:
        raise JobError(f"{key} is not JSON: {exc}") from exc
    if not isinstance(value, dict) or set(defaults | value) != {*names, *defaults}:
        raise JobError(f"{key}: must be an object with {', '.join(names)}")
    value = defaults | value
    if value["version"] != _VERSION:
        raise JobError(f"{key}: version {value['version']!r}, this build reads {_VERSION}")
    return value
