# SPDX-License-Identifier: Apache-2.0
"""What is kept of a rank before it is stopped: where each of its threads stands."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from gpustasis import process
from gpustasis.files import make_directories
from gpustasis.jobs.lives import Life
from gpustasis.jobs.rank import Context
from gpustasis.jobs.stopping import tree_pids
from gpustasis.text import safe

log = logging.getLogger(__name__)

_PARTS = ("status", "wchan", "stack", "syscall")
ALL_S = 40.0  # less than the lead waits before it has all stopped (leading.py)
_PY_SPY_S = 20.0  # of one process
_MAX_THREADS = 4096


def place_of(directory: Path, life: int) -> Path:
    """Where the stacks of a life are, below a rank's directory."""
    return directory / f"evidence-{life:08d}"


def keep_stacks(context: Context, life: Life) -> None:
    """Of the tasks, if they live, in files of the rank's directory. What cannot be had, or not in
    time, is left out: the job is to be restored all the same."""
    if not context.state.lives:
        return
    place = place_of(context.place.directory, life.number)
    end = time.monotonic() + ALL_S
    wrong: list[str] = []

    def keep() -> None:
        try:
            _keep(place, life, tree_pids(context.state.pid), end)
        except (OSError, ValueError) as exc:
            wrong.append(str(exc))

    # What /proc says of a process that hangs in the kernel may never come.
    thread = threading.Thread(target=keep, daemon=True)
    thread.start()
    thread.join(ALL_S)
    if thread.is_alive() or time.monotonic() > end:
        wrong.append(f"it took longer than {ALL_S:g} s")
    if wrong:
        log.warning("%s: not all of its stacks are in %s: %s", context.name, place, wrong[0])


def _keep(place: Path, life: Life, pids: Sequence[int], end: float) -> None:
    make_directories(str(place), 0o700)
    (place / "reason").write_text(safe(life.why()) + "\n", encoding="utf-8")
    for pid in pids:
        (place / f"{pid}.proc").write_text(_of_proc(pid), encoding="utf-8")
    for pid in pids:
        left_s = end - time.monotonic()
        if left_s <= 0:
            return
        if (python := _of_python(pid, min(left_s, _PY_SPY_S))) is not None:
            (place / f"{pid}.py-spy").write_text(python, encoding="utf-8")


def _of_proc(pid: int) -> str:
    lines = []
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
        lines.append(f"process {pid}: {words.decode(errors='replace')}")
    with suppress(OSError):  # it has ended
        for thread in sorted(Path(f"/proc/{pid}/task").iterdir())[:_MAX_THREADS]:
            lines.append(f"\nthread {thread.name}")
            for part in _PARTS:
                with suppress(OSError):  # not every kernel has all of them
                    text = (thread / part).read_text(errors="replace").rstrip()
                    lines.append(f"{part}:\n{text}" if "\n" in text else f"{part}: {text}")
    return "\n".join(lines) + "\n"


def _of_python(pid: int, timeout_s: float) -> str | None:
    """As py-spy shows it; None: there is no py-spy, or this is no Python that it knows, or it has
    not shown it in time."""
    program = shutil.which("py-spy")
    if program is None:
        return None
    try:
        found = process.run([program, "dump", "--pid", str(pid)], timeout_s=timeout_s)
    except TimeoutError:
        return None
    return found.output if found.status == 0 else None
