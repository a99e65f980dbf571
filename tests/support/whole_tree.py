# SPDX-License-Identifier: Apache-2.0
"""tests/programs/whole_tree.c under way: fifty processes with much of what a checkpoint has to
bring back, that check every word of it in rounds. And the ways in which it is checkpointed."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from campaigns.steady_job import SteadyJob
from gpustasis._core import PACK_NAME
from gpustasis.criu.plugin import Scalar
from support.job import POLL_S, Job

PROGRAM = Path(__file__).resolve().parent.parent / "programs" / "whole_tree.c"
FLAGS = ("-O2", "-pthread")
PROCESSES = 50
ROUND_S = 60.0  # a machine may be busy
_ROUND = re.compile(r"round (\d+) ok: (\d+) processes, (\d+) threads")
_EMULATOR = "gpustasis driver emulator: "  # what the emulator says of itself on stderr
# Kinds of its memory; what is shared may come back unshared.
SHARED = (
    *("shared", "memfd", "shared-of-group", "memfd-of-group"),
    *("ghost-on-tmpfs-mapped", "ghost-on-disk-mapped"),
)
MEMORIES = (
    *SHARED,
    *("private", "heap", "alike", "cow-heap", "cow-mapping", "memfd-unmapped"),
    *("ghost-on-tmpfs", "ghost-on-disk", "file-on-tmpfs", "file-on-disk", "gpu"),
)
# What --wrong makes wrong, and what the job must call it.
WRONGS = {
    **{kind: kind for kind in MEMORIES},
    **{f"{kind}-unshared": kind for kind in SHARED},
    "cow-is-shared": "cow-heap",
    "pipe": "pipe",
    "own-offset": "own-offset",
    "shared-offset": "shared-offset",
    "one-descriptor-of-two": "own-offset",
    "thread-stack": "thread-stack",
    "thread-variables": "thread-variables",
    "thread-gone": "thread-gone",
}
WRONG_IN, CUDA_PROCESSES = 46, (3, 33)


@dataclass(frozen=True, slots=True)
class Way:
    """How a checkpoint is made: keys of the plugin's configuration; for a recipient; on top of so
    many others; as a stream."""

    config: Mapping[str, Scalar] = field(default_factory=dict)
    sealed: bool = False
    earlier: int = 0
    streamed: bool = False

    def require_taken(self, images: Path) -> None:
        """That the checkpoint is one of this kind, and stores what it should."""
        if self.streamed:  # what a dump tells stays with the sender
            counts = {
                kind: len(list(images.glob(f"gpustasis-{kind}[0-9]*.img")))
                for kind in ("", "memory-", "sealed-")
            }
            # Now and then one process has no image: what it has is compared after the restore.
            gpus, some = len(CUDA_PROCESSES), PROCESSES // 2
            if self.sealed:
                assert counts["sealed-"] > some + gpus, counts
            else:
                assert counts[""] == gpus and counts["memory-"] > some, counts
            assert (images / "gpustasis-sealed.img").exists() == self.sealed
            return
        told: dict[str, Any] = json.loads((images / "gpustasis-dump.json").read_text())
        assert told["result"] == "ok"
        assert len(told["tasks"]) == len(CUDA_PROCESSES)
        ours = told["cpu_memory"] or ()
        if self.config.get("cpu_memory") == "ours":
            assert len(ours) == PROCESSES
            assert sum(task["shared_bytes"] for task in ours) > 20 << 20
        else:
            assert not ours
        assert (told["parent"] or {"chain_length": 0})["chain_length"] == self.earlier
        if self.earlier:  # what has not changed since is there once
            assert sum(task["ref"]["plain_bytes"] for task in ours) > 1 << 18
        packed = self.config.get("layout") == "packed" and not self.sealed
        assert (images / PACK_NAME).exists() == packed
        assert (images / "gpustasis-sealed.img").exists() == self.sealed


_OURS: dict[str, Scalar] = {"cpu_memory": "ours"}
_SMALL = _OURS | {"chunk_size": 4096}  # of larger ones the job changes each between two checkpoints
WAYS = {
    "plain": Way({"cpu_memory": "criu"}),
    "ours": Way(_OURS),
    "packed": Way({"layout": "packed"}),
    "packed-ours": Way({"layout": "packed", **_OURS}),
    "sealed": Way(_OURS, sealed=True),
    "incremental": Way(_SMALL, earlier=1),
    "sealed-incremental": Way(_SMALL, sealed=True, earlier=2),
    "streamed": Way(_OURS, streamed=True),
    "sealed-streamed": Way(_OURS, sealed=True, streamed=True),
}


# The whole matrix is a campaign, which sets this; the tests without it take two minutes.
WHOLE = "GPUSTASIS_WHOLE_TREES"


def chosen(all_of_them: Iterable[str], some: Iterable[str]) -> list[str]:
    """What the tests take of a table: all of it in the campaign."""
    return list(all_of_them if os.environ.get(WHOLE) else some)


class WholeTree(SteadyJob):
    """pids: every process of the tree, the first one first."""

    def __init__(
        self,
        program: Path,
        log: Path,
        environ: Mapping[str, str],
        disk: Path,
        tmpfs: Path,
        **options: object,
    ) -> None:
        """Start it, in these two directories; it has made two rounds when this returns. options:
        the program's, with "_" for "-"."""
        words = [
            word
            for name, value in options.items()
            for word in (f"--{name.replace('_', '-')}", str(value))
        ]
        argv = (program, "--disk", disk, "--tmpfs", tmpfs, *words)
        Job.__init__(self, argv, log, environ)
        self._ends = {}
        self.pids = (self.pid,)
        try:
            self._await_rounds(2)
            self.pids = (self.pid, *sorted(set(_of_session(self.pid)) - {self.pid}))
        except BaseException:
            self.pids = (self.pid, *_of_session(self.pid))
            self.end()
            raise
        assert len(self.pids) == PROCESSES, self.output()[-500:]

    def rounds(self) -> int:
        """In which all was right. Fails if the job has said anything else."""
        said = self.output()
        whole = said[: said.rfind("\n") + 1]  # the last may still be on its way into the file
        numbers = rounds_said(whole.splitlines())
        assert numbers[:1] in ([], [1])
        return len(numbers)

    def run_on(self, steps: int = 2, timeout_s: float = ROUND_S, without: object = ()) -> None:
        """Wait until it has made that many rounds more, in which all of it was right. The first
        may have begun before the checkpoint."""
        self._await_rounds(self.rounds() + steps, timeout_s)
        assert not without and len(self.alive_pids()) == PROCESSES, self.output()[-500:]

    def run_on_elsewhere(self, steps: int = 2, timeout_s: float = ROUND_S) -> None:
        wanted, deadline = self.rounds() + steps, time.monotonic() + timeout_s
        while self.rounds() < wanted:
            assert time.monotonic() < deadline, f"it does not run on:\n{self.output()[-500:]}"
            time.sleep(POLL_S)

    def _await_rounds(self, wanted: int, timeout_s: float = ROUND_S) -> None:
        deadline = time.monotonic() + timeout_s
        while self.rounds() < wanted:
            if not self.alive() or time.monotonic() > deadline:
                assert self.rounds() >= wanted, f"it does not run on:\n{self.output()[-500:]}"
            time.sleep(POLL_S)


