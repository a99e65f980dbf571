# SPDX-License-Identifier: Apache-2.0
"""Memory that was dropped from a task is put back, and nothing else is taken for it."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from campaigns.rig import Rig, log_path
from campaigns.steady_job import SteadyJob, restore_thread
from gpustasis._core import ChunkInfo, Encoding, ImageReader, find_drop_record, image_name
from gpustasis.diagnosis import Finding, Status, host
from gpustasis.recovery import GUARDIAN_COMM, WORKER_COMM
from gpustasis.task import find_users
from support.broken_dumps import TIMEOUT_S, break_off, dump_and_stop, recover
from support.broken_trackers import userfaultfds
from support.job import ended

PROGRAMS = Path(__file__).resolve().parent.parent / "programs"
SETTING = Path("/proc/sys/vm/unprivileged_userfaultfd")
RAISED = Path("/run/gpustasis/userfaultfd-raised")
# A criu behind these words cannot raise the setting: a restricted job is not guarded then.
WITHOUT_SETTING = [
    *("unshare", "--mount", "sh", "-ec"),
    f'mount --bind {SETTING} {SETTING}; mount -o remount,bind,ro {SETTING}; exec "$@"',
    "sh",
]
# What it writes to is opened anew, by a mount that this namespace has.
REOPENED = ["sh", "-c", 'exec "$@" </dev/null >>"$(readlink /proc/$$/fd/1)" 2>&1', "sh"]
SYS_MADVISE = 28
# process_vm_readv waits for a missing page as a thread of the process does; /proc/PID/mem does not,
# and ends in EIO. Arguments: a pid, then an address and a length for each range.
READ = """
import ctypes, os, sys
class Vec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
call = ctypes.CDLL(None, use_errno=True).process_vm_readv
pid, *ranges = map(int, sys.argv[1:])
os.write(1, b"reading\\n")
for address, length in zip(ranges[::2], ranges[1::2]):
    done = 0
    found = ctypes.create_string_buffer(length)
    while done < length:
        mine = Vec(ctypes.addressof(found) + done, length - done)
        theirs = Vec(address + done, length - done)
        got = call(pid, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0)
        assert got > 0, (got, ctypes.get_errno())
        done += got
    sys.stdout.buffer.write(found.raw)
    sys.stdout.buffer.flush()
