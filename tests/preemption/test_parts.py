# SPDX-License-Identifier: Apache-2.0
"""Parts of checkpoints just in time, each by itself."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpustasis.criu import run
from gpustasis.errors import CheckpointError, ImageError, UnsupportedError
from gpustasis.locked_file import SUPERVISOR_NAME
from gpustasis.preemption import asking, making, start, supervisor
from gpustasis.preemption.dumping import PLUGIN, Limits, criu_words, dump
from gpustasis.preemption.estimate import estimate
from gpustasis.preemption.privileges import own_privileges, require_privileges
from gpustasis.preemption.records import RECORD_NAME, Identity, Record, identify, read_record
from gpustasis.preemption.signals import Signals
from gpustasis.preemption.store import JobStore
from gpustasis.preemption.streams import Outlet
from gpustasis.preemption.tree import Memory
from support.criu_roots import newest_criu
from support.job import Job
from support.pids import sleep_as
from support.supervised import Supervised

PAIR = Path(__file__).resolve().parent.parent / "programs" / "pair.py"
JOB = Identity(command=("/bin/true", "x"), directory="/", script="")
RECORD = Record(identity=JOB, pipes=(4, 5), memory_bytes=1 << 30, seconds=4.0)
MIB = 1 << 20
SUMS_OF_PAIR = "0 0\n1 7919\n2 261327\n"
Launch = Callable[..., Job]


@pytest.mark.parametrize("after_s", [0.0, 0.1])
def test_a_dump_that_is_broken_off_leaves_the_job_as_it_was(
    launch: Launch, images: Path, unfinished: list[str], after_s: float
) -> None:
    """Its memory, in which the second process looks for changes, and its connection."""
    job = launch([sys.executable, PAIR, "100000", "100", "0.005"])
    job.wait_for("\n20 ")
    stop = time.monotonic() + after_s
    with pytest.raises(CheckpointError, match="was broken off after"):
        dump(
            newest_criu(),
            job.pid,
            images,
            lambda: Limits(stop=stop, kill=stop + 60),
            [*criu_words("nftables"), *unfinished],
        )
    assert time.monotonic() - stop < 10
    done = job.output().count("\n")
    job.wait_for(f"\n{done + 30} ")
    job.signal(15)
    assert job.wait() == 40
    assert job.output().startswith(SUMS_OF_PAIR)
    assert read_record(images) is None


def test_nothing_is_restored_when_it_shall_end_or_when_its_pids_are_taken(
    launch: Launch, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = launch([sys.executable, PAIR, "100000", "8", "0.01"])
    job.wait_for("\n2 ")
    words = criu_words("nftables")
    settings = run.Settings(plugin=PLUGIN, options={"tcp-established": True}, extra=words)
    run.dump(newest_criu(), job.pid, images, settings, leave_running=True)
    start.verify(images, lambda: False)
    with pytest.raises(start.ToldToEnd):
        start.verify(images, lambda: True)
    monkeypatch.setattr(start, "PATIENCE_S", 0.1)
    with pytest.raises(CheckpointError, match=rf"process {job.pid} \(.*\) has a pid of the job"):
        start.restore(newest_criu(), images, RECORD, (), words)
    assert job.alive()


@pytest.mark.parametrize(
    ("memory", "last", "rate", "seconds"),
    [
        (Memory(cpu_bytes=400 * MIB, gpu_bytes=0), None, None, 2 + 2),
        (Memory(cpu_bytes=400 * MIB, gpu_bytes=600 * MIB), None, None, 2 + 5),
        (Memory(cpu_bytes=400 * MIB, gpu_bytes=600 * MIB), RECORD, 100 * MIB, 2 + 10),
        (Memory(cpu_bytes=2 << 30, gpu_bytes=1 << 30), RECORD, None, 4 * 3 * 1.25),
        (Memory(cpu_bytes=1, gpu_bytes=0), RECORD, None, 4 * 1.25),  # never less than it took
    ],
)
def test_an_estimate(memory: Memory, last: Record | None, rate: int | None, seconds: float) -> None:
    assert estimate(memory, last, rate).seconds == pytest.approx(seconds)


def test_a_record_is_what_was_written_and_counts_once_it_is_committed(tmp_path: Path) -> None:
    RECORD.prepare(tmp_path)
    assert read_record(tmp_path) is None
    RECORD.commit(tmp_path)
    assert read_record(tmp_path) == RECORD


def changed(**fields: Any) -> str:
    body = {
        "version": 1,
        "identity": {"command": ["a"], "directory": "/", "script": ""},
        "pipes": [1, 2],
        "memory_bytes": 1,
        "seconds": 1.0,
    }
    return json.dumps(body | fields)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[" * 100000,
        "{}",
        changed(version=2),
        changed(pipes=[1]),
        changed(pipes=[1, True]),
        changed(pipes=[1, -2]),
        changed(pipes="12"),
        changed(memory_bytes=1 << 63),
        changed(memory_bytes=1.5),
        changed(seconds=float("inf")),
        changed(seconds=-1),
        changed(seconds="1"),
        changed(identity=[]),
        changed(identity={"command": "a", "directory": "/", "script": ""}),
        changed(identity={"command": [1], "directory": "/", "script": ""}),
        changed(identity={"command": [], "directory": None, "script": ""}),
        changed() + " " * (4 << 20),
    ],
)
def test_a_damaged_record_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / RECORD_NAME).write_text(changed())
    assert read_record(tmp_path) is not None
    (tmp_path / RECORD_NAME).write_text(text)
    with pytest.raises(ImageError, match=f"{RECORD_NAME} is damaged"):
        read_record(tmp_path)


def test_a_link_in_place_of_a_record_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text(changed())
    (tmp_path / RECORD_NAME).symlink_to("elsewhere")
    with pytest.raises(ImageError, match="cannot read"):
        read_record(tmp_path)


def test_the_same_job_is_the_same_words_directory_and_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "a.py"
    script.write_text("pass\n")
    monkeypatch.chdir(tmp_path)
    first = identify(("python3", "a.py"), script)
    assert first.difference(identify(("python3", "a.py"), script)) == ""
    assert "another command: python3 a.py -v" in first.difference(
        identify(("python3", "a.py", "-v"), script)
    )
    script.write_text("pass  # now\n")
    assert "another version of the script" in first.difference(
        identify(("python3", "a.py"), script)
    )
    monkeypatch.chdir("/")
    assert "started in /" in first.difference(identify(("python3", "a.py"), script))


def test_a_store_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(CheckpointError, match="is no safe place for a job's memory"):
        JobStore(tmp_path / "open/store")


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"root": 3}', '{"root": {"pid": "x"}}'])
def test_a_damaged_lock_file_stops_nobody(tmp_path: Path, text: str) -> None:
    (tmp_path / SUPERVISOR_NAME).write_text(text)
    with JobStore(tmp_path) as store:
        assert list(store.checkpoints(JOB)) == []
        assert store.new_directory().name == "jit-000001"
        (found,) = store.checkpoints(JOB)
        assert "is no whole checkpoint" in found.unusable
        store.end()
        assert store.new_directory().name == "jit-000002"


def test_a_disk_that_does_not_answer_is_no_reason_to_start_afresh(tmp_path: Path) -> None:
    with JobStore(tmp_path) as store:
        for _ in range(2):
            RECORD.write(store.new_directory())
        found = store.checkpoints(JOB)
        assert next(found).broken  # it has nothing but a record
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
        try:
            with pytest.raises(ImageError, match="Too many open files"):
                next(found)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_damaged_note_of_the_end_is_an_error(tmp_path: Path) -> None:
    """Whether the job is to be restored cannot be told."""
    with JobStore(tmp_path) as store:
        store.new_directory()
        (tmp_path / "gpustasis-jit-ended").write_text('{"last": "x"}')
        with pytest.raises(ImageError, match="gpustasis-jit-ended is damaged"):
            list(store.checkpoints(JOB))


def settings_with(grace_s: float, reserve_s: float) -> making.Settings:
    return making.Settings(
        command=("/bin/sleep", "616"),
        identity=JOB,
        criu=newest_criu(),
        grace_s=grace_s,
        reserve_s=reserve_s,
        keep_last=2,
        rate=None,
        checkpointed_status=75,
        afresh=True,
        network_lock="nftables",
    )


def test_a_supervisor_that_fails_tells_the_job_to_end_and_still_names_it(tmp_path: Path) -> None:
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        raise RuntimeError("a bug")

    settings = settings_with(grace_s=30, reserve_s=5)
    with Signals() as signals, JobStore(tmp_path) as store:
        outlets = (Outlet(1), Outlet(2))
        with pytest.raises(RuntimeError, match="a bug"):
            supervisor.Supervisor(settings, store, signals, outlets, say).run()
        root = int(said[0].split()[1])
        assert os.waitstatus_to_exitcode(os.waitpid(root, 0)[1]) == -signal.SIGTERM
        lock = json.loads((tmp_path / SUPERVISOR_NAME).read_text())
        assert lock["root"]["pid"] == root


def test_an_outlet_hands_on_what_came_and_waits_for_no_one_else() -> None:
    reading, writing = os.pipe()
    outlet = Outlet(writing)
    kept = os.dup(outlet.writing)
    os.write(kept, b"first ")
    outlet.give_away()
    os.write(kept, b"last")
    assert outlet.finish(30)
    assert os.read(reading, 100) == b"first last"
    with pytest.raises(BrokenPipeError):
        os.write(kept, b"nobody")
    for each in (kept, reading, writing):
        os.close(each)


def test_an_outlet_does_not_wait_for_ever_for_who_does_not_read() -> None:
    reading, writing = os.pipe()
    outlet = Outlet(writing)
    os.write(outlet.writing, bytes(60000))
    time.sleep(0.1)
    os.write(outlet.writing, bytes(60000))
    begin = time.monotonic()
    assert not outlet.finish(0.2)
    assert time.monotonic() - begin < 10
    os.close(reading)


def test_a_signal_goes_to_the_supervisor_that_was_found_and_to_no_later_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import os, sys, time\n"
        "f = open(sys.argv[1], 'w')\n"
        "f.write('{\"supervisor\": %d}' % os.getpid())\n"
        "f.flush()\n"
        "time.sleep(600)\n"
    )
    lock = tmp_path / SUPERVISOR_NAME
    asked = subprocess.Popen([sys.executable, "-c", code, str(lock)])
    while not lock.exists() or not lock.read_text():
        time.sleep(0.01)
    real = asking._lock_of
    later: list[int] = []

    def look(pid: int) -> tuple[int, str] | None:
        found = real(pid)
        asked.kill()
        asked.wait()
        sleep_as(pid)
        later.append(pid)
        return found

    monkeypatch.setattr(asking, "_lock_of", look)
    try:
        with pytest.raises(CheckpointError, match="ended before it was asked"):
            asking.preempt(asked.pid, 5)
        assert later == [asked.pid]
        assert os.waitpid(asked.pid, os.WNOHANG) == (0, 0)
    finally:
        for pid in later:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_a_job_whose_reader_went_away_learns_of_it() -> None:
    reading, writing = os.pipe()
    outlet = Outlet(writing)
    os.close(reading)
    deadline = time.monotonic() + 30
    with pytest.raises(BrokenPipeError):
        while time.monotonic() < deadline:
            os.write(outlet.writing, b"x")
            time.sleep(0.01)
    assert outlet.finish(30)
    os.close(writing)


def test_who_is_not_root_is_told_so() -> None:
    everything = (1 << 41) - 1
    require_privileges(0, everything)
    assert own_privileges()[0] == os.geteuid()
    with pytest.raises(UnsupportedError, match="this is user 0, which lacks CAP_SYS_ADMIN; run"):
        require_privileges(0, everything & ~(1 << 21))
    argv = [sys.executable, "-m", "gpustasis.jit", "--store", "/nowhere", "true"]
    code = f"import os; os.setgid(65534); os.setuid(65534); os.execv({argv[0]!r}, {argv!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == UnsupportedError.exit_code, done.stderr
    assert "a job is checkpointed by root, and this is user 65534" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--grace", 5, "--reserve", 5, "true"), "--reserve 5 leaves nothing of --grace 5"),
        (("--speed", 0, "true"), "--speed 0"),
        (("no-such-program",), "there is no program no-such-program"),
        (("no-such-script.py",), "cannot read no-such-script.py"),
        ((), "Missing argument"),
    ],
)
def test_a_wrong_command_line(
    supervise: Callable[..., Supervised], words: tuple[object, ...], said: str
) -> None:
    run_ = supervise(*words)
    assert run_.wait() == 2
    assert said in run_.said()
