# SPDX-License-Identifier: Apache-2.0
"""What `gpustasis preempt` makes of a keeper, by what that says in its file; played by a program
that says one thing before SIGTERM and one after it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpustasis.errors import CheckpointError
from gpustasis.locked_file import KEEPER_NAME
from gpustasis.preemption.asking import Answer, preempt

READY = {"preemptible": True, "listens": True}
PLAYED = """
import json, os, signal, sys, time
from gpustasis.locked_file import tell
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
def say(facts):
    if facts is not None:
        tell(file, {"keeper": os.getpid() + int(sys.argv[2]), **facts})
first, second, ends = map(json.loads, sys.argv[3:])
listens = False
def told(*_):
    if not listens:
        os._exit(9)  # a real one would die of it
    say(second)
    if ends:
        os._exit(0)
signal.signal(signal.SIGTERM, told)
for facts in first:
    listens = isinstance(facts, dict) and facts.get("listens") is True
    say(facts)
    time.sleep(0.5)
while True:
    time.sleep(60)
"""
Play = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Play]:
    begun = []

    def begin(
        first: object, second: object = None, *, ends: bool = True, off: int = 0
    ) -> subprocess.Popen[bytes]:
        words = [str(tmp_path / KEEPER_NAME), str(off), *map(json.dumps, (first, second, ends))]
        begun.append(subprocess.Popen([sys.executable, "-c", PLAYED, *words]))
        deadline = time.monotonic() + 60
        while not (tmp_path / KEEPER_NAME).exists() or not (tmp_path / KEEPER_NAME).read_bytes():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return begun[-1]

    yield begin
    for each in begun:
        each.kill()
        each.wait()


def test_a_checkpoint_is_told_when_the_keeper_has_ended(play: Play) -> None:
    made = {"checkpoint": "/kept/rank-0/epoch-00000007", "because": "epoch 7 of job train"}
    # One that has just begun is not told before it listens.
    keeper = play([{"preemptible": True}, READY], made)
    assert preempt(keeper.pid, 60) == Answer(supervisor=keeper.pid, keeper=True, **made)
    assert keeper.wait() == 0


def test_no_checkpoint_is_told_while_the_tasks_still_take_their_time(play: Play) -> None:
    keeper = play([READY], {**READY, "gave_up": True, "because": "too large"}, ends=False)
    done = preempt(keeper.pid, 60)
    assert (done.checkpoint, done.because) == ("", "too large")
    with pytest.raises(subprocess.TimeoutExpired):
        keeper.wait(0.3)


def test_a_keeper_that_ends_without_a_word_has_made_no_checkpoint(play: Play) -> None:
    keeper = play([READY])
    done = preempt(keeper.pid, 60)
    assert (done.checkpoint, done.because) == ("", "it was killed, or says nothing")


def test_a_keeper_that_says_something_of_another_one_is_none(play: Play) -> None:
    keeper = play([READY], off=1)
    with pytest.raises(CheckpointError, match="and no `gpustasis job run`"):
        preempt(keeper.pid, 60)
    with pytest.raises(subprocess.TimeoutExpired):
        keeper.wait(0.3)


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ([READY], READY, "has not ended in 1 s; it is still at work"),
        ([{"preemptible": True}], None, "is not ready yet: it was told nothing"),
        ([{"preemptible": False}], None, "was started without --checkpoint-on-sigterm"),
        ([{"preemptible": "yes", "listens": True}], None, "without --checkpoint-on-sigterm"),
    ],
)
def test_what_is_an_error(play: Play, first: object, second: object, said: str) -> None:
    keeper = play(first, second, ends=False)
    with pytest.raises(CheckpointError, match=said):
        preempt(keeper.pid, 1)
    with pytest.raises(subprocess.TimeoutExpired):
        keeper.wait(0.3)