"""


def reader_of(pid: int, *ranges: int) -> list[str]:
    return [sys.executable, "-c", READ, str(pid), *map(str, ranges)]


def test_a_second_dump_does_not_take_dropped_memory_for_zeros(rig: Rig) -> None:
    with rig.job(mib=8, children=1) as job:
        broken = rig.images()
        break_off(rig, job, broken)
        second = rig.images()
        dumped = rig.dump(job, second, config={"found_locked": "dump"})
        assert dumped.status != 0, "missing pages were dumped as zeros, and the job was killed"
        assert job.alive_pids() == list(job.pids)
        named = re.search(r"gpustasis recover (\d+) -D (\S+)", dumped.log)
        assert named is not None, dumped.errors
        assert int(named[1]) in job.pids
        assert named[2] == str(broken)
        assert list(second.glob("gpustasis-*.img")) == []
        assert "locked pid" not in dumped.log
        for pid in job.pids:
            assert find_drop_record(pid) is not None
            recover(rig, pid)
            assert find_drop_record(pid) is None
        job.run_on()
        dumped = rig.dump(job, rig.images())
        assert dumped.status == 0, dumped.errors
        job.wait()


def test_a_dump_that_succeeds_leaves_no_record(newest_rig: Rig) -> None:
    with newest_rig.job(mib=4) as job:
        images = newest_rig.images()
        dumped = newest_rig.dump(job, images, "--leave-running")
        assert dumped.status == 0, dumped.errors
        assert find_drop_record(job.pid) is None
        job.run_on()


def stored_pages(images: Path, pid: int) -> dict[int, bytes]:
    image = ImageReader.open(images / image_name(pid))
    image.attach_sources()
    return {image.chunk(index).address: image.read_chunk(index) for index in range(len(image))}


def require_nothing_missing(images: Path, pid: int) -> None:
    """The memory of the process, as one of its threads sees it at this moment, is what was
    dropped."""
    for address, stored in stored_pages(images, pid).items():
        words = reader_of(pid, address, len(stored))
        done = subprocess.run(words, stdout=subprocess.PIPE, timeout=TIMEOUT_S, check=True)
        assert done.stdout == b"reading\n" + stored, f"{address:#x} is not what it was"


@pytest.mark.one_criu
def test_nothing_is_missing_when_criu_and_the_worker_are_killed(rig: Rig) -> None:
    with rig.job(mib=32, children=1) as job:
        images = rig.images()
        break_off(rig, job, images, GUARDIAN_COMM)
        for pid in job.pids:
            require_nothing_missing(images, pid)
        rig.settle(images)
        for pid in job.pids:
            require_nothing_missing(images, pid)
            assert find_drop_record(pid) is None
            recover(rig, pid, "-D", images)
        job.run_on()


@pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "unguarded"])
def test_a_drop_that_comes_late_is_waited_for(
    newest_rig: Rig, compile_c: Callable[..., Path], guarded: bool
) -> None:
    """criu is killed at its next system calls, among them that by which the restore thread sets out
    to drop pages. It does so all the same, here a second later; memory put back before is lost."""
    late = False
    for number in (1, 2, 3):
        started = newest_rig.job(mib=8) if guarded else restricted_job(newest_rig, compile_c)
        with started as job:
            images = newest_rig.images()
            stop_and_kill(newest_rig, job, images, number, [] if guarded else WITHOUT_SETTING)
            log = log_path(images, "dump").read_text(errors="replace")
            assert ("reads as zeros" not in log) is guarded
            late |= call_under_way(job.pid) in ("-1", str(SYS_MADVISE))
            time.sleep(1)
            os.kill(job.pid, signal.SIGCONT)
            newest_rig.settle(images)
            job.run_on()
    assert late, "no restore thread had set out to drop pages"


def test_a_userfaultfd_that_a_killed_dump_has_left_is_closed_by_the_next(newest_rig: Rig) -> None:
    """criu and its worker are killed at each system call from which on the task may have one."""
    left = 0
    with newest_rig.job(mib=8) as job:
        for number in range(1, 30):
            images = newest_rig.images()
            count = images.with_name(f"{images.name}.count")
            killer = [str(newest_rig.programs.killer), str(count), str(number), "o"]
            words = [*killer, "guarding the staged memory", *newest_rig.dump_words(job, images)]
            assert newest_rig.run(words, images, "dump").status == 137
            newest_rig.settle(images)
            if "dropping the staged memory" in log_path(images, "dump").read_text(errors="replace"):
                break
            recover(newest_rig, job.pid, "-D", images)
            job.run_on(1)
            if not userfaultfds(job.pid):
                continue
            left += 1
            images = newest_rig.images()
            dumped = newest_rig.run(
                newest_rig.dump_words(job, images, ["--leave-running"]), images, "dump"
            )
            assert dumped.status == 0, dumped.errors
            assert "closed descriptor" in log_path(images, "dump").read_text(errors="replace")
            assert userfaultfds(job.pid) == []
            job.run_on(1)
    assert left, "no kill has left one: where it is made cannot have been hit"


def stop_and_kill(
    rig: Rig, job: SteadyJob, images: Path, number: int, prefix: Sequence[str]
) -> None:
    """Dump; kill criu at that system call after it says that it drops pages, and leave the job
    stopped, from a moment before on."""
    count = images.with_name(f"{images.name}.count")
    killer = rig.start(
        [
            *(*prefix, str(rig.programs.killer), str(count), str(number), "p"),
            "dropping the staged memory",
            *rig.dump_words(job, images),
        ]
    )
    stopped = os.waitid(os.P_PID, killer.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    assert stopped is not None
    assert stopped.si_code == os.CLD_STOPPED
    os.kill(job.pid, signal.SIGSTOP)
    killer.send_signal(signal.SIGCONT)
    assert killer.wait(TIMEOUT_S) == 137


def call_under_way(pid: int) -> str:
    """The number of the system call in which the restore thread of a stopped process stands; -1:
    in none, it is on its way to one."""
    thread = restore_thread(pid)
    assert thread is not None
    deadline = time.monotonic() + TIMEOUT_S
    while (number := (thread / "syscall").read_text().split()[0]) == "running":
        assert time.monotonic() < deadline, "it does not stop"
        time.sleep(0.001)
    return number


def flip(images: Path, pid: int, chunk: ChunkInfo) -> None:
    """Damage one stored byte of a chunk, or mend it."""
    with (images / image_name(pid)).open("r+b") as file:
        file.seek(chunk.offset)
        byte = file.read(1)[0]
        file.seek(chunk.offset)
        file.write(bytes([byte ^ 1]))


def test_a_damaged_chunk_is_guarded_and_all_else_put_back(newest_rig: Rig) -> None:
    """No thread may read zeros, now or later; once the image is whole again, the job is back."""
    with newest_rig.job(mib=32) as job:
        images = newest_rig.images()
        kill_criu = dump_and_stop(newest_rig, job, images)
        stored = stored_pages(images, job.pid)
        image = ImageReader.open(images / image_name(job.pid))
        chunks = [image.chunk(index) for index in range(len(image))]
        damaged = [chunk for chunk in chunks if chunk.encoding is not Encoding.ZERO][1]
        flip(images, job.pid, damaged)
        kill_criu()
        undo_log = images / "gpustasis-undo.log"
        wait_until(lambda: undo_log.exists() and "stay missing" in undo_log.read_text())
        assert f"1 of {len(chunks)} chunks" in undo_log.read_text()
        assert f"{damaged.address:#x}-" in undo_log.read_text()
        with open(f"/proc/{job.pid}/mem", "rb", buffering=0) as memory:
            for address, wanted in stored.items():
                if address != damaged.address:
                    memory.seek(address)
                    assert memory.read(len(wanted)) == wanted
        words = reader_of(job.pid, damaged.address, 4096)
        with ended(subprocess.Popen(words, stdout=subprocess.PIPE, bufsize=0)) as reader:
            assert reader.stdout is not None
            assert reader.stdout.readline() == b"reading\n"
            with pytest.raises(subprocess.TimeoutExpired):
                reader.communicate(timeout=2)
            assert len(find_users(images, GUARDIAN_COMM)) == 2
            assert find_drop_record(job.pid) is not None
            flip(images, job.pid, damaged)
            assert reader.communicate(timeout=TIMEOUT_S)[0] == stored[damaged.address][:4096]
        newest_rig.settle(images)
        assert job.alive(), (job.wait(), job.output())
        assert find_drop_record(job.pid) is None
        assert "the task was brought back" in undo_log.read_text()
        job.run_on()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_drop_that_the_kernel_refuses_is_undone(
    newest_rig: Rig, compile_c: Callable[..., Path]
) -> None:
    """Pages of locked shared memory stay; criu and the guardians must not wait for each other."""
    library = compile_c(PROGRAMS / "locked_staging.c", "-shared", "-fPIC")
    environ = dict(newest_rig.environ) | {"LD_PRELOAD": str(library)}
    with replace(newest_rig, environ=environ).job(mib=8) as job:
        images = newest_rig.images()
        dumped = newest_rig.dump(job, images)
        assert dumped.status != 0
        assert f"cannot drop staged memory of pid {job.pid}" in dumped.log
        assert f"brought back pid {job.pid}" in dumped.log
        assert dumped.seconds < TIMEOUT_S
        newest_rig.settle(images)
        assert find_drop_record(job.pid) is None
        job.run_on()


@pytest.mark.parametrize("killed", [0, 1], ids=["guardian", "spare"])
def test_one_guardian_is_enough(newest_rig: Rig, killed: int) -> None:
    with newest_rig.job(mib=32) as job:
        images = newest_rig.images()
        kill_criu = dump_and_stop(newest_rig, job, images)
        guardians = sorted(find_users(images, GUARDIAN_COMM))
        assert len(guardians) == 2
        for pid in (guardians[killed], *find_users(images, WORKER_COMM)):
            os.kill(pid, signal.SIGKILL)
        kill_criu()
        require_nothing_missing(images, job.pid)
        newest_rig.settle(images)
        recover(newest_rig, job.pid, "-D", images)
        job.run_on()


def test_a_job_that_may_not_make_a_userfaultfd_is_guarded_as_well(
    newest_rig: Rig, compile_c: Callable[..., Path]
) -> None:
    """It has neither the capability nor the system call, as in a container."""
    with restricted_job(newest_rig, compile_c) as job:
        images = newest_rig.images()
        dumped = newest_rig.dump(job, images, "--leave-running", config={"guard": "require"})
        assert dumped.status == 0, dumped.errors
        task = json.loads((images / "gpustasis-dump.json").read_text())["tasks"][0]
        assert task["not_guarded_because"] == ""
        # Dumps of other tests raise it for a moment.
        wait_until(lambda: SETTING.read_text() == "0\n")
        job.run_on()


@pytest.mark.parametrize("guard", ["auto", "require"])
def test_what_cannot_be_guarded_is_said_or_refused(
    newest_rig: Rig, compile_c: Callable[..., Path], guard: str
) -> None:
    with restricted_job(newest_rig, compile_c, [*WITHOUT_SETTING, *REOPENED]) as job:
        images = newest_rig.images()
        # In a mount namespace of its own, criu would dump the job's, and all that is on its tmpfs.
        inside = ["nsenter", "--target", str(job.pid), "--mount", "--"]
        dumped = newest_rig.run(
            [*inside, *newest_rig.dump_words(job, images, ["--leave-running"])],
            images,
            "dump",
            {"guard": guard},
        )
        newest_rig.settle(images)
        if guard == "require":
            assert dumped.status != 0
            assert 'guard = "require": ' in dumped.log
        else:
            assert dumped.status == 0, dumped.errors
            assert "reads as zeros until it is put back" in dumped.log
            task = json.loads((images / "gpustasis-dump.json").read_text())["tasks"][0]
            assert str(SETTING) in task["not_guarded_because"]
        assert find_drop_record(job.pid) is None
        job.run_on()


@contextmanager
def restricted_job(
    rig: Rig, compile_c: Callable[..., Path], prefix: Sequence[str] = ()
) -> Iterator[SteadyJob]:
    """A steady_job without capabilities and userfaultfd."""
    launcher = compile_c(PROGRAMS / "without_userfaultfd.c")
    starter = rig.scratch / "start"
    words = shlex.join([*prefix, str(launcher), str(rig.programs.job)])
    starter.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    starter.chmod(0o755)
    with replace(rig, programs=replace(rig.programs, job=starter)).job(mib=8) as job:
        yield job


def raise_setting() -> Finding:
    """As a dump that is killed then leaves it; what is found. What other tests have broken off may
    set it back at any moment: then it is raised again."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        RAISED.write_text("1\n")
        SETTING.write_text("1\n")
        found = host.check_dropped_memory()[0]
        if found.status is Status.PROBLEM:
            return found
        assert time.monotonic() < deadline, f"raised, and found is {found}"


def test_a_setting_that_a_killed_dump_has_raised_is_seen_and_set_back(newest_rig: Rig) -> None:
    with newest_rig.job(mib=4) as job:
        images = newest_rig.images()
        kill_criu = dump_and_stop(newest_rig, job, images)
        found = raise_setting()
        kill_criu()
        assert found.remedy == "sysctl vm.unprivileged_userfaultfd=0"
        newest_rig.settle(images)
        # Dumps of other tests raise it as well, for a moment, and some of them are killed then.
        wait_until(lambda: SETTING.read_text() == "0\n")
        wait_until(lambda: host.check_dropped_memory()[0].status is Status.OK)
        job.run_on()
