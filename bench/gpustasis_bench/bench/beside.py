# SPDX-License-Identifier: Apache-2.0
"""What a dump costs beside its time: memory of the host, and the drain that follows one whose
images lie in memory, with what that takes from other programs."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Self

from gpustasis_bench.bench.contenders import Variant
from gpustasis_bench.bench.content import Content
from gpustasis_bench.bench.course import Course
from gpustasis_bench.bench.medium import Medium
from gpustasis_bench.bench.statistics import paired_ratio
from gpustasis_bench.bench.target import Target
from gpustasis_bench.bench.timing import TimedRun, run_timed
from gpustasis_bench.errors import BenchError

_MANIFEST = "gpustasis-manifest.img"
_DRAIN_S = 600.0
_NEIGHBOUR_S = 20.0  # so long that the machine's own changes matter less
_DRAIN_SHARE = 1.25  # the rate limit makes a drain of noise take so many times as long as that
_SAMPLE_S = 0.01
_SPINNER = """
import sys, time
rounds, begin = 0, time.perf_counter()
while time.perf_counter() - begin < float(sys.argv[1]):
    for _ in range(20000):
        pass
    rounds += 1
print(rounds / (time.perf_counter() - begin))
"""


@dataclass(frozen=True, slots=True)
class Usage:
    """Of a process that is at work: bytes that it has written, seconds of a processor."""

    written_bytes: int
    cpu_seconds: float

    @classmethod
    def of(cls, pid: int) -> Self:
        """Raises BenchError if it has ended."""
        try:
            told = Path(f"/proc/{pid}/io").read_text()
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError as exc:
            raise BenchError(f"process {pid} has ended: {exc.strerror}") from exc
        fields = dict(line.split(": ") for line in told.splitlines())
        ticks = stat[stat.rindex(")") + 2 :].split()[11:13]  # utime and stime
        seconds = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
        return cls(written_bytes=int(fields["wchar"]), cpu_seconds=seconds)


def drain(
    course: Course,
    images: Path,
    rate_limit: int | None = None,
    on_start: Callable[[int], object] | None = None,
) -> TimedRun:
    """Bring a checkpoint from memory to its directory. rate_limit: bytes a second. on_start: is
    told its pid.

    Raises BenchError if it was there already, or is not there afterwards: then something else was
    measured.
    """
    if (images / _MANIFEST).exists():
        raise BenchError(f"{images} has its manifest before the drain: it was not in memory")
    words = [sys.executable, "-m", "gpustasis", "drain", str(images)]
    words += [] if rate_limit is None else ["--rate-limit", str(rate_limit)]
    output = course.checkpointing.logs / "drain.txt"
    drained = run_timed(words, course.environ, output, _DRAIN_S, on_start=on_start)
    if not (images / _MANIFEST).exists():
        raise BenchError(f"{images} has no manifest after the drain")
    return drained


def measure_neighbours(
    course: Course, target: Target, medium: Medium, each: Variant, content: Content, pairs: int
) -> dict[str, Any]:
    """Rounds a second of programs that keep all processors busy, `pairs` times alone and beside a
    drain of `each`, which is limited to a rate. target: holds the content. window_bytes_per_second,
    window_cpu_seconds: what the drain has written and used while the programs were looked at: they
    leave it less than its limit.

    Raises BenchError if a drain ends before the programs beside it were looked at.
    """
    rate = int(content.gpu_bytes / (_DRAIN_SHARE * _NEIGHBOUR_S))
    alone: list[float] = []
    beside: list[float] = []
    drains: list[TimedRun] = []
    used: list[Usage] = []
    wanted = target.digests()
    for pair in range(pairs):
        with course.images(medium) as images:
            course.leave_running_into(images, target, wanted, each.contender)
            if pair % 2 == 0:
                alone.append(spin(_NEIGHBOUR_S))
            pids: list[int] = []
            with ThreadPoolExecutor(1) as pool:
                draining = pool.submit(drain, course, images, rate, pids.append)
                beside.append(spin(_NEIGHBOUR_S))
                if not draining.done():
                    used.append(Usage.of(pids[0]))
                drains.append(draining.result())
            seconds = drains[-1].seconds
            if len(used) <= pair:
                raise BenchError(
                    f"{each.name}: a drain at {rate} bytes/s ended after {seconds:.1f} s; the "
                    f"programs beside it were looked at for {_NEIGHBOUR_S:.0f} s"
                )
            if pair % 2 == 1:
                alone.append(spin(_NEIGHBOUR_S))
        course.say(f"a program beside the drain: {beside[-1] / alone[-1]:.3f} of alone")
    return {
        "workload": content.workload,
        "contender": each.name,
        "rate_limit_bytes": rate,
        "window_seconds": _NEIGHBOUR_S,
        "window_bytes_per_second": round(median(one.written_bytes for one in used) / _NEIGHBOUR_S),
        "window_cpu_seconds": round(median(one.cpu_seconds for one in used), 2),
        "drain_seconds": round(median(each.seconds for each in drains), 6),
        "drain_cpu_seconds": round(median(each.cpu_seconds for each in drains), 6),
        "rounds_per_second": {"alone": median(alone), "beside": median(beside)},
        "ratio": paired_ratio(beside, alone).as_dict(),
    }


def spin(seconds: float) -> float:
    """Rounds a second of a program on each processor of this process, which all are busy for so
    long: the sum over them. Raises BenchError if one of them fails."""
    programs: list[tuple[int, int]] = []
    for _ in os.sched_getaffinity(0):
        reader, writer = os.pipe()
        words = [sys.executable, "-I", "-S", "-c", _SPINNER, str(seconds)]
        actions = [(os.POSIX_SPAWN_DUP2, writer, 1)]
        programs.append((os.posix_spawn(words[0], words, os.environ, file_actions=actions), reader))
        os.close(writer)
    total = 0.0
    for pid, reader in programs:
        with os.fdopen(reader) as told:
            said = told.read()
        _, status = os.waitpid(pid, 0)
        if status != 0 or not said:
            raise BenchError(f"a program that keeps a processor busy ended with status {status}")
        total += float(said)
    return total


class InMemory:
    """How many bytes these folders of tmpfses hold at most while the with statement lasts: what
    they held before, files that are kept to be written again included, and what their file systems
    have grown by. Nobody else may write to those meanwhile."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._held = sum(
            path.stat().st_blocks * 512
            for folder in dict.fromkeys(folders)
            for path in folder.rglob("*")
            if path.is_file()
        )
        self._growth = 0
        self._devices = {folder.stat().st_dev: folder for folder in folders}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._before = self._used()

    @property
    def most(self) -> int:
        return self._held + self._growth

    def _used(self) -> int:
        found = [os.statvfs(folder) for folder in self._devices.values()]
        return sum((each.f_blocks - each.f_bfree) * each.f_frsize for each in found)

    def _watch(self) -> None:
        while not self._ended.wait(_SAMPLE_S):
            self._growth = max(self._growth, self._used() - self._before)

    def __enter__(self) -> Self:
        if self._devices:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._devices:
            self._thread.join()
            self._growth = max(self._growth, self._used() - self._before)
