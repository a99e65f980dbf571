# SPDX-License-Identifier: Apache-2.0
"""What the emulated driver says of the processes that use it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from campaigns.steady_job import is_alive, restore_thread
from gpustasis.answering import TimedOutError, answer_within
from gpustasis.driver import Driver, ProcessState
from gpustasis.errors import DriverError

_ANSWER_S = 5.0  # of one whose restore thread runs


def driver_of(environ: Mapping[str, str]) -> Driver:
    """Of the emulator that programs with this environment use."""
    return Driver(str(Path(environ["LD_LIBRARY_PATH"].split(":")[0]) / "libcuda.so.1"))


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
