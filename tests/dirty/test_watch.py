# SPDX-License-Identifier: Apache-2.0
"""gpustasis watch on a job that writes at a known rate."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from gpustasis._core import dirty_backends

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
        assert 0 < look["dirty_bytes"] <= look["tracked_bytes"]
        assert look["tracked_bytes"] >= 4 * PAGES * PAGE
    # As often as it sleeps at most; a machine that is busy with other things makes it slower.
    expected = PAGES * PAGE / ROUND_S
    assert expected / 4 < last["summary"]["mean_bytes_per_second"] < expected * 1.3
    assert last["summary"]["looks"] == 4
    assert "checkpoint_interval_s" not in last["summary"]


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
