# SPDX-License-Identifier: Apache-2.0
"""A job of four ranks in network namespaces of their own, with TCP between them, emulated GPUs and
a real etcd: tests/programs/ring_rank.c under `gpustasis job run`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from support.job import pids_by, reap_workers
from support.packet_filters import put_nft

WORLD = 4
PORT = 4711
TIMEOUT_S = 60.0
_MASK = (1 << 64) - 1


def ring_states(steps: int, world: int = WORLD) -> list[str]:
    """What every rank of an uninterrupted run says after each step."""
    state = 1
    states = []
    for step in range(steps):
        total = sum((state ^ step) * (rank + 1) for rank in range(world))
        state = (state * 6364136223846793005 + total) & _MASK
        states.append(f"{state:016x}")
    return states


class Network:
    """A namespace for each rank, on a bridge of the host. host: the bridge's address."""

    def __init__(self, count: int = WORLD) -> None:
        number = os.getpid()
        self._bridge = f"gsb{number}"
        # Not by `ip netns`: its mounts below /run/netns are in the way of every other dump here.
        self._holders: list[subprocess.Popen[bytes]] = []
        part = f"10.{100 + (number >> 8) % 100}.{number % 256}"
        self.host = f"{part}.254"
        self.addresses = [f"{part}.{rank + 1}" for rank in range(count)]
        try:
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("addr", "add", f"{self.host}/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
            for rank in range(count):
                outer = f"{self._bridge}v{rank}"
                peer = ("peer", "name", "eth0", "netns", str(self._hold_namespace()))
                _ip("link", "add", outer, "type", "veth", *peer)
                _ip("link", "set", outer, "master", self._bridge, "up")
                self.inside(rank, "ip", "link", "set", "lo", "up")
                self.inside(rank, "ip", "addr", "add", f"{self.addresses[rank]}/24", "dev", "eth0")
                self.inside(rank, "ip", "link", "set", "eth0", "up")
        except BaseException:
            self.close()
            raise

    def words(self, rank: int) -> list[str]:
        """Before a command that runs inside."""
        return ["nsenter", f"--net=/proc/{self._holders[rank].pid}/ns/net"]

    def set_link(self, rank: int, *, up: bool) -> None:
        """Of its namespace, at the host's end: what is sent is lost, and nobody is told."""
        _ip("link", "set", f"{self._bridge}v{rank}", "up" if up else "down")

    def _hold_namespace(self) -> int:
        """A process in a new network namespace, which is there while the process is."""
        ready = "echo; exec sleep infinity"
        holder = subprocess.Popen(["unshare", "--net", "sh", "-c", ready], stdout=subprocess.PIPE)
        self._holders.append(holder)
        assert holder.stdout is not None
        with holder.stdout as said:
            assert said.readline() == b"\n"
        return holder.pid

    def inside(self, rank: int, *words: str) -> str:
        argv = [*self.words(rank), *words]
        return subprocess.run(argv, check=True, capture_output=True, text=True).stdout

    def close(self) -> None:
        for holder in self._holders:
            holder.kill()
            holder.wait()
        # A namespace that nobody is in any more may keep its end, and the name here, for a while.
        ends = [f"{self._bridge}v{rank}" for rank in range(len(self.addresses))]
        for name in [*ends, self._bridge]:
            subprocess.run(["ip", "link", "del", name], check=False, capture_output=True)


def _line_of(pid: int) -> str:
    with suppress(OSError):
        return f"{pid}: {Path(f'/proc/{pid}/stat').read_text().strip()}"
    return f"{pid}: gone"


def _told_of(pid: int) -> Iterator[str]:
    """How a process and its threads stand, and its Python stacks."""
    for thread in sorted(Path(f"/proc/{pid}/task").iterdir()):
        with suppress(OSError):
            waits = (thread / "wchan").read_text()
            state = (thread / "stat").read_text().rpartition(")")[2].split()[0]
            signals = re.findall(
                r"^Sig(?:Pnd|Blk|Ign|Cgt):.*", (thread / "status").read_text(), re.MULTILINE
            )
            yield f"thread {thread.name}: {state} {waits} {' '.join(signals)}"
    yield from (_line_of(int(child)) for child in _children(pid))
    os.kill(pid, signal.SIGABRT)  # its log gets the Python stacks
    time.sleep(1)


def _children(pid: int) -> list[str]:
    with suppress(OSError):
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return []


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@dataclass(slots=True)
class Ring:
    """store: words that name it. criu: of each rank; None: as the environment has it. interpreter:
    of a program that needs one. ttl: of the keepers' leases, in seconds."""

    directory: Path
    network: Network
    program: Path
    environ: Mapping[str, str]
    store: Sequence[str]
    name: str = "ring"
    steps: int = 100_000
    criu: str = ""
    interpreter: Sequence[str] = ()
    ttl: int = 5
    keepers: list[subprocess.Popen[bytes] | None] = field(default_factory=lambda: [None] * WORLD)
    keepers_elsewhere: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, rank: int, *words: str, command: bool = True) -> None:
        """The keeper of a rank; with its command, or with other words for `job run`."""
        self.keepers[rank] = self._keeper(rank, words, "run", command=command)

    def start_elsewhere(self, rank: int, *words: str) -> None:
        """As on another host: it knows nothing of what others keep below /run."""
        self.keepers_elsewhere.append(self._keeper(rank, words, "run-elsewhere", command=False))

    def _keeper(
        self, rank: int, words: Sequence[str], run: str, *, command: bool
    ) -> subprocess.Popen[bytes]:
        argv = [*self.network.words(rank), sys.executable, "-m", "gpustasis", "-v", "job", "run"]
        argv += ["--job", self.name, "--rank", str(rank), "--world", str(WORLD), *self.store]
        argv += ["-D", str(self.directory / "kept"), "--run-directory", str(self.directory / run)]
        argv += ["--ttl", str(self.ttl), "--away", "4"]
        argv += [*(["--criu", self.criu] if self.criu else []), *words]
        if command:
            places = [f"{address}:{PORT}" for address in self.network.addresses]
            argv += [
                "--",
                *self.interpreter,
                str(self.program),
                str(rank),
                str(self.steps),
                *places,
            ]
        with (self.directory / f"keeper-{rank}").open("ab") as log:
            return subprocess.Popen(
                argv,
                env=dict(self.environ) | {"PYTHONFAULTHANDLER": "1"},
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )

    def start_all(self, *words: str, command: bool = True) -> None:
        for rank in range(WORLD):
            self.start(rank, *words, command=command)

    def start_restoring(self, *words: str) -> None:
        """Keepers that wait for `job restore`, all of them; with further words for `job run`."""

        def waiting() -> list[int]:  # of a log that is cut, the first ones are gone
            logs = [(self.directory / f"keeper-{rank}").read_text() for rank in range(WORLD)]
            return [log.count("waits to be restored") for log in logs]

        before = waiting()
        self.start_all("--restore", *words, command=False)
        self.wait(lambda: all(now > was for now, was in zip(waiting(), before, strict=True)))

    def job(self, *words: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        """`gpustasis job WORD NAME ...`."""
        argv = [sys.executable, "-m", "gpustasis", "job", words[0], self.name, *words[1:]]
        return subprocess.run(
            [*argv, *self.store],
            env=dict(self.environ),
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )

    def ask(self, *words: str) -> subprocess.Popen[str]:
        """As job(); it runs."""
        argv = [sys.executable, "-m", "gpustasis", "job", words[0], self.name, *words[1:]]
        return subprocess.Popen(
            [*argv, *self.store],
            env=dict(self.environ),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def output(self, rank: int) -> str:
        with suppress(FileNotFoundError):
            return (self.directory / f"kept/rank-{rank}/output.log").read_text()
        return ""

    def log_whole(self, rank: int) -> str:
        return (self.directory / f"keeper-{rank}").read_text()

    def log(self, rank: int) -> str:
        return self.log_whole(rank)[-12000:]

    def logs(self) -> str:
        return "\n".join(f"rank {r}:\n{self.log(r)}{self.output(r)[-300:]}" for r in range(WORLD))

    def step(self, rank: int) -> int:
        """The last that it has told of."""
        found = re.findall(r"^step (\d+) ", self.output(rank), re.MULTILINE)
        return int(found[-1]) if found else -1

    def steps_now(self) -> list[int]:
        return [self.step(rank) for rank in range(WORLD)]

    def wait_for_progress(self) -> None:
        """Every rank takes further steps, and all that it has said is as in an uninterrupted
        run."""
        before = self.steps_now()
        self.wait(lambda: all(now > was for now, was in zip(self.steps_now(), before, strict=True)))
        self.check()

    def check(self) -> None:
        """What the ranks have said so far."""
        told: list[tuple[int, str, int, str]] = []
        for rank in range(WORLD):
            for line in self.output(rank).splitlines(keepends=True):
                if line.startswith("step ") and line.endswith("\n"):  # the emulator speaks as well
                    _, number, value = line.split()
                    told.append((rank, line, int(number), value))
        # A rank that was restored has said further steps before.
        states = ring_states(max((step for _, _, step, _ in told), default=-1) + 1)
        for rank, line, step, state in told:
            assert state == states[step], (rank, line, self.logs())

    def check_end(self) -> None:
        """Every rank has come to its end, with the state of an uninterrupted run."""
        self.check()
        last = ring_states(self.steps)[-1]
        for rank in range(WORLD):
            assert f"done {last}\n" in self.output(rank), self.logs()

    def end(self) -> list[int]:
        """Ask the keepers to end; they pass it on to the programs. Their statuses."""
        for rank in range(WORLD):
            self.signal(rank, signal.SIGTERM)
        return self.ends()

    def pids(self) -> list[int]:
        """Of the ranks' programs that live."""
        at, wanted = len(self.interpreter), str(self.program).encode()
        return pids_by(lambda words: words.split(b"\0")[at : at + 1] == [wanted])

    def program_of(self, rank: int) -> int:
        """The pid of a rank's program."""
        (found,) = (
            pid
            for pid in self.pids()
            if Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1] == str(rank).encode()
        )
        return found

    def wait(self, what: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not what():
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.02)

    def ends(self, timeout_s: float = TIMEOUT_S) -> list[int]:
        """Of all keepers: their statuses."""
        found = []
        for rank, keeper in enumerate(self.keepers):
            assert keeper is not None
            try:
                found.append(keeper.wait(timeout_s))
            except subprocess.TimeoutExpired:
                stands = "\n".join([*_told_of(keeper.pid), *map(_line_of, self.pids())])
                why = f"the keeper of rank {rank} does not end; others: {found}\n{stands}"
                raise AssertionError(f"{why}\n{self.logs()}") from None
        return found

    def kill_node(self, rank: int) -> None:
        """All that runs in a rank's namespace, at once, and nobody is left to say so."""
        keeper = self.keepers[rank]
        assert keeper is not None
        program = self.program_of(rank)
        for pid in (keeper.pid, program):
            os.kill(pid, signal.SIGKILL)
        keeper.wait()
        reap(program)

    def kill_host(self) -> None:
        """As if it had failed: all keepers at once, and what runs without them. A criu that waits
        for a decision would hold its rank's tasks for ever, as zombies."""
        for rank in range(WORLD):
            self.signal(rank, signal.SIGKILL)
        assert self.ends() == [-signal.SIGKILL] * WORLD
        place = str(self.directory / "kept").encode()  # which its helpers and scripts name, too
        left = [*self.pids(), *pids_by(lambda words: place in words)]
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in left:
            reap(pid)

    def signal(self, rank: int, number: int) -> None:
        """To a keeper."""
        keeper = self.keepers[rank]
        assert keeper is not None
        keeper.send_signal(number)

    def status(self, rank: int) -> int | None:
        """How a keeper has ended; None: it has not."""
        keeper = self.keepers[rank]
        assert keeper is not None
        return keeper.poll()

    def locked(self) -> list[str]:
        """Tables of ours that are left in the ranks' namespaces."""
        nft = str(self.directory / "bin/nft")
        texts = [self.network.inside(rank, nft, "list", "tables") for rank in range(WORLD)]
        return [line for text in texts for line in text.splitlines() if "gpustasis" in line]

    def close(self) -> None:
        for keeper in [*self.keepers, *self.keepers_elsewhere]:
            if keeper is not None:
                keeper.kill()
                keeper.wait()
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        reap_workers()


def reap(pid: int) -> None:
    """A program whose keeper was killed: this process, a subreaper, has got it."""
    deadline = time.monotonic() + TIMEOUT_S
    while Path(f"/proc/{pid}").exists():
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
        assert time.monotonic() < deadline, f"{pid} does not end"
        time.sleep(0.01)


@contextmanager
def ring_of(
    directory: Path,
    network: Network,
    program: Path,
    environ: Mapping[str, str],
    store: Sequence[str],
) -> Iterator[Ring]:
    put_nft(directory / "bin")
    use = dict(environ) | {"PATH": f"{directory / 'bin'}:{environ['PATH']}"}
    ring = Ring(directory, network, program, use, store)
    try:
        yield ring
    finally:
        ring.close()
