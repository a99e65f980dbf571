# SPDX-License-Identifier: Apache-2.0
"""A command that has to succeed after a restore, before the job counts as back."""

from __future__ import annotations

import json
import os
import shlex
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpustasis import verifying
from gpustasis.errors import VerificationError
from gpustasis.verifying import Check, require_verified
from preemption.test_just_in_time import CHECKPOINTED, PAIR, ROUNDS, names, sums
from support.supervised import Supervised, soon

Supervise = Callable[..., Supervised]


def program(place: Path, text: str) -> str:
    """A shell script, by an absolute path."""
    path = place / "check"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    return stat.rpartition(") ")[2][0] not in "ZX"


def checkpointed(run: Supervised, after: str) -> None:
    run.wait_for(after)
    run.tell_to_end()
    assert run.wait() == CHECKPOINTED, run.said()


def unverified(checkpoint: Path) -> object:
    """Why, as it is noted in the checkpoint."""
    return json.loads((checkpoint / "gpustasis-jit.json").read_text())["unverified"]


def test_the_job_is_back_once_the_command_has_succeeded(
    supervise: Supervise, tmp_path: Path
) -> None:
    noted = tmp_path / "noted"
    check = program(
        tmp_path,
        f'kill -0 "$GPUSTASIS_ROOT_PID" && printf "%s\\n" "$GPUSTASIS_ROOT_PID" '
        f'"$GPUSTASIS_CHECKPOINT" "$@" > {noted}; echo looked',
    )
    odd = "$(touch here); a word"  # no shell sees it
    words = ("--verify-after", shlex.join([check, odd]), PAIR, ROUNDS, 8, 0.02)
    first = supervise(*words)
    checkpointed(first, "\n20 ")
    assert not noted.exists()  # nothing was restored
    second = supervise(*words)
    assert second.wait() == 0, second.said()
    assert f"process {second.root()} is back: " in second.said()
    assert "looked\n" in second.said()
    assert noted.read_text().split("\n")[:3] == [
        str(second.root()),
        f"{tmp_path}/store/jit-000001",
        odd,
    ]
    assert not (tmp_path / "here").exists()
    assert first.wrote() + second.wrote() == sums(
        ROUNDS
    )  # what it prints is no output of the job's


@pytest.mark.parametrize(
    ("text", "seconds", "why"),
    [("exit 7", 60, "status 7"), ("exec sleep 600", 1, "has not ended after 1 s")],
)
def test_a_job_that_is_not_verified_is_killed_and_its_checkpoint_stays(
    supervise: Supervise, tmp_path: Path, text: str, seconds: int, why: str
) -> None:
    job = (PAIR, 5000, 8, 0.02)
    checkpointed(supervise(*job), "\n20 ")
    check = ("--verify-after", program(tmp_path, text), "--verify-timeout", seconds)
    second = supervise(*check, *job)
    assert second.wait() == VerificationError.exit_code, second.said()
    assert why in second.said()
    assert not is_running(second.root())
    images = tmp_path / "store/jit-000001"
    assert names(tmp_path / "store") == ["jit-000001"]
    assert why in str(unverified(images))

    third = supervise("--verify-after", "true", *job)
    third.wait_for(" is back: ")
    assert f"{images} was not verified the last time: `{tmp_path}/check` has" in third.said()
    assert unverified(images) == ""
    third.tell_to_end()
    assert third.wait() == CHECKPOINTED


