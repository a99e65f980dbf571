# SPDX-License-Identifier: Apache-2.0
"""What is kept of a rank before it is stopped: where each of its threads stands."""

from __future__ import annotations

import logging
import shutil
from contextlib import suppress
from pathlib import Path

from gpustasis import process
from gpustasis.files import make_directories
from gpustasis.jobs.lives import Life
from gpustasis.jobs.rank import Context
from gpustasis.jobs.stopping import tree_pids

log = logging.getLogger(__name__)

_PARTS = ("status", "wchan", "stack", "syscall")
_PY_SPY_S = 20.0
_MAX_THREADS = 4096


def place_of(directory: Path, life: int) -> Path:
    """Where the stacks of a life are, below a rank's directory."""
    return directory / f"evidence-{life:08d}"


def keep_stacks(context: Context, life: Life) -> None:
    """Of the tasks, if they live, in files of the rank's directory. What cannot be had is left
    out: the job is to be restored all the same."""
    if not context.state.lives:
        return
    place = place_of(context.place.directory, life.number)
    try:
        make_directories(str(place), 0o700)
        (place / "reason").write_text(life.why() + "\n", encoding="utf-8")
        for pid in tree_pids(context.state.pid):
            (place / f"{pid}.proc").write_text(_of_proc(pid), encoding="utf-8")
            if (python := _of_python(pid)) is not None:
                (place / f"{pid}.py-spy").write_text(python, encoding="utf-8")
    except OSError as exc:
        log.warning("%s: not all of its stacks are in %s: %s", context.name, place, exc)


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


def _of_python(pid: int) -> str | None:
    """As py-spy shows it; None: there is no py-spy, or this is no Python that it knows."""
    program = shutil.which("py-spy")
    if program is None:
        return None
    found = process.run([program, "dump", "--pid", str(pid)], timeout_s=_PY_SPY_S)
    return found.output if found.status == 0 else None
