# SPDX-License-Identifier: Apache-2.0
"""What the emulated driver says of the processes that use it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from campaigns.steady_job import is_alive, restore_thread
from gpustasis.answering import TimedOutError, answer_within
from gpustasis.driver import Driver, ProcessState
from gpustasis.emulator import Emulator
from gpustasis.errors import DriverError

_ANSWER_S = 5.0  # of one whose restore thread runs
_END_S = 10.0
_GIVEN_UP: set[int] = set()
_POLL_S = 0.01


def driver_of(environ: Mapping[str, str]) -> Driver:
    """Of the emulator that programs with this environment use."""
    return Driver(str(Path(environ["LD_LIBRARY_PATH"].split(":")[0]) / "libcuda.so.1"))


def await_ends(emulator: Emulator) -> None:
    """Until the emulator has let go of the memory of all processes that have ended: its worker of
    one ends after it, and takes its time. Once for each, and not for ever."""
    deadline = time.monotonic() + _END_S
    while True:
        listed = {one["pid"] for gpu in emulator.status()["gpus"] for one in gpu["processes"]}
        left = {pid for pid in listed - _GIVEN_UP if pid > 0 and not is_alive(pid)}
        if not left:
            return
        if time.monotonic() > deadline:
            _GIVEN_UP.update(left)
        time.sleep(_POLL_S)


def not_running(driver: Driver, pids: Iterable[int]) -> dict[int, str]:
    """Those of these processes that use CUDA and that the driver holds, or that do not answer it,
    and how it is with them."""
    found = {}
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            if restore_thread(pid) is None:
                continue
            try:
                state = answer_within(_ANSWER_S, "its state", lambda pid=pid: driver.get_state(pid))
                said = "" if state is ProcessState.RUNNING else state.name
            except TimedOutError as exc:
                said = str(exc)
            except DriverError as exc:
                said = str(exc) if is_alive(pid) else ""
            if said:
                found[pid] = said
    return found
