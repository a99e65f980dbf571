# SPDX-License-Identifier: Apache-2.0
"""gpustasis watch on a job that writes at a known rate."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from gpustasis._core import dirty_backends
from support.job import ended

PAGE = 4096
PAGES = 2000  # written in each round
ROUND_S = 0.1
MIB = 1 << 20
JOB = f"""
import mmap, os, sys, time
if len(sys.argv) > 1 and os.fork() == 0:
    time.sleep(0.1)
memory = mmap.mmap(-1, 4 * {PAGES} * {PAGE}, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(mmap.MADV_NOHUGEPAGE)
for page in range(4 * {PAGES}):
    memory[page * {PAGE}] = 1
print("ready", flush=True)
round = 0
while True:
    for page in range({PAGES}):
        memory[(round % 4 * {PAGES} + page) * {PAGE}] = round % 256
    round += 1
    time.sleep({ROUND_S})
"""
# Writes PAGES other pages for each line that it gets, and says so.
ASKED = f"""
import mmap, sys
memory = mmap.mmap(-1, 4 * {PAGES} * {PAGE}, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(mmap.MADV_NOHUGEPAGE)
for page in range(4 * {PAGES}):
    memory[page * {PAGE}] = 1
print("ready", flush=True)
for round in range(4):
    sys.stdin.readline()
    for page in range({PAGES}):
        memory[(round * {PAGES} + page) * {PAGE}] = 2
    print("written", flush=True)
sys.stdin.read()
"""
# A shell that starts tests in the background has them ignore Ctrl-C.
INTERRUPTIBLE = """
import signal
from gpustasis.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)
main()
"""


@pytest.fixture
def job() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", JOB], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def watch(*words: object) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "gpustasis", "watch", *map(str, words)]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)


def test_each_look_is_a_json_object(job: subprocess.Popen[str]) -> None:
    ended = watch(job.pid, "--json", "--interval", 0.5, "--count", 4)
    assert ended.returncode == 0, ended.stderr
    *looks, last = map(json.loads, ended.stdout.splitlines())
    looks = [look["look"] for look in looks]
    assert len(looks) == 4
    for look in looks:
        assert look["backend"] in ("write-protect", "soft-dirty")
        assert look["dirty_bytes"] <= look["tracked_bytes"]
        assert look["tracked_bytes"] >= 4 * PAGES * PAGE
    # As often as it sleeps at most; a machine that is busy with other things makes it slower.
    assert last["summary"]["mean_bytes_per_second"] < PAGES * PAGE / ROUND_S * 1.3
    assert last["summary"]["looks"] == 4
    assert "checkpoint_interval_s" not in last["summary"]


def test_what_is_written_is_seen_and_divided_by_the_time() -> None:
    with (
        ended(python(ASKED)) as job,
        ended(
            python(INTERRUPTIBLE, "watch", str(job_pid(job)), "--json", "--interval", "0.2")
        ) as watching,
    ):
        assert job.stdin is not None and job.stdout is not None and watching.stdout is not None
        looks = [json.loads(watching.stdout.readline())["look"]]
        for number in range(1, 5):
            job.stdin.write(b"\n")
            job.stdin.flush()
            assert job.stdout.readline() == b"written\n"
            deadline = time.monotonic() + 60
            while seen(looks) < number * PAGES * PAGE:
                assert time.monotonic() < deadline, looks
                looks.append(json.loads(watching.stdout.readline())["look"])
        watching.send_signal(signal.SIGINT)
        # Not by communicate(), which misses what readline() has read ahead.
        *more, last = map(json.loads, watching.stdout.read().splitlines())
        looks += [each["look"] for each in more]
    summary = last["summary"]
    assert summary["looks"] == len(looks)
    assert seen(looks) < 4 * PAGES * PAGE * 1.3  # what Python writes for itself
    assert summary["seconds"] == pytest.approx(sum(look["seconds"] for look in looks), abs=1e-3)
    rate = seen(looks) / summary["seconds"]
    assert summary["mean_bytes_per_second"] == pytest.approx(rate, rel=1e-3)
    for look in looks:
        rate = look["dirty_bytes"] / look["seconds"]
        assert look["bytes_per_second"] == pytest.approx(rate, rel=1e-3, abs=1)


def python(source: str, *words: str) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-c", source, *words]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def job_pid(job: subprocess.Popen[bytes]) -> int:
    """Once it is ready."""
    assert job.stdout is not None
    assert job.stdout.readline() == b"ready\n"
    return job.pid


def seen(looks: list[dict[str, int]]) -> int:
    return sum(look["dirty_bytes"] for look in looks)


def test_the_table_says_what_it_sees(job: subprocess.Popen[str]) -> None:
    ended = watch(job.pid, "--count", 2, "--interval", 0.2, "--mtbf", 86400, "--bandwidth", 500)
    assert ended.returncode == 0, ended.stderr
    assert "GPU memory is not seen" in " ".join(ended.stdout.split())
    assert "Checkpoint" in ended.stdout
    assert "Writes per s" in ended.stdout


def test_the_interval_follows_from_the_cost(job: subprocess.Popen[str]) -> None:
    words = ("--count", 1, "--interval", 0.2, "--mtbf", 7200, "--cost", 25)
    ended = watch(job.pid, "--json", *words)
    assert ended.returncode == 0, ended.stderr
    summary = json.loads(ended.stdout.splitlines()[-1])["summary"]
    assert summary["checkpoint_interval_s"] == 600.0
    assert summary["checkpoint_cost_s"] == 25.0


def test_ctrl_c_ends_it_with_a_summary(job: subprocess.Popen[str]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE, "watch", str(job.pid), "--json", "--interval", "0.2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("{")
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, "")
    assert json.loads(output.splitlines()[-1])["summary"]["ended"] == "interrupted"
    assert job.poll() is None


def test_it_ends_with_the_process(job: subprocess.Popen[str]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "gpustasis", "watch", str(job.pid), "--json", "--interval", "0.2"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("{")  # it has looked at it
    job.kill()
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert json.loads(output.splitlines()[-1])["summary"]["ended"] == "the process has ended"


def test_children_are_watched_too() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", JOB, "fork"],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        ended = watch(process.pid, "--json", "--tree", "--interval", 0.5, "--count", 3)
        assert ended.returncode == 0, ended.stderr
        look = json.loads(ended.stdout.splitlines()[2])["look"]
        assert look["processes"] == 2
        assert look["tracked_bytes"] >= 8 * PAGES * PAGE
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        (["999999999"], 3, "there is no process 999999999"),
        (["1", "--mtbf", "5"], 2, "--mtbf needs --cost or --bandwidth"),
        (["1", "--cost", "5"], 2, "say nothing without --mtbf"),
    ],
)
def test_what_cannot_be_watched_is_said(words: list[str], status: int, text: str) -> None:
    ended = watch(*words)
    assert ended.returncode == status, ended.stderr
    assert text in ended.stderr


def test_a_backend_that_cannot_work_is_refused(job: subprocess.Popen[str]) -> None:
    for name, reason in dirty_backends().items():
        ended = watch(job.pid, "--backend", name, "--count", 1, "--interval", 0.1, "--json")
        if reason:
            assert ended.returncode == 20
            assert reason in ended.stderr
        else:
            assert json.loads(ended.stdout.splitlines()[0])["look"]["backend"] == name
