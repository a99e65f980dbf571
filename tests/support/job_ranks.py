# SPDX-License-Identifier: Apache-2.0
"""A job of several ranks, each with a keeper and a task that are real processes
(tests/programs/job_rank.py)."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gpustasis.jobs import epochs
from gpustasis.jobs.messages import Phase
from gpustasis.jobs.records import Keys, Plan
from gpustasis.jobs.store import Store, Unreachable

PROGRAMS = Path(__file__).resolve().parent.parent / "programs"
KEYS = Keys("job")
END_S = 60
ANSWER_S = 60.0  # of a request to a store, where the test is of no silence of the store's


class Proxy:
    """A way to the store that can be cut, and be there again."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._is_cut = False
        self._stands = threading.Event()  # it has seen that it is cut
        self._over = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """Nothing goes through any more, and nobody is told."""
        self._stands.clear()
        self._is_cut = True

    def mend(self) -> None:
        """New connections go through; those that stood are broken."""
        # Not while it is about to look at them, or to add one.
        assert not self._is_cut or self._stands.wait(END_S), "something goes through still"
        pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                end.close()
        self._is_cut = False

    def close(self) -> None:
        self._over = True
        self._thread.join()
        self._stands.set()
        self.mend()
        self._listening.close()

    def _serve(self) -> None:
        while not self._over:
            if self._is_cut:
                self._stands.set()
                time.sleep(0.02)
                continue
            pairs = list(self._pairs)
            ends = {pair[0]: pair[1] for pair in pairs} | {pair[1]: pair[0] for pair in pairs}
            ends = {end: other for end, other in ends.items() if end.fileno() >= 0}
            ready, _, _ = select.select([self._listening, *ends], [], [], 0.02)
            for end in ready:
                if self._is_cut:
                    break
                if end is self._listening:
                    inner = socket.create_connection(("127.0.0.1", self._target))
                    self._pairs.append((self._listening.accept()[0], inner))
                elif not _passed(end, ends[end]):
                    end.close()
                    ends[end].close()
                    self._pairs = [pair for pair in self._pairs if end not in pair]


def _passed(end: socket.socket, other: socket.socket) -> bool:
    try:
        data = end.recv(65536)
        other.sendall(data)
    except OSError:
        return False
    return bool(data)


