# SPDX-License-Identifier: Apache-2.0
"""What can go wrong with one rank of a ring, or with its store, in a phase of a checkpoint, and
how it is put right again."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from random import Random

from gpustasis.errors import StoreError
from gpustasis.jobs.epochs import Standing, standing_of
from gpustasis.jobs.gate import Gate
from gpustasis.jobs.messages import BEFORE, Phase
from gpustasis.jobs.records import Keys, epoch_of, member_of, number_of
from gpustasis.jobs.store import Snapshot, Store
from gpustasis.recovery import GUARDIAN_COMM, WORKER_COMM
from support.ring import WORLD, Ring
from support.ring_stores import RingStore

DISK_MIB = 256
ANSWER_S = 20.0  # a store that was killed is connected to anew
PHASE_S = 30.0


class Fault(StrEnum):
    """KEEPER: `gpustasis job run` of a rank. STORE: etcd, or the agent that serves the store."""

    CRIU = "criu killed"
    SCRIPT = "criu's script killed"
    RANK = "a rank's program killed"
    KEEPER = "a rank's keeper killed"
    STORE = "the store killed"
    LINK = "a namespace's link down"
    DISK = "disk full"
    ABSENT = "a rank never joins"
    REFUSES = "a rank votes no"


class Moment(StrEnum):
    """When: a phase that is held, or after the decision, before the rank has heard of it."""

    LOOK = "look"
    LOCK_CUDA = "lock-cuda"
    LOCK_NETWORK = "lock-network"
    DUMP = "dump"
    DECIDED = "decided"


Case = tuple[Fault, Moment]

# criu runs from the phase dump on; whether a rank joins or votes no is known before any is locked.
_ONLY = {
    Fault.CRIU: (Moment.DUMP, Moment.DECIDED),
    Fault.SCRIPT: (Moment.DUMP, Moment.DECIDED),
    Fault.ABSENT: (Moment.LOOK,),
    Fault.REFUSES: (Moment.LOOK,),
}
CASES = tuple((fault, moment) for fault in Fault for moment in _ONLY.get(fault, tuple(Moment)))
# Nothing is locked yet; ranks are locked; it is decided.
GROUPS = (
    (Moment.LOOK,),
    (Moment.LOCK_CUDA, Moment.LOCK_NETWORK, Moment.DUMP),
    (Moment.DECIDED,),
)


def planned(each: int) -> list[Case]:
    """Cases, so often that each fault is there at least `each` times in each group that it can
    hit."""
    cases: list[Case] = []
    for fault in Fault:
        for group in GROUPS:
            moments = [moment for moment in group if (fault, moment) in CASES]
            for moment in moments:
                cases += [(fault, moment)] * -(-each // len(moments))
    return cases


class Disks:
    """A tmpfs for the images of each rank; what the rank prints goes elsewhere."""

    def __init__(self, ring: Ring) -> None:
        self._places = [ring.directory / f"kept/rank-{rank}" for rank in range(WORLD)]
        for place in self._places:
            place.mkdir(parents=True)
            flags = f"size={DISK_MIB}m,mode=700"
            subprocess.run(["mount", "-t", "tmpfs", "-o", flags, "none", place], check=True)
            output = ring.directory / f"output-{place.name}"
            output.touch(0o600)
            (place / "output.log").touch(0o600)
            subprocess.run(["mount", "--bind", output, place / "output.log"], check=True)

    def fill(self, rank: int) -> None:
        with (self._places[rank] / "filling").open("wb", 0) as file:
            try:
                while True:
                    file.write(bytes(1 << 20))
            except OSError as exc:
                if exc.errno != errno.ENOSPC:
                    raise

    def empty(self, rank: int) -> None:
        (self._places[rank] / "filling").unlink(missing_ok=True)

    def close(self) -> None:
        for place in self._places:
            for mounted in (place / "output.log", place):
                subprocess.run(["umount", "-l", mounted], check=False, capture_output=True)


class Watcher:
    """Reads what the store says of a ring's epochs. A store that does not answer is asked again."""

    def __init__(self, ring: Ring, store: RingStore) -> None:
        self._keys = Keys(ring.name)
        self._client: Store = store.client()

    def _read(self, *keys: str) -> Snapshot:
        deadline = time.monotonic() + ANSWER_S
        while True:
            try:
                return self._client.read(*keys)
            except StoreError as exc:
                if time.monotonic() > deadline:
                    raise AssertionError(f"the store does not answer: {exc}") from exc
                time.sleep(0.05)

    def newest(self) -> int:
        key = self._keys.newest
        return number_of(key, self._read(key).entries.get(key))

    def phase(self, number: int) -> Phase | None:
        """None: the epoch has not begun."""
        key = self._keys.phase(number)
        entry = self._read(key).entries.get(key)
        return None if entry is None else epoch_of(key, entry)[0].phase

    def is_final(self, number: int) -> bool:
        phase = self.phase(number)
        return phase is not None and phase.is_final

    def standing(self, number: int) -> Standing:
        return standing_of(self._keys, number, self._read(self._keys.epoch(number)))

    def has_joined(self, number: int, rank: int) -> bool:
        """It is the last one that the rank was in."""
        key = self._keys.rank(rank)
        return number_of(key, self._read(key).entries.get(key)) == number

    def has_dumped(self, number: int, rank: int) -> bool:
        key = self._keys.record(number, rank)
        return key in self._read(key).entries

    def is_held_in(self, number: int, rank: int, phase: Phase) -> bool:
        """Whether the epoch is in that phase, and goes on to no other one but to the end: that rank
        has not said yet that it has done what the phase asks for."""
        member, record = self._keys.member(number, rank), self._keys.record(number, rank)
        key = self._keys.phase(number)
        entries = self._read(key, member, record).entries
        if record in entries or member not in entries:
            return False
        step, _ = member_of(member, entries[member])
        return epoch_of(key, entries[key])[0].phase is phase and step is BEFORE[phase]

    def close(self) -> None:
        self._client.close()


