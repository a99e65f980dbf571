# SPDX-License-Identifier: Apache-2.0
"""CPU memory in images of ours, of dumps and restores that fail or are killed: no job loses a byte
by its dump, and none runs that lacks memory."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path

from campaigns.rig import Rig
from campaigns.steady_job import SteadyJob, exit_status, is_alive, process_state
from gpustasis._core import MemoryKind, image_name
from support.cpu_memory import FIRST_CHECKPOINT, OURS, refused, running

DUMP_KILLS = 8
RESTORE_KILLS = 4  # in each part of a restore
TRIALS = 10 * RESTORE_KILLS
FUTEX = "202"  # the number of the system call on x86-64
# In criu's log of a dump:
CRIU_IN_TASKS = "Dumping task (pid:"
ALL_DUMPED = "Writing image inventory"
AT_THE_END = "post-dump"  # what criu calls a script with
# In that of a restore:
ALL_WAIT = "Unlock network"  # in CRIU's code, for a word of its
ALL_HELD = " was trapped"  # by criu, which has attached to all
PLUGIN_ASKED = "Run late stage hook"
FILLED = " MiB of CPU memory of pid "


def test_an_image_that_cannot_be_written_leaves_the_job_exact(
    newest_rig: Rig, memory_job: Path
) -> None:
    with running(newest_rig, memory_job, mib=40) as job:
        images = newest_rig.images()
        (images / image_name(job.pid, MemoryKind.CPU)).mkdir()  # the image cannot get its name
        log = refused(newest_rig.dump(job, images, config=OURS))
        assert image_name(job.pid, MemoryKind.CPU) in log
        job.run_on()


def test_a_dump_that_fails_late_leaves_the_job_exact(
    newest_rig: Rig, memory_job: Path, tmp_path: Path
) -> None:
    """Criu fails once all CPU memory is in images of ours: first when it begins with a process,
    last when it has written all."""
    script = tmp_path / "script"
    script.write_text(f'#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" != {AT_THE_END} ]\n')
    script.chmod(0o700)
    with running(newest_rig, memory_job, mib=40, children=1) as job:
        first, second = job.pids
        for point in (
            "pages-1.img",
            f"core-{first}.img",
            f"core-{second}.img",
            "inventory.img",
            "",
        ):
            images = newest_rig.images()
            extra = []
            if point:
                (images / point).mkdir()  # what criu writes there, it cannot
            else:
                extra = ["--action-script", str(script)]
            log = refused(newest_rig.dump(job, images, *extra, config=OURS))
            assert (point or AT_THE_END) in log
            for pid in job.pids:
                begun, stored = log.index(CRIU_IN_TASKS), log.index(f"CPU memory of pid {pid} in ")
                assert stored < begun, point
            job.threads()  # none is traced
            job.run_on()
            record = json.loads((images / "gpustasis-dump.json").read_text())
            assert record["result"] == "failed", point
        images = newest_rig.images()
        assert newest_rig.dump(job, images, config=OURS).status == 0
        job.wait()
        assert newest_rig.restore(images).status == 0
        job.run_on()


def test_criu_killed_in_the_dump_leaves_the_job_exact(rig: Rig, memory_job: Path) -> None:
    """While the plugin stores memory, and when all is dumped. In between CRIU's own code stands in
    the tasks: one that it stands in when criu dies is lost, with stock CRIU too."""
    moments = random.Random(4)
    count = rig.scratch / "system-calls"
    with running(rig, memory_job, mib=40, children=1) as job:

        def dump(number: int, mark: str) -> int:
            """Killing criu at that system call behind `mark` in its log; how many it made."""
            images = rig.images()
            killer = [str(rig.programs.killer), str(count), str(number), "-", mark]
            words = [*killer, *rig.dump_words(job, images, ["--leave-running"])]
            ended = rig.run(words, images, "dump", OURS)
            assert ended.status in (0, 137), ended.errors
            shutil.rmtree(images, ignore_errors=True)  # a hundred would fill a disk
            return int(count.read_text())

        in_tasks, after = dump(0, CRIU_IN_TASKS), dump(0, ALL_DUMPED)
        ranges = {FIRST_CHECKPOINT: dump(0, FIRST_CHECKPOINT) - in_tasks, ALL_DUMPED: after}
        job.run_on(1)
        for mark, calls in ranges.items():
            for part in range(DUMP_KILLS):
                dump(1 + int((part + moments.random()) * calls / DUMP_KILLS), mark)
                job.run_on(1)
        # No memory is missing: no dump is refused, and it holds what it should.
        images = rig.images()
        assert rig.dump(job, images, config=OURS).status == 0
        job.wait()
        assert rig.restore(images).status == 0
        job.run_on()


def test_criu_killed_in_the_restore_leaves_no_process_that_lacks_memory(
    rig: Rig, memory_job: Path
) -> None:
    """In each part of it, from where all processes stand in CRIU's code to the end."""
    with running(rig, memory_job, mib=20, children=1, threads=1) as job:
        images = rig.images()
        assert rig.dump(job, images, config=OURS).status == 0
        job.wait()
        killed = RestoreKills(rig, job, images)
        killed.measure()
        for part in killed.parts:
            for _ in range(TRIALS):
                if killed.hits.count(part) == RESTORE_KILLS:
                    break
                killed.aim_at(part)
            assert killed.hits.count(part) >= RESTORE_KILLS, killed.hits
        killed.restore("", 0)
        job.run_on()


