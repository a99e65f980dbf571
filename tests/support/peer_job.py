# SPDX-License-Identifier: Apache-2.0
"""A job of two ranks with emulated GPUs on this host, each under `gpustasis job run --commit-at
peer`: a real CRIU, a real store of one host, and a real neighbour in this process that keeps
copies."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpustasis._core import ARENA_MARKER, MANIFEST_NAME
from gpustasis.image.arena import find_marker
from support.job import pids_by, reap_workers
from support.json_output import check_document
from support.ring import reap

WORLD = 2
TIMEOUT_S = 90.0
_STEP = re.compile(r"\d+ step (\d+) ok")


@dataclass(slots=True)
class PeerJob:
    """program: tests/programs/steady_job.c, which compares all its memory at every step. arena:
    where dumps are in memory. store: words that name it."""

    directory: Path
    program: Path
    arena: Path
    environ: Mapping[str, str]
    store: Sequence[str]
    mib: int = 4
    name: str = "steady"
    keepers: list[subprocess.Popen[bytes] | None] = field(default_factory=lambda: [None] * WORLD)

    def start(self, rank: int, *words: str, command: bool = True, cuda: bool = True) -> None:
        """The keeper of a rank; with its command, or with other words for `job run`. cuda: the
        command uses a GPU."""
        argv = [sys.executable, "-m", "gpustasis", "-v", "job", "run", "--job", self.name]
        argv += ["--rank", str(rank), "--world", str(WORLD), *self.store]
        argv += ["-D", str(self.directory / "kept"), "--run-directory", str(self.directory / "run")]
        argv += ["--ttl", "5", "--away", "4", *words]
        if command:
            argv += ["--", str(self.program), "--mib", str(self.mib), "--seed", str(rank + 1)]
            argv += [] if cuda else ["--cuda", "0"]
        with (self.directory / f"keeper-{rank}").open("ab") as log:
            self.keepers[rank] = subprocess.Popen(
                argv, env=dict(self.environ), stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    def start_all(self, *words: str, command: bool = True, cuda: bool = True) -> None:
        for rank in range(WORLD):
            self.start(rank, "--commit-at", "peer", *words, command=command, cuda=cuda)

    def job(self, *words: str) -> subprocess.CompletedProcess[str]:
        """`gpustasis job WORD NAME ...`."""
        argv = [sys.executable, "-m", "gpustasis", "job", words[0], self.name, *words[1:]]
        return subprocess.run(
            [*argv, *self.store],
            env=dict(self.environ),
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )

    def checkpoint(self, *words: str) -> None:
        """One that is committed."""
        done = self.job("checkpoint", "--world", str(WORLD), *words)
        assert done.returncode == 0, done.stderr + self.logs()

    def records(self, epoch: int) -> list[dict[str, Any]]:
        """Of a whole checkpoint, by rank."""
        shown = self.job("show", "--epoch", str(epoch), "--json")
        assert shown.returncode == 0, shown.stderr
        found: list[dict[str, Any]] = check_document(shown.stdout, "job show")["ranks"]
        return found

    def images(self, rank: int, epoch: int) -> Path:
        return self.directory / f"kept/rank-{rank}/epoch-{epoch:08d}"

    def is_durable(self, epoch: int) -> bool:
        """Whether each rank's dump is on the disk, and in memory no more."""
        places = [self.images(rank, epoch) for rank in range(WORLD)]
        return all(
            (place / MANIFEST_NAME).exists() and not (place / ARENA_MARKER).exists()
            for place in places
        )

    def lose_node(self, rank: int) -> None:
        """What a node has in memory and on its own disk of a rank goes with it."""
        place = self.directory / f"kept/rank-{rank}"
        for images in place.glob("epoch-*"):
            marker = find_marker(images)
            if marker is not None:
                shutil.rmtree(marker.directory)
        shutil.rmtree(place)

    def output(self, rank: int) -> str:
        with suppress(FileNotFoundError):
            return (self.directory / f"kept/rank-{rank}/output.log").read_text()
        return ""

    def steps(self, rank: int) -> list[int]:
        """All that it has said; its memory was right each time."""
        found = []
        for line in self.output(rank).splitlines(keepends=True):
            if line.endswith("\n") and not line.startswith("gpustasis driver emulator: "):
                step = _STEP.fullmatch(line.rstrip("\n"))
                assert step is not None, f"rank {rank} says {line!r}"
                found.append(int(step[1]))
        return found

    def run_on(self) -> None:
        """Wait until each rank has made further steps."""
        before = [len(self.steps(rank)) for rank in range(WORLD)]
        self.wait(
            lambda: all(len(self.steps(rank)) > before[rank] + 3 for rank in range(WORLD)),
        )

    def log(self, rank: int) -> str:
        with suppress(FileNotFoundError):
            return (self.directory / f"keeper-{rank}").read_text()
        return ""

    def logs(self) -> str:
        return "\n".join(f"rank {rank}:\n{self.log(rank)[-8000:]}" for rank in range(WORLD))

    def wait(self, what: Callable[[], object], timeout_s: float = TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not what():
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.02)

    def ends(self) -> list[int]:
        """Of all keepers: their statuses."""
        found = []
        for keeper in self.keepers:
            assert keeper is not None
            try:
                found.append(keeper.wait(TIMEOUT_S))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"a keeper does not end: {self.logs()}") from None
        return found

    def kill_keeper(self, rank: int) -> None:
        keeper = self.keepers[rank]
        assert keeper is not None
        keeper.kill()
        keeper.wait()

    def kill_all(self) -> None:
        """As if all nodes had failed."""
        for rank in range(WORLD):
            self.kill_keeper(rank)
        place = str(self.directory / "kept").encode()
        left = [*pids_by(lambda words: place in words), *self.pids()]
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # Not before: of what another one has started, or traces, nobody hears until that has ended.
        for pid in left:
            reap(pid)

    def pids(self) -> list[int]:
        """Of the ranks' programs that live."""
        wanted = str(self.program).encode()
        return pids_by(lambda words: words.split(b"\0")[:1] == [wanted])

    def close(self) -> None:
        for keeper in self.keepers:
            if keeper is not None:
                keeper.kill()
                keeper.wait()
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        reap_workers()