def rounds_said(lines: Iterable[str]) -> list[int]:
    """The numbers of the rounds that a job has said to be right: each of them once, in their
    order, of as many processes and threads as the first. Fails if it has said anything else."""
    found: list[tuple[int, ...]] = []
    for line in lines:
        if line.startswith(_EMULATOR) or not line:
            continue
        match = _ROUND.fullmatch(line)
        assert match is not None, f"the job says {line!r}"
        found.append(tuple(map(int, match.groups())))
    for before, after in itertools.pairwise(found):
        assert after[0] == before[0] + 1 and after[1:] == before[1:], (before, after)
    assert all(one[1] == PROCESSES for one in found)
    return [one[0] for one in found]


def numbers_of(memory: str, page: int) -> bytes:
    """Some that the program, with no seed given, has in that page: of "private" of the process
    WRONG_IN, or of what all share."""
    seeds = {"private": _word(1, 1000 + WRONG_IN), "shared": _word(1 + 997, 0)}
    first = page * 512 + 256
    numbers = (_word(seeds[memory], i) for i in range(first, first + 16))
    return b"".join(number.to_bytes(8, "little") for number in numbers)


def _word(seed: int, i: int) -> int:
    """As in whole_tree_memory.h."""
    mask = (1 << 64) - 1
    number = (seed + (i + 1) * 0x9E3779B97F4A7C15) & mask
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & mask
    return number ^ number >> 29


@contextmanager
def whole_tree(
    program: Path, scratch: Path, environ: Mapping[str, str], **options: object
) -> Iterator[WholeTree]:
    """One with files in `scratch` and in memory, for the length of a with statement."""
    disk = Path(tempfile.mkdtemp(prefix="disk-", dir=scratch))
    tmpfs = Path(tempfile.mkdtemp(prefix="gpustasis-tree-", dir="/dev/shm"))
    try:
        job = WholeTree(program, disk / "job.log", environ, disk, tmpfs, **options)
        try:
            yield job
        finally:
            job.end()
    finally:
        shutil.rmtree(tmpfs)


def _of_session(session: int) -> Iterable[int]:
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            stat = (entry / "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        fields = stat[stat.rindex(")") + 2 :].split()
        if int(fields[3]) == session and fields[0] not in "ZX":
            yield int(entry.name)
