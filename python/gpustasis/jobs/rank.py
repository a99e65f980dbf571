# SPDX-License-Identifier: Apache-2.0
"""What a rank's keeper does with real tasks: CRIU, the driver's checkpoint API, and the lock on the
network. docs/jobs.md says which step of CRIU belongs to which phase."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from gpustasis.criu.find import Criu
from gpustasis.criu.run import Run, Settings
from gpustasis.errors import CheckpointError, JobError, StoreError
from gpustasis.jobs.aftercare import Aftercare
from gpustasis.jobs.gate import Gate
from gpustasis.jobs.kin import Kin
from gpustasis.jobs.neighbour import CommitAt
from gpustasis.jobs.network import Lock, find_nft, own_addresses
from gpustasis.jobs.place import Place, State
from gpustasis.jobs.records import Keys
from gpustasis.jobs.safe_point import Seat
from gpustasis.jobs.store import Put, Store
from gpustasis.jobs.work import Order
from gpustasis.task import is_ours_here, read_task, start_time
from gpustasis.verifying import Check

log = logging.getLogger(__name__)

POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """criu: the program. tcp_close: connections come back closed. outside: connections to addresses
    that no rank has are no obstacle. safe_point_s: for the program to come to a safe point; 0: it
    has none. risks: findings on NCCL that are no obstacle, by name. extra: further arguments for
    criu. cuda_timeout_ms: for work that was given to a GPU. check: must succeed after a restore,
    before the rank counts as back; None: nothing. older: if the job is not, the keeper waits for a
    restore of an older one. keep_last: so many whole checkpoints stay when another one that leaves
    the job running was made; 0: all. max_chain: so many dumps in between are built on a full one;
    0: each is full. commit_at: where a dump has to be before it can be in a commit."""

    criu: Criu
    tcp_close: bool = False
    outside: bool = False
    safe_point_s: float = 0.0
    risks: frozenset[str] = frozenset()
    extra: tuple[str, ...] = ()
    cuda_timeout_ms: int = 10_000
    check: Check | None = None
    older: bool = False
    keep_last: int = 0
    max_chain: int = 0
    commit_at: CommitAt = CommitAt.DURABLE


@dataclass(slots=True)
class Context:
    """Of one rank, for as long as its keeper lives. life: of the job, that tasks belong to which
    are made now. told_at: when the keeper was told to end, as time.monotonic(); 0: it was not."""

    place: Place
    world: int
    store: Store
    keys: Keys
    options: Options
    life: int = 0
    told_at: float = 0.0
    aftercare: Aftercare = field(init=False)
    kin: Kin = field(init=False, default_factory=Kin)
    _noting: threading.Lock = field(init=False, default_factory=threading.Lock)
    state: State = field(init=False)
    gate: Gate = field(init=False)
    lock: Lock = field(init=False)
    seat: Seat = field(init=False)

    def __post_init__(self) -> None:
        self.seat = Seat(self.place.seat)
        self.state = self.place.load()
        self.gate = Gate(self.place.run, self.place.script)
        self.lock = Lock(self.place.job, self.place.rank)
        self.aftercare = Aftercare(
            self.place,
            is_open=lambda images: self.state.is_dumping_to(self.place, images),
            drained=self._drained,
        )

    @property
    def name(self) -> str:
        return f"rank {self.place.rank}"

    def note(
        self,
        *,
        pid: int | None = None,
        epoch: int | None = None,
        images: str | None = None,
        cuda: bool | None = None,
        network: bool | None = None,
        last: tuple[int, str] | None = None,
        told: int | None = None,
    ) -> None:
        """Change what the next keeper finds, before what it is about is done. pid 0: none. last: as
        State's, with its stamp; new tasks were in none."""
        with self._noting:
            state = self.state
            if pid is not None:
                self.kin.forget()
                start = start_time(pid) if pid else 0  # a command may have ended already
                state = replace(state, pid=pid, start_time=start, life=self.life, last=0, stamp="")
            if last is not None:
                state = replace(state, last=last[0], stamp=last[1])
            self.state = replace(
                state,
                epoch=state.epoch if epoch is None else epoch,
                images=state.images if images is None else images,
                cuda=state.cuda if cuda is None else cuda,
                network=state.network if network is None else network,
                told=state.told if told is None else told,
            )
            self.place.store(self.state)

    def _drained(self, images: Path, before: str, now: str) -> None:
        """The dump there has been drained: its stamp is another one, and its content is not."""
        with self._noting:
            state = self.state
            digest, _, stamp = state.stamp.partition(" ")
            if state.last and self.place.images(state.last) == images and stamp == before:
                self.state = replace(state, stamp=f"{digest} {now}")
                self.place.store(self.state)

    def say_where(self, pid: int | str = "self") -> None:
        """Have the other ranks know this one's addresses: those of a process's network. Raises
        StoreError."""
        value = {"host": socket.gethostname(), "addresses": sorted(own_addresses(pid))}
        self.store.write([], [Put(self.keys.addresses(self.place.rank), json.dumps(value))])

    def require_left(self) -> None:
        """That there may be something for a keeper without a command: tasks that an earlier one has
        left here, or an epoch that the rank has joined. Raises JobError."""
        key = self.keys.rank(self.place.rank)
        with suppress(StoreError):  # it is waited for, as by every keeper
            if not self.state.pid and key not in self.store.read(key).entries:
                raise JobError(
                    f"job {self.place.job}, {self.name}: no earlier keeper has left tasks here: "
                    "give a command after --, or --restore"
                )

    def require_nft(self) -> None:
        """For what the rank has of TCP. Raises JobError."""
        if find_nft() is None:
            raise JobError(
                f"{self.name}: there is no nft to lock its connections and ports with: install "
                "nftables"
            )

    def unlock_network(self) -> None:
        """If it may be locked."""
        if self.state.network:
            self.lock.release()
            self.note(network=False)


