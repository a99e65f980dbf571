# SPDX-License-Identifier: Apache-2.0
"""Dumps with gpu_memory = "direct" on a driver that copies slowly, and what phase one of them is
in.

criu's log does not tell what the driver and the worker do: that the memory was handed over, that it
is being stored, that it is on its way back. So the image files are looked at, and the driver is
asked for the states of the tasks, from outside, as long as their restore threads run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Self

from campaigns.rig import GPU_MEMORY, Rig, log_path, with_config
from gpustasis._core import image_name
from gpustasis.criu.plugin import Scalar
from gpustasis.driver import Driver, ProcessState
from gpustasis.emulator import RATES_OFF, Emulator, Options, Rates, api_version_of
from gpustasis.errors import DriverError
from support.driver_states import driver_of

DIRECT: dict[str, Scalar] = {"gpu_memory": "direct"}
DRIVER = "615.71.09"
SLOW: Rates = (0.1, 0.1)  # GB/s of a GPU each way: 16 MiB take 0.17 s
# Of each unlock and each end of an operation: phases that are too short else to be seen, and hit,
# by one who has to wait for a processor.
DELAY_MS = 150

CHECKPOINT, FINISH = "checkpoint", "finish"
# Phases that criu's log tells of, in their order, each with what it holds once the phase has begun.
_MARKS = {
    "start": "",
    "lock": "cuda_plugin: backend",
    "freeze": "Seized task",
    CHECKPOINT: "' hook 11 ",
    "collect": "Collecting netns",
    "dump tasks": "Dumping task (pid:",
    FINISH: "Writing image inventory",
}
# CHECKPOINTING, and nothing stored yet; a part of an image is; all images are complete.
HANDING_OVER, STORING, STORED = "handing over", "storing", "stored"
RESTORING, UNLOCKING = "restoring", "unlocking"  # on the way back: RESTORING; LOCKED
END = "end"
# All in which a dump is aimed at. In "checkpoint" and "end", which are no aims, nothing has begun,
# or all is done.
PHASES = (
    *("start", "lock", "freeze", HANDING_OVER, STORING, STORED),
    *("collect", "dump tasks", FINISH, RESTORING, UNLOCKING),
)
WITH_WORKER = PHASES[1:]  # those in which there is one
_ANSWER_S = 0.05  # of a driver that is asked once; a process that stands still answers nothing
AT_RISK = (HANDING_OVER, STORING)  # where GPU memory is in the worker's hands alone


@contextmanager
def slow_direct(rig: Rig, rates: Rates = SLOW) -> Iterator[Rig]:
    """The same on an emulator of its own, with gpu_memory = "direct" in every dump. Ends of
    operations and unlocks take DELAY_MS, until its faults are cleared."""
    api = api_version_of(DRIVER)
    place = rig.scratch / "direct"
    place.mkdir()
    emulator = Emulator(path=place / "emulator" / "socket")
    emulator.start(
        Options(gpus=2, memory_bytes=GPU_MEMORY, driver=DRIVER, rates=RATES_OFF, direct_rates=rates)
    )
    try:
        environ = dict(rig.environ) | emulator.environment(api)
        # The job waits in the driver's gate before criu freezes it, and says nothing more.
        emulator.set("lock_drain_ms", "200")
        slow_down(emulator)
        yield with_config(replace(rig, emulator=emulator, environ=environ, scratch=place), DIRECT)
    finally:
        emulator.stop()


def slow_down(emulator: Emulator) -> None:
    for operation in ("complete", "unlock"):
        emulator.add_fault(operation, "delay", count=0, delay_ms=DELAY_MS)


def log_of(images: Path) -> str:
    log = log_path(images, "dump")
    return log.read_text(errors="replace") if log.exists() else ""


def is_stored(images: Path, pid: int) -> bool:
    """The image of its GPU memory is complete: it has its name."""
    return (images / image_name(pid)).exists()


def is_begun(images: Path, pid: int) -> bool:
    """Some of it is in the file that is to be the image. What is reserved of that is a hole."""
    part = images / f".{image_name(pid)}.part"  # src/core/file.hpp
    with suppress(OSError), part.open("rb") as file:  # ENXIO: there is nothing in it
        os.lseek(file.fileno(), 0, os.SEEK_DATA)
        return True
    return False


class Watch:
    """One dump, or restore, looked at again and again. pids: of the tasks that use CUDA, in whose
    pid namespace this runs."""

    def __init__(self, rig: Rig, images: Path, pids: Sequence[int]) -> None:
        self.images, self.pids = images, tuple(pids)
        self._driver: Driver = driver_of(rig.environ)
        self._states: dict[int, ProcessState] = {}
        self._asked: dict[int, Future[ProcessState]] = {}
        self._threads = ThreadPoolExecutor(2 * max(1, len(self.pids)))
        self._goes_back = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=False)  # whoever is asked answers when it runs, or ends

    def phase(self) -> str:
        text = log_of(self.images)
        if "cuda_plugin: bringing back pid" in text:
            return self._way_back(text)
        phase = next(name for name in reversed(_MARKS) if _MARKS[name] in text)
        if phase != CHECKPOINT:
            return phase
        waiting = [pid for pid in self.pids if not is_stored(self.images, pid)]
        if not waiting:
            return STORED
        if any(is_begun(self.images, pid) for pid in waiting):
            return STORING
        # Until then its restore thread runs, and is not frozen again before the image is complete.
        states = [self._ask(pid) for pid in waiting]
        return HANDING_OVER if ProcessState.CHECKPOINTING in states else phase

    def _way_back(self, text: str) -> str:
        if not self._goes_back:  # answers of before say nothing of it
            self._goes_back = True
            self._states.clear()
        if all(f"brought back pid {pid}\n" in text for pid in self.pids):
            return END
        begun = [pid for pid in self.pids if f"bringing back pid {pid}\n" in text]
        states = {self._ask(pid) for pid in begun}
        if len(begun) == len(self.pids) and states <= {ProcessState.LOCKED, ProcessState.RUNNING}:
            return UNLOCKING  # of all: before that none is
        return RESTORING if states & {ProcessState.RESTORING, ProcessState.LOCKED} else FINISH

    def is_restoring(self) -> bool:
        """Whether the driver has said last that it gives some process its memory back."""
        return ProcessState.RESTORING in [self._ask(pid) for pid in self.pids]

    def is_restoring_now(self) -> bool:
        """The same by an answer that is given now, when nobody goes on."""
        asked = [self._threads.submit(self._driver.get_state, pid) for pid in self.pids]
        said, _ = wait(asked, _ANSWER_S)
        return any(
            one.exception() is None and one.result() is ProcessState.RESTORING for one in said
        )

    def _ask(self, pid: int) -> ProcessState | None:
        """What the driver has said last; it is asked again meanwhile, unless it has said how it
        ended."""
        asked = self._asked.get(pid)
        if asked is not None and asked.done():
            del self._asked[pid]
            with suppress(DriverError):  # it has ended
                self._states[pid] = asked.result()
        state = self._states.get(pid)
        if pid not in self._asked and state not in (ProcessState.RUNNING, ProcessState.FAILED):
            self._asked[pid] = self._threads.submit(self._driver.get_state, pid)
        return state