class Trouble:
    """One fault, of rank `victim`, in a phase that another rank, `holder`, is held in. made: there
    may be something to heal."""

    def __init__(
        self,
        ring: Ring,
        store: RingStore,
        disks: Disks,
        watcher: Watcher,
        random: Random,
        case: Case,
    ) -> None:
        self.fault, self.moment = case
        self.ring, self.store, self.disks, self.watcher = ring, store, disks, watcher
        self.random = random
        self.victim, self.holder = random.sample(range(WORLD), 2)
        self.number = watcher.newest() + 1
        self.made = False
        self._place = ring.directory / f"kept/rank-{self.victim}/epoch-{self.number:08d}"
        self._said = [len(ring.log_whole(rank)) for rank in range(WORLD)]

    def before(self) -> None:
        """What must be so before the checkpoint is asked for."""
        if self.fault is Fault.ABSENT:
            self.ring.signal(self.victim, signal.SIGSTOP)
        elif self.fault is Fault.REFUSES:
            self._place.mkdir(parents=True)
        self.made = self.fault in {Fault.ABSENT, Fault.REFUSES}

    def strike(self, has_ended: Callable[[], bool]) -> bool:
        """Hold the phase, make the fault, and go on. False: the phase was over already, and no
        fault was made. has_ended(): whether the checkpoint has."""
        if self.made:
            return True
        try:
            if self.moment is not Moment.DECIDED:
                return self._hold(has_ended, self.moment) and self._make(self._is_held)
            if not self._hold(has_ended, Moment.DUMP):
                return False
            try:
                return self._await_decision(has_ended) and self._make(self._is_unheard)
            finally:
                self.ring.signal(self.victim, signal.SIGCONT)
        finally:
            self.ring.signal(self.holder, signal.SIGCONT)

    def _hold(self, has_ended: Callable[[], bool], moment: Moment) -> bool:
        """The holder's keeper stands as soon as it has begun its part of the phase."""
        if not _await(lambda: self._has_begun(self.holder, moment), has_ended):
            return False
        self.ring.signal(self.holder, signal.SIGSTOP)
        return True

    def _await_decision(self, has_ended: Callable[[], bool]) -> bool:
        """The victim's keeper stands from its record on; the others go on and decide."""
        watcher, number = self.watcher, self.number
        if not _await(lambda: watcher.has_dumped(number, self.victim), has_ended):
            return False
        self.ring.signal(self.victim, signal.SIGSTOP)
        self.ring.signal(self.holder, signal.SIGCONT)
        return _await(lambda: watcher.is_final(number), lambda: False)

    def _is_held(self) -> bool:
        return self.watcher.is_held_in(self.number, self.holder, Phase(self.moment))

    def _is_unheard(self) -> bool:
        """It is decided, and the victim has done nothing of it."""
        return not self._has_begun(self.victim, "finish", "release")

    def _has_begun(self, rank: int, *actions: str) -> bool:
        said = self.ring.log_whole(rank)[self._said[rank] :]
        return re.search(rf" acting ({'|'.join(actions)})$", said, re.MULTILINE) is not None

    def _make(self, is_right: Callable[[], bool]) -> bool:
        find = {
            Fault.CRIU: self._criu,
            Fault.SCRIPT: self._script,
            Fault.RANK: self._program,
        }.get(self.fault)
        if find is not None and not _await(lambda: bool(find()), lambda: False, 4):
            return False
        time.sleep(self.random.uniform(0, 0.3))  # somewhere in the victim's own work
        if not is_right():
            return False
        self.made = True
        match self.fault:
            case Fault.KEEPER:
                self.ring.signal(self.victim, signal.SIGKILL)
            case Fault.STORE:
                self.store.kill()
            case Fault.LINK:
                self.ring.network.set_link(self.victim, up=False)
            case Fault.DISK:
                self.disks.fill(self.victim)
            case _:
                assert find is not None, self.fault
                return _kill(find())
        return True

    def heal(self) -> None:
        """What a person, or a supervisor, would do about it."""
        if not self.made:
            return
        match self.fault:
            case Fault.KEEPER:
                self._let_pass(7)
                self.ring.wait(lambda: self.ring.status(self.victim) is not None)
                self.ring.start(self.victim, command=False)
            case Fault.STORE:
                self._let_pass(6)
                self.store.start()
            case Fault.LINK:
                self._let_pass(8)
                self.ring.network.set_link(self.victim, up=True)
            case Fault.DISK:
                self._until_final()
                self._let_pass(1)
                self.disks.empty(self.victim)
            case Fault.ABSENT:
                self._until_final()
                self.ring.signal(self.victim, signal.SIGCONT)
            case Fault.REFUSES:
                self._until_final()
                self._place.rmdir()
            case _:
                pass

    def _let_pass(self, most_s: float) -> None:
        """On both sides of the deadlines."""
        time.sleep(self.random.uniform(0, most_s))

    def _until_final(self) -> None:
        self.ring.wait(lambda: self.watcher.is_final(self.number))

    def _criu(self) -> list[int]:
        """Not the plugin's helpers, which have its words."""
        place = str(self._place).encode()
        found = _pids_where(lambda words: place in words and b"--action-script" in words)
        return [pid for pid in found if _comm(pid) not in {WORKER_COMM, GUARDIAN_COMM}]

    def _script(self) -> list[int]:
        """One that waits for the decision."""
        script = str(self._place.parent / ".gate").encode()
        if self.victim not in held(self.ring):
            return []
        return _pids_where(lambda words: b"--action-script" not in words and script in words)

    def _program(self) -> list[int]:
        mine = [str(self.ring.program).encode(), str(self.victim).encode()]
        return _pids_where(lambda words: words[:2] == mine)


def held(ring: Ring) -> list[int]:
    """Ranks of which a criu, or its script, waits for a decision."""
    places = [ring.directory / "run" / ring.name / str(rank) for rank in range(WORLD)]
    return [rank for rank in range(WORLD) if Gate(places[rank], Path("/none")).is_held()]


def end_all(ring: Ring) -> None:
    """Keepers, programs, and whatever was started for the ring's dumps."""
    ring.close()
    kept = f"{ring.directory}/kept/".encode()
    _kill(_pids_where(lambda words: any(word.startswith(kept) for word in words)))


def _await(
    what: Callable[[], bool], has_ended: Callable[[], bool], most_s: float = PHASE_S
) -> bool:
    """Whether it has come, before that has ended."""
    deadline = time.monotonic() + most_s
    while not what():
        if has_ended() or time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def _kill(pids: list[int]) -> bool:
    """Whether one was there to be killed."""
    killed = False
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            killed = True
    return killed


def _comm(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def _pids_where(fits: Callable[[list[bytes]], bool]) -> list[int]:
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if fits(Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")):
                found.append(int(entry))
    return found
