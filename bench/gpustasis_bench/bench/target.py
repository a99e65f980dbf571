# SPDX-License-Identifier: Apache-2.0
"""The process that is dumped and restored; target.c is its program."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpustasis_bench.errors import BenchError

_POLL_S = 0.005
_TIMEOUT_S = 600.0  # 2 GiB are loaded in seconds; a machine that swaps takes long


class Target:
    """One such process, in a session of its own. It may be killed by a dump and be restored under
    the same pid; this process, a subreaper, is its parent then too."""

    def __init__(
        self,
        program: Path,
        folder: Path,
        environ: Mapping[str, str],
        tasks: int = 1,
        arguments: Sequence[str] | None = None,
        *,
        gpu: bool = True,
    ) -> None:
        """Start it in the new folder `folder`, as a tree of so many processes that all use the GPU.

        arguments: the program's; None: those of target.c for so many. gpu False: it is another
        program, whose processes use none. Raises BenchError if it cannot use the GPU.
        """
        folder.mkdir(parents=True)
        self.tasks = tasks
        self.gpu_tasks = tasks if gpu else 0
        self._folder = folder.absolute()
        self._dead = False
        output = str(self._folder / "output.txt")
        write = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        # posix_spawn has no working directory: the shell changes it and becomes the program.
        if arguments is None:
            arguments = (str(tasks),) if tasks > 1 else ()
        shell = ["/bin/sh", "-c", 'cd "$1" && shift && exec "$@"', "sh", str(self._folder)]
        words = [*shell, str(program), *arguments]
        self.pid = os.posix_spawn(
            words[0],
            words,
            dict(environ),
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, output, write, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
                *_close_others(),
            ],
            setsid=True,
        )
        self._pids = {
            place: int(self._await_answer(place).split()[1])
            for place in (self._folder, *(self._folder / f"task-{n}" for n in range(1, tasks)))
        }

    def load(self, layout: Path) -> None:
        """Bring it into the state that the file describes."""
        self._ask(f"load {layout}")

    def digest(self) -> str:
        """A hash of all of its GPU memory, as it is now, and its size."""
        return self._ask("hash")

    def digests(self) -> list[str]:
        """The same of each task."""
        return [self._ask("hash", place) for place in self._pids]

    def spread(self, gpus: int, size: int) -> None:
        """Have each task hold `size` bytes of noise on each of `gpus` GPUs, its own first."""
        for place in self._pids:
            self._ask(f"spread {gpus} {size}", place)

    def hold(self, size: int) -> None:
        """Have it hold `size` bytes of CPU memory as well, of which half compress."""
        self._ask(f"hold {size}")

    def resident_bytes(self) -> int:
        """The anonymous memory that all its processes have. Pages of files come when they are
        used, and say nothing."""
        found = 0
        for pid in self._pids.values():
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Anonymous:"):
                    found += int(line.split()[1]) << 10
        return found

    def reset_peak(self) -> int:
        """Forget how much memory its processes have had at most; the bytes that they have now."""
        for pid in self._pids.values():
            Path(f"/proc/{pid}/clear_refs").write_text("5\n", encoding="ascii")  # proc(5)
        return sum(_status_bytes(pid, "VmRSS") for pid in self._pids.values())

    def peak_bytes(self) -> int:
        """The most that each has had since `reset_peak`, summed over them."""
        return sum(_status_bytes(pid, "VmHWM") for pid in self._pids.values())

    def change(self, percent: int, seed: int) -> int:
        """Overwrite that share of its GPU memory, always the same blocks, with noise that only this
        seed makes; how many bytes that is."""
        return int(self._ask(f"change {percent} {seed}"))

    def watch(self) -> None:
        """Have each task touch its GPU twice in a millisecond, until `gap_seconds`."""
        for place in self._pids:
            self._ask("watch", place)

    def gap_seconds(self) -> float:
        """The longest time between two touches, of the task that waited longest."""
        return max(int(self._ask("gap", place)) for place in self._pids) / 1e9

    def await_killed(self) -> None:
        """Reap it after a dump has killed it: its pid must be free when it comes back."""
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        for pid in self._pids.values():  # the others are our children now
            if pid != self.pid:
                os.waitpid(pid, 0)
        self._dead = True
        if status != -signal.SIGKILL:
            raise BenchError(f"the target was not killed by the dump, it ended with {status}")

    def expect_restored(self, pid: int) -> None:
        """criu says that it has restored it as `pid`."""
        if pid != self.pid:
            raise BenchError(f"criu restored process {pid}, not {self.pid}")
        self._dead = False

    def kill(self) -> None:
        """End it if it lives."""
        if self._dead:
            return
        for pid in self._pids.values():  # the first one first: then the others are our children
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            except (ProcessLookupError, ChildProcessError):
                pass
        self._dead = True

    def _ask(self, request: str, place: Path | None = None) -> str:
        place = place or self._folder
        (place / "answer").unlink(missing_ok=True)
        (place / "request").write_text(request + "\n", encoding="utf-8")
        os.kill(self._pids[place], signal.SIGUSR1)
        return self._await_answer(place)

    def _await_answer(self, place: Path) -> str:
        path = place / "answer"
        deadline = time.monotonic() + _TIMEOUT_S
        while not path.exists():
            if self._ended():
                raise BenchError(f"the target ended: {self._said()}")
            if time.monotonic() > deadline:
                raise BenchError(f"the target gave no answer in {_TIMEOUT_S:.0f} s")
            time.sleep(_POLL_S)
        word, _, rest = path.read_text(encoding="utf-8", errors="replace").strip().partition(" ")
        if word != "ok":
            raise BenchError(f"the target failed: {rest}")
        return rest

    def _ended(self) -> bool:
        try:
            pid, _ = os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:  # restored by a criu whose child has not come to us yet
            return not Path(f"/proc/{self.pid}").exists()
        self._dead = self._dead or pid != 0
        return pid != 0 and not (self._folder / "answer").exists()

    def _said(self) -> str:
        path = self._folder / "output.txt"
        return path.read_text(errors="replace").strip()[-400:] or "it said nothing"


def _status_bytes(pid: int, key: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) << 10
    raise BenchError(f"/proc/{pid}/status has no {key}")


def _close_others() -> list[tuple[int, int]]:
    """What this process has open would be dumped with the target, and may not be dumpable."""
    inheritable = []
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        try:
            if number > 2 and os.get_inheritable(number):
                inheritable.append((os.POSIX_SPAWN_CLOSE, number))
        except OSError:  # listdir's own, closed by now
            continue
    return inheritable