class Part(Protocol):
    """The work of one epoch; as work.Work."""

    def look(self) -> None: ...

    def lock_cuda(self) -> None: ...

    def lock_network(self) -> None: ...

    def dump(self) -> str: ...

    def release(self) -> None: ...

    def finish(self, *, leave_running: bool) -> None: ...


class CriuAtGate:
    """A criu that was started, and waits at the gate; or one that an earlier keeper has left there.
    failed: how it ended. seconds: until it was at the gate."""

    def __init__(self, context: Context, images: Path) -> None:
        self._context = context
        self._images = images
        self._thread: threading.Thread | None = None
        self.done: Run | None = None
        self.failed: BaseException | None = None
        self.seconds = 0.0

    def start(self, action: str, run: Callable[[Settings], Run], settings: Settings) -> bool:
        """Until it is at the gate; False: it has ended before."""
        gate = self._context.gate
        gate.prepare(action)
        words = ("--action-script", str(gate.script))
        settings = replace(settings, extra=(*settings.extra, *words))

        def work() -> None:
            try:
                self.done = run(settings)
            except BaseException as exc:  # noqa: BLE001 - told by whoever waits for it
                self.failed = exc

        arrival = gate.listen()
        begin = time.monotonic()
        try:
            self._thread = threading.Thread(target=work, daemon=True)
            self._thread.start()
            while not arrival.wait(POLL_S):
                if not self._thread.is_alive():
                    return False
        finally:
            arrival.close()
        self.seconds = time.monotonic() - begin
        return True

    def is_there(self) -> bool:
        """Whether it has not ended."""
        if self._thread is not None:
            return self._thread.is_alive()
        return bool(self._pids())

    def traced(self) -> list[int]:
        """Processes that it holds."""
        tracers = self._pids()
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc") if tracers else ()):
            with suppress(CheckpointError):  # it has ended
                if read_task(int(pid)).tracer in tracers:
                    found.append(int(pid))
        return found

    def _pids(self) -> list[int]:
        return _criu_pids(str(self._images), self._context.state.images)

    def wait(self) -> None:
        """A moment."""
        time.sleep(POLL_S)

    def end(self, *, yes: bool) -> None:
        """Tell it, as soon as it is at the gate, and wait for its end."""
        while self.is_there():
            self._context.gate.say(yes=yes)
            time.sleep(POLL_S)
        self._context.gate.say(yes=yes)  # a script outlives the criu that was killed
        if self._thread is not None:
            self._thread.join()

    def slipped(self) -> str:
        """Why it does not wait any more. A script outlives the criu that was killed."""
        if self.is_there() and self._context.gate.is_held():
            return ""
        return f"{self._context.name}: criu has ended before anything was decided"


def _criu_pids(*images: str) -> list[int]:
    """Those of this user that were started for one of these directories, with a gate. By their
    words: a criu has them before it has opened anything, whatever its program is called."""
    wanted = {one.encode() for one in images if one}
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it has ended
            place = Path("/proc") / pid
            if is_ours_here(place):
                words = (place / "cmdline").read_bytes().split(b"\0")
                if b"--action-script" in words and wanted.intersection(words):
                    found.append(int(pid))
    return found


class RankWork:
    """A work.Work. make: the part for an order. lives: whether the rank's tasks do."""

    def __init__(self, make: Callable[[Order], Part], lives: Callable[[], bool]) -> None:
        self._make = make
        self._lives = lives
        self._part: Part | None = None
        self.order: Order | None = None

    def enter(self, order: Order) -> None:
        self.order = order
        self._part = self._make(order)

    def has_tasks(self) -> bool:
        return self._lives()

    @property
    def part(self) -> Part:
        if self._part is None:
            raise JobError("no epoch was entered")
        return self._part

    def look(self) -> None:
        self.part.look()

    def lock_cuda(self) -> None:
        self.part.lock_cuda()

    def lock_network(self) -> None:
        self.part.lock_network()

    def dump(self, number: int) -> str:
        if self.order is None or self.order.number != number:
            raise JobError(f"epoch {number} was not entered")
        return self.part.dump()

    def release(self) -> None:
        self.part.release()

    def finish(self, *, leave_running: bool) -> None:
        self.part.finish(leave_running=leave_running)

    def stop(self) -> None:
        """criu is not stopped half-way: it comes to the gate, and is told there."""
        part = self.part
        if isinstance(part, HasCriu):
            part.stopping.set()

    def slipped(self) -> str:
        part = self.part
        return part.criu.slipped() if isinstance(part, HasCriu) else ""


class HasCriu:
    """What both kinds of parts share. touched: this epoch may have done something to the tasks: the
    state's number alone does not tell, for a store that has lost its entries counts anew."""

    def __init__(self, context: Context, order: Order, images: Path) -> None:
        self.context = context
        self.order = order
        self.images = images
        self.touched = order.joined
        self.criu = CriuAtGate(context, images)
        self.stopping = threading.Event()  # what is being done is to end early, if it can

    def is_touched(self) -> bool:
        """Whether there may be something to undo."""
        return self.touched and self.context.state.epoch == self.order.number
