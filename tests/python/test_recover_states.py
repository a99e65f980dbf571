# SPDX-License-Identifier: Apache-2.0
"""recover: each state in which a process can be left, with each directory that can be named.

The table of docs/operating.md, "When a dump fails". What must never be: a process that runs on with
GPU memory that is not there.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from gpustasis._core import MANIFEST_NAME, find_checkpoint_record, find_drop_record
from support.checkpoint import Checkpointer
from support.criu_roots import preferred_criu
from support.job import TIMEOUT_S, Job, check_memory

Gpustasis = Callable[..., CompletedProcess[str]]
Generations = Callable[..., Job]
DriverCalls = Callable[..., None]
Abandon = Callable[..., None]

RUNS_AGAIN = "runs again"
NOTHING_SAYS = "nothing says that a dump into"
OTHER_DUMP = "does not hold that dump"
OTHER_PROCESS = "is of another process"
NOT_BROKEN_OFF = "was not broken off"
NO_DIRECTORY = "no record says into which directory"

# State -> directory named -> what recover says.
TABLE = {
    "locked": {
        "none": RUNS_AGAIN,
        "empty": RUNS_AGAIN,
        "other job": RUNS_AGAIN,
        "finished": NOT_BROKEN_OFF,
    },
    "dropped": {
        "none": RUNS_AGAIN,
        "right": RUNS_AGAIN,
        "used before": RUNS_AGAIN,
        "moved": RUNS_AGAIN,
        "copy": RUNS_AGAIN,
        "no manifest": RUNS_AGAIN,
        "empty": OTHER_DUMP,
        "other job": OTHER_DUMP,
        "finished": NOT_BROKEN_OFF,
        "finished copy": OTHER_DUMP,
    },
    "put back": {
        "none": RUNS_AGAIN,
        "right": RUNS_AGAIN,
        "moved": RUNS_AGAIN,
        "copy": RUNS_AGAIN,
        "no manifest": RUNS_AGAIN,
        "empty": OTHER_DUMP,
        "other job": OTHER_DUMP,
        "finished": NOT_BROKEN_OFF,
    },
    "not dropped": {
        "none": RUNS_AGAIN,
        "right": RUNS_AGAIN,
        "used before": RUNS_AGAIN,
        "moved": RUNS_AGAIN,
        "copy": RUNS_AGAIN,
        "no manifest": RUNS_AGAIN,
        "removed": RUNS_AGAIN,
        "empty": OTHER_DUMP,
        "other job": OTHER_DUMP,
        "finished": NOT_BROKEN_OFF,
    },
    "by a restore": {
        "none": NO_DIRECTORY,
        "right": OTHER_PROCESS,
        "no manifest": NOTHING_SAYS,
        "empty": NOTHING_SAYS,
        "other job": NOTHING_SAYS,
        "finished": NOT_BROKEN_OFF,
        "without images": NOTHING_SAYS,
    },
}
CASES = [(state, named, said) for state, row in TABLE.items() for named, said in row.items()]


class Left:
    """A process left in a state, and the directories that somebody could name for it."""

    def __init__(
        self,
        gpustasis: Gpustasis,
        generations: Generations,
        abandon: Abandon,
        driver_calls: DriverCalls,
        driver_state: Callable[[Job], str],
        checkpointer: Checkpointer,
        place: Path,
    ) -> None:
        self.gpustasis, self.abandon, self.driver_calls = gpustasis, abandon, driver_calls
        self.driver_state = driver_state
        self.checkpointer, self.place, self.generations = checkpointer, place, generations
        self.images = place / "images"
        self.images.mkdir(mode=0o700)
        self.job = generations()

    def bring_about(self, state: str, named: str) -> None:
        if named.startswith("finished"):
            self._dump("finished")
        if named == "without images":
            self._dump(named, plugin={"externalize": False})
            (self.place / named / "gpustasis-dump.json").unlink()
        if named == "used before":  # by an earlier dump of the same process
            self.checkpointer.dump(self.job, self.images, leave_running=True)
        if state == "locked":
            self.driver_calls(self.job, "lock")
        elif state == "by a restore":
            # As one that was killed leaves it: no dump has had it checkpointed.
            self.checkpointer.dump(self.job, self.images)
            self.checkpointer.restore(self.job, self.images)
            (self.images / "gpustasis-dump.json").unlink()
            self.driver_calls(self.job, "lock", "checkpoint")
        else:
            self.abandon(
                self.job,
                self.images,
                drops=state != "not dropped",
                with_guardians=state != "put back",
            )
            self._await_record(there=state == "dropped")

    def _dump(self, named: str, **options: Any) -> None:
        """One that comes to its end."""
        (self.place / named).mkdir()
        self.checkpointer.dump(self.job, self.place / named, leave_running=True, **options)

    def _await_record(self, *, there: bool) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while (find_drop_record(self.job.pid) is not None) != there:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def directory(self, named: str) -> list[str | Path]:
        """Arguments of recover."""
        other = self.place / named
        match named:
            case "none":
                return []
            case "right" | "used before":
                other = self.images
            case "no manifest":
                other = self.images
                (other / MANIFEST_NAME).unlink(missing_ok=True)
            case "removed":
                shutil.rmtree(self.images)
                return []
            case "moved":
                self.images.rename(other)
            case "copy":
                shutil.copytree(self.images, other)
            case "finished copy":
                shutil.copytree(self.place / "finished", other)
                (other / "gpustasis-dump.json").unlink()
            case "empty":
                other.mkdir()
            case "other job":
                other.mkdir()
                self.abandon(self.generations(seed=2), other)
        return ["-D", other]

    def seen(self) -> tuple[object, ...]:
        """The driver's state of the process, and what is recorded of it."""
        records = (find_drop_record(self.job.pid), find_checkpoint_record(self.job.pid))
        kept = (one and (one.directory, one.checkpoint_id, one.digest) for one in records)
        return (self.driver_state(self.job), *kept)

    def recover(self, *words: str | Path) -> CompletedProcess[str]:
        return self.gpustasis("recover", str(self.job.pid), *words)