class RestoreKills:
    """Restores of one checkpoint in which criu is killed.

    parts: each begins with the line of criu's log that is its name. hits: in which of them the
    kills were, by the log."""

    def __init__(self, rig: Rig, job: SteadyJob, images: Path) -> None:
        self.rig, self.job, self.images = rig, job, images
        self.parts: list[str] = []
        self.hits: list[str] = []
        self._calls: dict[str, int] = {}
        self._output = job.log.read_bytes()
        self._moments = random.Random(5)

    def measure(self) -> None:
        """How many system calls criu makes in each part, in restores that are left alone."""
        filled = [line for line in self.restore("", 0).splitlines() if FILLED in line]
        assert len(filled) == len(self.job.pids)
        self.job.run_on()
        first, last = (line[line.index(FILLED) :] for line in filled)
        self.parts = [ALL_WAIT, ALL_HELD, PLUGIN_ASKED, first, last]
        left = []
        for part in self.parts:
            end(self.job)
            self.restore(part, 0)
            left.append(self._count())
            self.job.run_on()
        end(self.job)
        ends = [*left[1:], 0]
        self._calls = {
            part: begin - end for part, begin, end in zip(self.parts, left, ends, strict=True)
        }
        assert min(self._calls.values()) > 0, self._calls

    def aim_at(self, part: str) -> None:
        """Kill criu there, or near it, and see what has become of the job."""
        log = self.restore(part, self._moments.randint(1, self._calls[part]))
        hit = next((one for one in reversed(self.parts) if one in log), "")
        self.hits.append(hit)
        if hit == self.parts[-1]:
            self._require_exact()
        else:
            self._require_never_run(held=hit != ALL_WAIT)
        end(self.job)

    def restore(self, mark: str, number: int) -> str:
        """Killing criu at that system call behind `mark` in its log, 0: at none; its log."""
        self.job.log.write_bytes(self._output)  # CRIU wants a file to have the size that it had
        killer = [str(self.rig.programs.killer), str(self._counted), str(number), "-", mark]
        copy = self.rig.copy(self.images)
        ended = self.rig.run([*killer, *self.rig.restore_words(copy)], copy, "restore")
        assert ended.status == 0 or (number and ended.status == 137), ended.errors
        shutil.rmtree(copy)
        return ended.log

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
        deadline = time.monotonic() + 10
        while any(process_state(pid) in ("t", "T") for pid in self.job.pids):
            assert time.monotonic() < deadline, "a process stands still"
            time.sleep(0.01)
        self.job.run_on(without=[pid for pid in self.job.pids if not is_alive(pid)])
        for pid in self.job.pids:
            if process_state(pid) == "Z":
                assert exit_status(pid) == -signal.SIGKILL

    @property
    def _counted(self) -> Path:
        return self.rig.scratch / "system-calls"

    def _count(self) -> int:
        return int(self._counted.read_text())


def calls_of(pid: int) -> list[str]:
    """The number of the system call in which each thread waits."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [task.joinpath("syscall").read_text().split()[0] for task in tasks]


def end(job: SteadyJob) -> None:
    """Its processes, and not the record of what they have said."""
    for pid in job.pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while any(process_state(pid) for pid in job.pids):
        assert time.monotonic() < deadline
        job.reap()
        time.sleep(0.01)
