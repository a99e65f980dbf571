# SPDX-License-Identifier: Apache-2.0
"""recover: the driver's restore thread gets its signal mask back, which a killed dump may have left
as the plugin sets it while the thread works for the dump."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from campaigns.steady_job import restore_thread
from gpustasis._core import find_checkpoint_record
from support.checkpoint import Checkpointer
from support.criu_roots import preferred_criu
from support.job import Job, check_memory
from support.signal_masks import ALL_BUT_SIGTRAP, MASK_OF_DUMP, blocked

Gpustasis = Callable[..., CompletedProcess[str]]
Generations = Callable[..., Job]
Abandon = Callable[..., None]
DriverCalls = Callable[..., None]

OTHER = 1 << 9  # SIGUSR1

# argv: thread, signal mask. Seize the thread, give it the mask, and hold it until stdin ends.
# The numbers are those of linux/ptrace.h and sys/wait.h.
HOLDER = """
import ctypes, os, sys
tid, mask = int(sys.argv[1]), ctypes.c_uint64(int(sys.argv[2]))
ptrace = ctypes.CDLL(None, use_errno=True).ptrace
ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
def ask(request, address=None, data=None):
    assert ptrace(request, tid, address, data) == 0, os.strerror(ctypes.get_errno())
ask(0x4206)  # PTRACE_SEIZE
ask(0x4207)  # PTRACE_INTERRUPT
os.waitpid(tid, 0x40000000)  # __WALL
ask(0x420b, 8, ctypes.addressof(mask))  # PTRACE_SETSIGMASK
ask(7)  # PTRACE_CONT
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def held(pid: int, mask: int) -> Iterator[None]:
    """The restore thread, with `mask`, by another tracer."""
    thread = restore_thread(pid)
    assert thread is not None
    argv = [sys.executable, "-c", HOLDER, thread.name, str(mask)]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True) as holder:
        assert holder.stdin is not None and holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        yield
        holder.stdin.close()
    assert holder.returncode == 0


def test_what_a_killed_dump_has_left_blocked_is_not_blocked_any_more(
    gpustasis: Gpustasis, gpu_generations: Generations, abandon: Abandon, images: Path
) -> None:
    job = gpu_generations()
    before = blocked(job.pid)
    abandon(job, images)
    with held(job.pid, ALL_BUT_SIGTRAP):
        pass
    assert blocked(job.pid) == MASK_OF_DUMP != before
    ended = gpustasis("recover", str(job.pid))
    assert ended.returncode == 0, ended.stderr
    assert blocked(job.pid) == before
    assert find_checkpoint_record(job.pid) is None
    check_memory(job, 0)


def test_a_mask_that_the_plugin_never_sets_is_left_alone(
    gpustasis: Gpustasis, gpu_generations: Generations, abandon: Abandon, images: Path
) -> None:
    job = gpu_generations()
    abandon(job, images)
    with held(job.pid, OTHER):
        pass
    assert gpustasis("recover", str(job.pid)).returncode == 0
    assert blocked(job.pid) == OTHER
    check_memory(job, 0)


def test_who_could_not_give_them_back_leaves_it_to_the_next_one(
    gpustasis: Gpustasis,
    gpu_generations: Generations,
    abandon: Abandon,
    driver_calls: DriverCalls,
    images: Path,
) -> None:
    job = gpu_generations()
    before = blocked(job.pid)
    abandon(job, images, drops=False)
    driver_calls(job, "restore")
    with held(job.pid, ALL_BUT_SIGTRAP):
        ended = gpustasis("recover", str(job.pid))
        assert ended.returncode == 0, ended.stderr
        assert "was locked, and runs again" in ended.stdout
        assert f"of process {job.pid} may keep signals blocked" in ended.stderr
        check_memory(job, 0)
        again = gpustasis("recover", str(job.pid))  # it runs by now
        assert again.returncode == 0, again.stderr
        assert "may keep signals blocked" in again.stderr
    assert find_checkpoint_record(job.pid) is not None
    ended = gpustasis("recover", str(job.pid))
    assert ended.returncode == 0, ended.stderr
    assert "there was nothing to do" in ended.stdout
    assert "blocked" not in ended.stderr
    assert blocked(job.pid) == before
    assert find_checkpoint_record(job.pid) is None


@pytest.mark.parametrize("leaves_running", [True, False])
def test_the_next_dump_gives_them_back_as_well(
    gpu_generations: Generations,
    abandon: Abandon,
    driver_calls: DriverCalls,
    emulator_environ: dict[str, str],
    images: Path,
    tmp_path: Path,
    *,
    leaves_running: bool,
) -> None:
    """Another tool has brought the process back since. What the next dump stores is right, too."""
    job = gpu_generations()
    before = blocked(job.pid)
    abandon(job, images, drops=False)
    with held(job.pid, ALL_BUT_SIGTRAP):
        pass
    driver_calls(job, "restore", "unlock")
    assert find_checkpoint_record(job.pid) is not None
    place = tmp_path / "next"
    place.mkdir()
    checkpointer = Checkpointer(preferred_criu(), emulator_environ)
    checkpointer.dump(job, place, leave_running=leaves_running)
    if not leaves_running:
        checkpointer.restore(job, place)
    assert blocked(job.pid) == before
    assert find_checkpoint_record(job.pid) is None
    check_memory(job, 0)


def test_a_dump_of_what_is_checkpointed_still_gives_them_back(
    gpu_generations: Generations,
    abandon: Abandon,
    emulator_environ: dict[str, str],
    images: Path,
    tmp_path: Path,
) -> None:
    """A restored process runs, whatever it was found in."""
    job = gpu_generations()
    before = blocked(job.pid)
    abandon(job, images, drops=False)
    with held(job.pid, ALL_BUT_SIGTRAP):
        pass
    place = tmp_path / "next"
    place.mkdir()
    checkpointer = Checkpointer(preferred_criu(), emulator_environ)
    checkpointer.dump(job, place, plugin={"found_locked": "dump"})
    checkpointer.restore(job, place)
    assert blocked(job.pid) == before
    check_memory(job, 0)