@pytest.fixture
def left(
    gpustasis: Gpustasis,
    gpu_generations: Generations,
    abandon: Abandon,
    driver_calls: DriverCalls,
    driver_state: Callable[[Job], str],
    emulator_environ: dict[str, str],
    tmp_path: Path,
) -> Left:
    checkpointer = Checkpointer(preferred_criu(), emulator_environ)
    callers = (abandon, driver_calls, driver_state)
    return Left(gpustasis, gpu_generations, *callers, checkpointer, tmp_path)


@pytest.mark.parametrize(("state", "named", "said"), CASES)
def test_a_process_runs_on_only_with_its_memory(
    left: Left, state: str, named: str, said: str
) -> None:
    left.bring_about(state, named)
    words = left.directory(named)
    before = left.seen()
    assert before[0] == ("LOCKED" if state == "locked" else "CHECKPOINTED")
    ended = left.recover(*words)
    if said == RUNS_AGAIN:
        assert ended.returncode == 0, ended.stderr
        assert said in ended.stdout
        check_memory(left.job, 0)
        assert find_checkpoint_record(left.job.pid) is None
        return
    assert ended.returncode in (3, 10), ended.stdout
    assert said in ended.stderr
    assert left.seen() == before  # nothing was changed


def test_a_state_in_which_the_driver_has_given_up_is_refused(
    left: Left, gpustasis: Gpustasis
) -> None:
    left.bring_about("not dropped", "right")
    fault = gpustasis("emulator", "fault", "add", "get_state", "state", "--code", "3")
    assert fault.returncode == 0, fault.stderr
    refused = left.recover("-D", left.images)
    assert refused.returncode == 3
    assert "driver's state FAILED" in refused.stderr


def test_no_dump_leaves_a_record_that_it_has_had_a_process_checkpointed(left: Left) -> None:
    left.checkpointer.dump(left.job, left.images, leave_running=True)
    assert find_checkpoint_record(left.job.pid) is None
    check_memory(left.job, 0)
