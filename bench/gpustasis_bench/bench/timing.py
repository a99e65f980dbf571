# SPDX-License-Identifier: Apache-2.0
"""One criu, timed to the microsecond, with the memory that it took."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpustasis_bench.errors import BenchError

HELPER_COMM = "gpustasis-"  # of the worker and the guardians: shed_criu of src/cuda_plugin
_SAMPLE_S = 0.01
_SAMPLES_PER_LOOK = 5  # for workers, which is dearer, and takes processors from what is measured
_PROC = Path("/proc")
_STATUS_BYTES = 8192
_HELPERS_END_S = 10.0  # after criu; then something is wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRun:
    """A program that has ended well. peak_rss_bytes: its own and, where asked for, that of the
    plugin's worker and guardians, each at its highest. cpu_seconds: user and system, of the same
    and of the children that they have waited for."""

    seconds: float
    peak_rss_bytes: int
    cpu_seconds: float


def run_timed(
    words: Sequence[str],
    environ: Mapping[str, str],
    output: Path,
    timeout_s: float,
    *,
    with_worker: bool = False,
    on_start: Callable[[int], object] | None = None,
) -> TimedRun:
    """Run a program to its end. What it prints goes to `output`. on_start: is told its pid.

    Raises BenchError if it fails or takes longer than timeout_s; it is killed then.
    """
    write = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    others = _processes()
    begin = time.perf_counter()
    pid = os.posix_spawnp(
        words[0],
        list(words),
        dict(environ),
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(output), write, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
    )
    if on_start is not None:
        on_start(pid)
    watch = _Watch(pid, begin + timeout_s, others if with_worker else None)
    watch.start()
    try:
        _, status, usage = os.wait4(pid, 0)  # no polling: it would blur the time
        seconds = time.perf_counter() - begin
    finally:
        watch.stop()
    cpu_seconds = usage.ru_utime + usage.ru_stime
    if with_worker:
        cpu_seconds += sum(_cpu_of_helper(helper) for helper in watch.helpers())
    code = os.waitstatus_to_exitcode(status)
    if code != 0:
        said = output.read_text(errors="replace").strip()[-600:]
        late = f" (killed after {timeout_s:.0f} s)" if watch.timed_out else ""
        raise BenchError(f"{words[0]} ended with {code}{late}: {said}")
    return TimedRun(
        seconds=seconds, peak_rss_bytes=watch.peak_bytes, cpu_seconds=round(cpu_seconds, 6)
    )


def _cpu_of_helper(pid: int) -> float:
    """User and system seconds of a child of ours that is about to end, and reap it."""
    deadline = time.monotonic() + _HELPERS_END_S
    while True:
        try:
            ended, _, usage = os.wait4(pid, os.WNOHANG)
        except ChildProcessError:
            raise BenchError(f"process {pid} of the plugin's is no child of this one") from None
        if ended == pid:
            return usage.ru_utime + usage.ru_stime
        if time.monotonic() > deadline:
            raise BenchError(f"process {pid} of the plugin's outlives criu by {_HELPERS_END_S} s")
        time.sleep(_SAMPLE_S)


def _processes() -> set[str]:
    return {name for name in os.listdir(_PROC) if name.isdigit()}


class _Watch(threading.Thread):
    """Reads the kernel's high-water marks. The rusage of a child is of no use: it begins with the
    memory of the process that made it."""

    def __init__(self, pid: int, deadline: float, others: set[str] | None) -> None:
        """others: what was there before it; None: what it has made is not looked for."""
        super().__init__(daemon=True)
        self.timed_out = False
        self._pid = pid
        self._deadline = deadline
        self._ended = threading.Event()
        self._others = others
        self._watched = {str(pid): _HighWater(str(pid))}

    @property
    def peak_bytes(self) -> int:
        return sum(each.peak_bytes for each in self._watched.values())

    def run(self) -> None:
        samples = 0
        while not self._ended.wait(_SAMPLE_S):
            if self._others is not None and samples % _SAMPLES_PER_LOOK == 0:
                self._look_for_helpers()
            samples += 1
            for each in self._watched.values():
                each.sample()
            if time.perf_counter() > self._deadline:
                self.timed_out = True
                os.kill(self._pid, signal.SIGKILL)
                return

    def helpers(self) -> list[int]:
        """The worker and the guardians, which are this process's children when criu has ended."""
        return [int(pid) for pid in self._watched if int(pid) != self._pid]

    def stop(self) -> None:
        self._ended.set()
        self.join()
        if self._others is not None:
            self._look_for_helpers()  # what has begun since the last look
        for each in self._watched.values():
            each.close()

    def _look_for_helpers(self) -> None:
        for pid in _processes() - (self._others or set()) - self._watched.keys():
            try:
                name = (_PROC / pid / "comm").read_text().strip()
                stat = (_PROC / pid / "stat").read_text()
            except OSError:  # it has ended
                continue
            # criu's grandchild comes to us, the subreaper; not the worker of another's criu.
            parent = int(stat[stat.rindex(")") + 2 :].split()[1])
            if name.startswith(HELPER_COMM) and parent in (self._pid, os.getpid()):
                self._watched[pid] = _HighWater(pid)


class _HighWater:
    """The most memory that one process had, as far as it was sampled; 0 if it was gone before."""

    def __init__(self, pid: str) -> None:
        self.peak_bytes = 0
        try:
            self._status: int | None = os.open(_PROC / pid / "status", os.O_RDONLY)
        except OSError:
            self._status = None

    def sample(self) -> None:
        if self._status is None:
            return
        try:
            status = os.pread(self._status, _STATUS_BYTES, 0)
        except OSError:  # it is gone
            return
        _, found, rest = status.partition(b"VmHWM:")
        if found:
            self.peak_bytes = max(self.peak_bytes, int(rest.split(maxsplit=1)[0]) << 10)

    def close(self) -> None:
        if self._status is not None:
            os.close(self._status)
            self._status = None
