# SPDX-License-Identifier: Apache-2.0
"""criu is killed at many points of a restore: nothing that lacks memory runs."""

from __future__ import annotations

import random
import shutil
import signal
import time
from pathlib import Path

from campaigns.rig import Rig
from campaigns.steady_job import SteadyJob, exit_status, is_alive, process_state
from support.cpu_memory import end_processes

FUTEX = "202"  # the number of the system call on x86-64
FEW = 20
# In criu's log of a restore:
ALL_WAIT = "Unlock network"  # in CRIU's code, for a word of its
ALL_HELD = " was trapped"  # by criu, which has attached to all
PLUGIN_ASKED = "Run late stage hook"
FILLED = " MiB of CPU memory of pid "
PLUGIN_DONE = "Running pre-resume scripts"  # criu is about to detach from all
DETACHED = "Restore finished successfully"


class RestoreKills:
    """Restores of one checkpoint in which criu is killed.

    parts: each begins with the line of criu's log that is its name. hits: in which of them the
    kills were, by the log. together: a process of the job waits for the others at each step."""

    def __init__(self, rig: Rig, job: SteadyJob, images: Path, *, together: bool = False) -> None:
        self.rig, self.job, self.images = rig, job, images
        self._together = together
        self.parts: list[str] = []
        self.hits: list[str] = []
        self._calls: dict[str, int] = {}
        self._output = job.log.read_bytes()
        self._moments = random.Random(5)

    def measure(self) -> None:
        """How many system calls criu makes in each part, in restores that are left alone."""
        filled = [line for line in self.restore("", 0).splitlines() if FILLED in line]
        assert filled
        self.job.run_on()
        names = (line[line.index(FILLED) :] for line in filled)
        self.parts = [ALL_WAIT, ALL_HELD, PLUGIN_ASKED, *names]
        left = []
        for part in self.parts:
            end_processes(self.job)
            self.restore(part, 0)
            left.append(self._count())
            self.job.run_on()
        end_processes(self.job)
        assert min(left) > 0, left
        lengths = (begin - end for begin, end in zip(left, [*left[1:], 0], strict=True))
        # What two restores differ by may be more than a short part has.
        self._calls = {
            part: max(length, FEW) for part, length in zip(self.parts, lengths, strict=True)
        }

    def hit_all(self, count: int) -> None:
        """Kills in each part, so many, and one when all memory is there."""
        for part in self.parts:
            for _ in range(10 * count):
                if self.hits.count(part) >= count:
                    break
                self.aim_at(part)
            assert self.hits.count(part) >= count, self.hits
        self._hit_complete()

    def aim_at(self, part: str) -> None:
        """Kill criu there, or near it, and see what has become of the job."""
        log = self.restore(part, self._moments.randint(1, self._calls[part]))
        hit = next((one for one in reversed(self.parts) if one in log), "")
        self.hits.append(hit)
        if hit == self.parts[-1]:
            self._require_exact()
        else:
            self._require_never_run(held=hit != ALL_WAIT)
        end_processes(self.job)

    def restore(self, mark: str, number: int) -> str:
        """Killing criu at that system call behind `mark` in its log, 0: at none; its log."""
        self.job.log.write_bytes(self._output)  # CRIU wants a file to have the size that it had
        killer = [str(self.rig.programs.killer), str(self._counted), str(number), "-", mark]
        copy = self.rig.copy(self.images)
        ended = self.rig.run([*killer, *self.rig.restore_words(copy)], copy, "restore")
        assert ended.status == 0 or (number and ended.status == 137), ended.errors
        shutil.rmtree(copy)
        return ended.log

    def _hit_complete(self) -> None:
        """Kill criu when all have their memory and it has let go of none yet: all run on."""
        log = self.restore(PLUGIN_DONE, 1)
        assert PLUGIN_DONE in log and DETACHED not in log, "criu was not killed there"
        self._require_none_stands()
        self.job.run_on()
        end_processes(self.job)

    def _require_never_run(self, *, held: bool) -> None:
        """held: criu has attached to all, and they die with it. Before that, what it has not
        attached to may wait in CRIU's code, for ever."""
        deadline = time.monotonic() + 10
        while any(self._may_run(pid, held) for pid in self.job.pids):
            assert time.monotonic() < deadline, "a process outlives criu, and lacks memory"
            time.sleep(0.01)
        for pid in self.job.pids:
            if process_state(pid) == "Z":
                assert exit_status(pid) == -signal.SIGKILL
        assert self.job.log.read_bytes() == self._output

    @staticmethod
    def _may_run(pid: int, held: bool) -> bool:
        try:
            return is_alive(pid) and (held or any(call != FUTEX for call in calls_of(pid)))
        except (FileNotFoundError, ProcessLookupError):
            return True  # it ends just now: to be looked at again

    def _require_exact(self) -> None:
        """All have their memory: whoever lives runs on."""
        self._require_none_stands()
        while True:
            dead = [pid for pid in self.job.pids if not is_alive(pid)]
            if self._together and dead:
                self.job.steps()  # what some may have made was right
                break
            try:
                self.job.run_on(without=dead)
                break
            except AssertionError:
                # A process that was killed with criu may have looked alive at first.
                if all(is_alive(pid) or pid in dead for pid in self.job.pids):
                    raise
        for pid in self.job.pids:
            if process_state(pid) == "Z":
                assert exit_status(pid) == -signal.SIGKILL

    def _require_none_stands(self) -> None:
        deadline = time.monotonic() + 10
        while any(process_state(pid) in ("t", "T") for pid in self.job.pids):
            assert time.monotonic() < deadline, "a process stands still"
            time.sleep(0.01)

    @property
    def _counted(self) -> Path:
        return self.rig.scratch / "system-calls"

    def _count(self) -> int:
        return int(self._counted.read_text())


def calls_of(pid: int) -> list[str]:
    """The number of the system call in which each thread waits."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [task.joinpath("syscall").read_text().split()[0] for task in tasks]
