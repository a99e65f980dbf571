"""One criu, timed to the microsecond, with the memory that it took."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cudackpt.bench.errors import BenchError

WORKER_COMM = "cudackpt-worker"  # src/cuda_plugin/worker_process.cpp
_SAMPLE_S = 0.01
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRun:
    """A program that has ended well. peak_rss_bytes: its own and, where asked for, the plugin's
    worker's, each at its highest."""

    seconds: float
    peak_rss_bytes: int


def run_timed(
    words: Sequence[str],
    environ: Mapping[str, str],
    output: Path,
    timeout_s: float,
    *,
    with_worker: bool = False,
) -> TimedRun:
    """Run a program to its end. What it prints goes to `output`.

    Raises BenchError if it fails or takes longer than timeout_s; it is killed then.
    """
    write = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
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
    watch = _Watch(pid, begin + timeout_s, with_worker)
    watch.start()
    try:
        _, status = os.waitpid(pid, 0)  # no polling: it would blur the time
        seconds = time.perf_counter() - begin
    finally:
        watch.stop()
    code = os.waitstatus_to_exitcode(status)
    if code != 0:
        said = output.read_text(errors="replace").strip()[-600:]
        late = f" (killed after {timeout_s:.0f} s)" if watch.timed_out else ""
        raise BenchError(f"{words[0]} ended with {code}{late}: {said}")
    return TimedRun(seconds=seconds, peak_rss_bytes=watch.peak_bytes)


class _Watch(threading.Thread):
    """Reads the kernel's high-water marks. The rusage of a child is of no use: it begins with the
    memory of the process that made it."""

    def __init__(self, pid: int, deadline: float, with_worker: bool) -> None:
        super().__init__(daemon=True)
        self.timed_out = False
        self._pid = pid
        self._deadline = deadline
        self._with_worker = with_worker
        self._ended = threading.Event()
        self._others = {name for name in os.listdir(_PROC) if name.isdigit()}
        self._workers: dict[str, int] = {}
        self._own = 0

    @property
    def peak_bytes(self) -> int:
        return self._own + sum(self._workers.values())

    def run(self) -> None:
        while not self._ended.wait(_SAMPLE_S):
            self._own = max(self._own, _high_water(str(self._pid)))
            if self._with_worker:
                self._look_for_workers()
            for pid in self._workers:
                self._workers[pid] = max(self._workers[pid], _high_water(pid))
            if time.perf_counter() > self._deadline:
                self.timed_out = True
                os.kill(self._pid, signal.SIGKILL)
                return

    def stop(self) -> None:
        self._ended.set()
        self.join()

    def _look_for_workers(self) -> None:
        for pid in os.listdir(_PROC):
            if not pid.isdigit() or pid in self._others:
                continue
            try:
                name = (_PROC / pid / "comm").read_text().strip()
                stat = (_PROC / pid / "stat").read_text()
            except OSError:  # it has ended
                continue
            # criu's grandchild comes to us, the subreaper; not the worker of another's criu.
            parent = int(stat[stat.rindex(")") + 2 :].split()[1])
            if name == WORKER_COMM and parent in (self._pid, os.getpid()):
                self._workers.setdefault(pid, 0)


def _high_water(pid: str) -> int:
    """Bytes; 0 when the process is gone."""
    try:
        for line in (_PROC / pid / "status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    return 0
