# SPDX-License-Identifier: Apache-2.0
"""What a keeper says, and who hears it: its stdout may have lost its reader, may be for a program,
and what is said too late goes nowhere."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpustasis.errors import JobError
from gpustasis.jobs import epochs
from gpustasis.jobs.ending import FORWARDED, Ended
from gpustasis.jobs.local import Local
from gpustasis.jobs.messages import Phase
from gpustasis.jobs.place import place_of
from gpustasis.jobs.preempting import Grace, Preempting
from gpustasis.jobs.rank import Context
from gpustasis.jobs.records import Keys, Plan
from gpustasis.jobs.server import Server
from gpustasis.jobs.supervise import Supervisor
from gpustasis.locked_file import KEEPER_NAME
from jobs.test_undoing import SETTINGS, context, server  # noqa: F401 - fixtures
from support.criu_roots import criu_place, newest_criu
from support.job_ranks import ANSWER_S, wait_for
from support.json_output import check_document

KEYS = Keys("job")
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(server: Server, tmp_path: Path) -> Iterator[Start]:  # noqa: F811
    """The keeper of a job of one rank, which checkpoints nothing upon SIGTERM, for want of time."""
    begun: list[subprocess.Popen[str]] = []
    place = place_of("job", 0, tmp_path / "kept", tmp_path / "run")

    def begin(*words: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "gpustasis", "job", "run", "--job", "job"]
        argv += ["--rank", "0", "--world", "1", "--store", str(tmp_path / "store")]
        argv += ["-D", str(tmp_path / "kept"), "--run-directory", str(tmp_path / "run")]
        argv += ["--criu", criu_place(newest_criu()), "--checkpoint-on-sigterm", "--speed", "1K"]
        begun.append(
            subprocess.Popen(
                [*argv, *words, "--", "sleep", "1000"], stdout=subprocess.PIPE, text=True
            )
        )

        def listens() -> bool:
            assert begun[-1].poll() is None
            file = place.run / KEEPER_NAME
            return file.exists() and '"listens": true' in file.read_text()

        wait_for(listens, "the keeper")
        return begun[-1]

    yield begin
    for keeper in begun:
        keeper.kill()
        keeper.wait()
        if keeper.stdout is not None:
            keeper.stdout.close()
    if (left := place.load()).lives:
        os.kill(left.pid, signal.SIGKILL)


def test_a_keeper_looks_after_its_rank_whether_or_not_anybody_reads_what_it_says(
    start: Start, tmp_path: Path
) -> None:
    """As when a supervisor ends all of a service, what reads its output with it."""
    keeper = start()
    assert keeper.stdout is not None
    assert "output in" in keeper.stdout.readline()
    keeper.stdout.close()
    store = Local(tmp_path / "store", ANSWER_S)
    number = epochs.begin(store, KEYS, Plan(world=2, leave_running=True))

    def is_settled() -> bool:
        return epochs.phase(store, KEYS, number)[0].phase is Phase.ABORTED

    wait_for(is_settled, "the keeper's refusal")  # which it tells
    store.close()
    keeper.send_signal(signal.SIGTERM)
    assert keeper.wait(60) == 128 + signal.SIGTERM


def test_with_json_nothing_else_is_on_stdout_whichever_thread_has_something_to_say(
    start: Start,
) -> None:
    keeper = start("--json")
    keeper.send_signal(signal.SIGTERM)
    said = keeper.communicate(timeout=60)[0]
    assert keeper.returncode == 128 + signal.SIGTERM
    found = check_document(said, "job run")
    assert (found["status"], found["epoch"]) == (128 + signal.SIGTERM, None)


def test_what_is_said_too_late_is_written_to_no_other_file(tmp_path: Path) -> None:
    """A thread may learn only then that there is no checkpoint."""
    place = place_of("job", 0, tmp_path / "kept", tmp_path / "run")
    place.make()
    with place.kept(None, preemptible=True) as says:
        (held,) = (
            int(name)
            for name in os.listdir("/proc/self/fd")
            if os.path.exists(f"/proc/self/fd/{name}")
            and os.readlink(f"/proc/self/fd/{name}") == str(place.run / KEEPER_NAME)
        )
    (tmp_path / "other").write_text("other")
    descriptor = os.open(tmp_path / "other", os.O_RDWR)
    os.dup2(descriptor, held)
    try:
        says(because="there was no time", gave_up=True)
    finally:
        os.close(held)
        if held != descriptor:
            os.close(descriptor)
    assert (tmp_path / "other").read_text() == "other"
    assert "gave_up" not in (place.run / KEEPER_NAME).read_text()


def test_a_keeper_that_fails_would_have_checkpointed_its_job_all_the_same(tmp_path: Path) -> None:
    """Whoever waits for it to listen is told that it has ended, and not that it would not have."""
    place = place_of("job", 0, tmp_path / "kept", tmp_path / "run")
    place.make()
    with pytest.raises(JobError), place.kept(None, preemptible=True) as says:
        says(listens=True)
        raise JobError("why not")
    found = json.loads((place.run / KEEPER_NAME).read_text())
    assert found == {"preemptible": True, "because": "why not", "keeper": os.getpid()}


def test_a_signal_that_comes_too_late_takes_no_word_from_a_keeper(
    context: Context,  # noqa: F811
) -> None:
    """It has still to say whether there is a checkpoint, and to end with the status for it."""
    said: list[str] = []
    heard: list[int] = []
    preempting = Preempting(context, Grace(grace_s=30, reserve_s=5), said.append)
    supervisor = Supervisor(context, SETTINGS, said.append, preempting)
    before = {
        number: signal.signal(number, lambda number, _: heard.append(number))
        for number in FORWARDED
    }
    try:
        supervisor.start(["true"], os.environ)
        assert supervisor.run(restoring=False) == Ended(epoch=0, status=0)
        for number in FORWARDED:
            os.kill(os.getpid(), number)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert (heard, said) == ([], [])