def test_the_next_older_one_is_tried_where_that_is_asked_for(
    supervise: Supervise, tmp_path: Path
) -> None:
    job = (PAIR, ROUNDS, 8, 0.02)
    first = supervise(*job)
    checkpointed(first, "\n20 ")
    second = supervise(*job)
    checkpointed(second, soon(first.wrote()))
    store = tmp_path / "store"
    fails = program(tmp_path, "exit 1")
    alone = supervise("--verify-after", fails, *job)  # nobody has asked for an older one
    assert alone.wait() == VerificationError.exit_code
    assert f"restored from {store}/jit-000001" not in alone.said()
    none = supervise("--older-if-unverified", "--verify-after", fails, *job)
    assert none.wait() == VerificationError.exit_code  # and it is not started afresh
    assert "starts afresh" not in none.said()
    for name in ("jit-000001", "jit-000002"):
        assert f"restored from {store}/{name}" in none.said()
        assert unverified(store / name)

    only_first = program(
        tmp_path, 'case "$GPUSTASIS_CHECKPOINT" in */jit-000001) ;; *) exit 1; esac'
    )
    words = ("--keep-last", 1, "--older-if-unverified", "--verify-after", only_first, *job)
    third = supervise(*words)
    third.wait_for(" is back: ")
    checkpointed(third, soon(first.wrote() + third.wrote()))
    assert f"older checkpoints stay, for {store}/jit-000002 was not verified" in third.said()
    assert names(store) == ["jit-000001", "jit-000002", "jit-000003"]
    fourth = supervise(*job)
    assert fourth.wait() == 0
    # What ran from the newest one was killed; then it went on from the first one.
    at = third.wrote().index(sums(len(first.wrote()) + 1)[-1])
    assert first.wrote() + third.wrote()[at:] + fourth.wrote() == sums(ROUNDS)


def test_sigterm_while_the_command_is_at_work_makes_a_new_checkpoint(
    supervise: Supervise, tmp_path: Path
) -> None:
    job = (PAIR, 5000, 8, 0.02)
    checkpointed(supervise(*job), "\n20 ")
    slow = program(tmp_path, f"echo $$ > {tmp_path}/pid; sleep 600; :")
    second = supervise("--keep-last", 1, "--verify-after", slow, *job)
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert second.process.poll() is None, second.said()
        time.sleep(0.02)
    second.tell_to_end()
    assert second.wait() == CHECKPOINTED, second.said()
    assert "it is not known whether it is back" in second.said()
    assert not is_running(int((tmp_path / "pid").read_text()))
    assert names(tmp_path / "store") == ["jit-000001", "jit-000002"]  # nobody knows if it is good


def test_options_that_contradict(supervise: Supervise) -> None:
    for words, why in (
        (("--older-if-unverified", "true"), "--older-if-unverified needs --verify-after"),
        (("--verify-after", "'", "true"), "cannot be taken apart"),
        (("--verify-after", " ", "true"), "it names no program"),
        (
            ("--verify-after", "no-such-program --now", "true"),
            "there is no program no-such-program",
        ),
    ):
        run = supervise(*words)
        assert run.wait() == 2
        assert why in run.said()


def test_what_the_command_leaves_in_its_group_ends_with_it(tmp_path: Path) -> None:
    left = tmp_path / "left"
    check = program(tmp_path, f"sleep 600 & echo $! > {left}")
    require_verified(Check(words=(check,), seconds=60), {})
    end = time.monotonic() + 60
    while is_running(int(left.read_text())):
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("/nowhere/check",), "cannot run /nowhere/check: No such file"),
        (("sh", "-c", "kill -9 $$"), f"has ended with signal {signal.SIGKILL}"),
        (("a\0b",), "cannot run"),
    ],
)
def test_a_command_that_cannot_run_has_failed(words: tuple[str, ...], why: str) -> None:
    with pytest.raises(VerificationError, match=why):
        require_verified(Check(words=words, seconds=60), {})


def test_a_command_that_does_not_end_when_it_is_killed_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one that waits in the kernel; here it is not killed."""
    left: list[int] = []
    monkeypatch.setattr(verifying, "_GROUP_S", 0.3)
    with monkeypatch.context() as patch:
        patch.setattr(os, "killpg", lambda pid, _: left.append(pid))
        begin = time.monotonic()
        with pytest.raises(VerificationError, match=r"has not ended after 0\.2 s"):
            require_verified(Check(words=("sleep", "300"), seconds=0.2), {})
        assert time.monotonic() - begin < 100
    os.killpg(left[0], signal.SIGKILL)
    os.waitpid(left[0], 0)