class Job:
    """world ranks; place: of the store, one for all or one for each."""

    def __init__(self, directory: Path, store: Store, places: list[str]) -> None:
        self.directory = directory
        self.store = store
        self.places = places
        self.world = len(places)
        self.keepers: list[subprocess.Popen[bytes] | None] = [None] * self.world
        self._tasks: list[subprocess.Popen[bytes]] = []
        for rank in range(self.world):
            argv = [sys.executable, PROGRAMS / "job_task.py", directory / f"task-{rank}"]
            self._tasks.append(subprocess.Popen(argv))
            (directory / f"task-{rank}.pid").write_text(str(self._tasks[-1].pid))
        wait_for(lambda: all(self.count(rank) > 0 for rank in range(self.world)), "tasks")

    def count(self, rank: int) -> int:
        with suppress(FileNotFoundError):
            data = (self.directory / f"task-{rank}").read_bytes()
            return int.from_bytes(data[:8], "little")
        return 0

    def start(self, rank: int, fault: str = "") -> None:
        """The keeper of a rank."""
        argv = [sys.executable, PROGRAMS / "job_rank.py", self.directory, self.places[rank]]
        argv += [str(rank), str(self.world), *([fault] if fault else [])]
        with (self.directory / f"keeper-{rank}").open("ab") as log:
            self.keepers[rank] = subprocess.Popen(argv, stdout=log, stderr=log)

    def start_all(self, faults: dict[int, str] | None = None, *, but: Collection[int] = ()) -> None:
        """Until each is ready: whoever joins an epoch first does not wait long for the others. but:
        ranks that are started later."""
        ranks = [rank for rank in range(self.world) if rank not in but]
        before = [self._times_ready(rank) for rank in ranks]
        for rank in ranks:
            self.start(rank, (faults or {}).get(rank, ""))
        wait_for(
            lambda: all(self._times_ready(r) > n for r, n in zip(ranks, before, strict=True)),
            "keepers",
        )

    def _times_ready(self, rank: int) -> int:
        with suppress(FileNotFoundError):
            return (self.directory / f"keeper-{rank}").read_text().splitlines().count("ready")
        return 0

    def begin(self, *, leave_running: bool = False) -> int:
        return epochs.begin(self.store, KEYS, Plan(world=self.world, leave_running=leave_running))

    def standing(self, number: int) -> epochs.Standing:
        while True:
            with suppress(Unreachable):
                return epochs.standing(self.store, KEYS, number)

    def at(self, rank: int) -> str:
        """What this keeper has begun or ended last."""
        with suppress(FileNotFoundError):
            return ["", *(self.directory / f"log-{rank}").read_text().splitlines()][-1]
        return ""

    def has_begun(self, rank: int, action: str) -> bool:
        with suppress(FileNotFoundError):
            return f"{action}:begin" in (self.directory / f"log-{rank}").read_text().splitlines()
        return False

    def wait_at(self, rank: int, action: str, number: int) -> None:
        """Until this keeper has begun that, in an epoch that nothing has aborted before."""

        def is_there() -> bool:
            return self.has_begun(rank, action)

        wait_for(lambda: is_there() or self.standing(number).epoch.phase is Phase.ABORTED, action)
        logs = [self.log(rank) for rank in range(self.world)]
        assert is_there(), "\n".join([str(self.standing(number)), *logs])

    def restart_the_dead(self) -> None:
        """As whoever supervises keepers does."""
        for rank, keeper in enumerate(self.keepers):
            if keeper is not None and keeper.poll() is not None:
                self.start(rank, "")

    def end(self, number: int) -> epochs.Standing:
        """Once every rank has done what was decided."""
        deadline = time.monotonic() + END_S
        while True:
            self.restart_the_dead()
            now = self.standing(number)
            joined = {rank for rank in range(self.world) if self.has_joined(rank, number)}
            if now.epoch.phase.is_final and joined <= now.settled:
                return now
            if time.monotonic() > deadline:
                logs = [self.log(rank) for rank in range(self.world)]
                raise AssertionError(f"not over: {now}\n" + "\n".join(logs))
            time.sleep(0.05)

    def has_joined(self, rank: int, number: int) -> bool:
        while True:
            with suppress(Unreachable):
                entry = self.store.read(KEYS.rank(rank)).entries.get(KEYS.rank(rank))
                return entry is not None and entry.value == str(number)

    def log(self, rank: int) -> str:
        return (self.directory / f"keeper-{rank}").read_text()[-3000:]

    def require_uniform(self, now: epochs.Standing) -> None:
        """All committed, or all run on; never a mix, and nobody stands still."""
        kills = now.epoch.phase is Phase.COMMITTED and not now.plan.leave_running
        if now.epoch.phase is Phase.COMMITTED:
            assert now.is_whole, now
            for rank, record in now.records.items():
                dumped = json.loads(record)["count"]
                if kills:
                    assert self.count(rank) == dumped, f"rank {rank} has run on after its dump"
        if kills:
            wait_for(lambda: set(self.states()) <= {"Z"}, "ends of tasks")
            return
        states = self.states()
        assert not {"T", "Z", ""} & {*states}, (now, states)
        before = [self.count(rank) for rank in range(self.world)]
        wait_for(
            lambda: all(self.count(rank) > count for rank, count in enumerate(before)), "counts"
        )

    def states(self) -> list[str]:
        return [state_of(task.pid) for task in self._tasks]

    def close(self) -> None:
        for process in [*self.keepers, *self._tasks]:
            if process is not None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
                process.wait()


def state_of(pid: int) -> str:
    """The letter of /proc/PID/stat; "": there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def wait_for(what: Callable[[], bool], name: str, timeout_s: float = END_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline, f"{name}: not within {timeout_s} s"
        time.sleep(0.01)


@contextmanager
def job_of(directory: Path, store: Store, places: list[str]) -> Iterator[Job]:
    job = Job(directory, store, places)
    try:
        yield job
    finally:
        job.close()


def namespace(pid: int) -> str:
    """Of a process's network."""
    return os.readlink(f"/proc/{pid}/ns/net")


def tables(pid: int) -> str:
    """nftables' tables there."""
    words = ["nsenter", f"--net=/proc/{pid}/ns/net", "nft", "list", "tables"]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout
