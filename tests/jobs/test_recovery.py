# SPDX-License-Identifier: Apache-2.0
"""A job that fails is stopped, restored from its newest whole checkpoint, and comes to its end."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from gpustasis.emulator import Emulator
from gpustasis.errors import JobError
from jobs.test_ranks import network, ring, store  # noqa: F401 - fixtures
from support.job_ranks import state_of
from support.json_output import check_document
from support.ring import WORLD, Ring, reap

# LONG: of a job that does not come to its end in a test. LATER: that has a way to go after programs
# were started beside it.
STEPS, LATER, LONG = 3000, 5000, 100_000
# Connections that were locked for some seconds may stand still for some more: that is no hang.
HANGS = ("--hang-after", "12")


def begun(ring: Ring, *words: str, steps: int = STEPS) -> None:  # noqa: F811
    """The job runs, and has one whole checkpoint."""
    ring.steps = steps
    ring.start_all(*words)
    ring.wait(lambda: min(ring.steps_now()) > 100)
    made = ring.job("checkpoint", "--world", str(WORLD), "--leave-running")
    assert made.returncode == 0, made.stderr + ring.logs()
    ring.wait_for_progress()


def shown(ring: Ring) -> dict[str, Any]:  # noqa: F811
    """What `job recoveries` says."""
    told = ring.job("recoveries", "--json")
    assert told.returncode == 0, told.stdout
    return check_document(told.stdout, "job recoveries")


def test_a_rank_that_is_killed_is_restored_with_all_others(ring: Ring) -> None:  # noqa: F811
    begun(ring, "--restarts", "2")
    os.kill(ring.program_of(2), signal.SIGKILL)
    assert ring.ends() == [0] * WORLD, ring.logs()
    ring.check_end()
    found = shown(ring)
    assert (found["state"], found["restarts"]) == ("done", 1)
    (recovery,) = found["recoveries"]
    assert (recovery["restored"], recovery["epoch"]) == (1, 2)
    assert 0 < recovery["seconds"] < 60
    assert ring.pids() == []
    assert ring.locked() == []
    for rank in range(WORLD):
        assert (ring.directory / f"kept/rank-{rank}/epoch-00000001").is_dir()


def test_a_job_without_a_whole_checkpoint_ends_with_an_error(ring: Ring) -> None:  # noqa: F811
    ring.start_all("--restarts", "2")
    ring.wait(lambda: min(ring.steps_now()) > 20)
    os.kill(ring.program_of(1), signal.SIGKILL)
    assert set(ring.ends()) <= {1, 137, JobError.exit_code}
    found = shown(ring)
    assert found["state"] == "failed"
    assert "there is no whole checkpoint to restore" in found["reason"]
    assert found["recoveries"] == []
    assert ring.pids() == []


def test_it_starts_afresh_if_told_so(ring: Ring) -> None:  # noqa: F811
    ring.steps = 2000
    ring.start_all("--restarts", "1", "--afresh")
    ring.wait(lambda: min(ring.steps_now()) > 20)
    os.kill(ring.program_of(1), signal.SIGKILL)
    assert ring.ends() == [0] * WORLD, ring.logs()
    ring.check_end()
    (recovery,) = shown(ring)["recoveries"]
    assert (recovery["restored"], recovery["epoch"]) == (0, 0)


def test_a_restore_that_is_aborted_is_tried_again(
    ring: Ring,  # noqa: F811
    emulator: Emulator,
) -> None:
    """The ranks whose tasks it had brought back by then are ended, and their pids are free."""
    begun(ring, "--restarts", "2", "--back-off", "0")
    emulator.add_fault("restore", "error", code=999, count=1)
    os.kill(ring.program_of(2), signal.SIGKILL)
    assert ring.ends() == [0] * WORLD, ring.logs()
    ring.check_end()
    found = shown(ring)
    assert (found["state"], found["restarts"]) == ("done", 2)


def test_restarts_are_bounded(ring: Ring) -> None:  # noqa: F811
    begun(ring, "--restarts", "1", "--back-off", "0", steps=LONG)
    os.kill(ring.program_of(3), signal.SIGKILL)
    ring.wait(lambda: len(shown(ring)["recoveries"]) == 1)
    ring.wait_for_progress()
    os.kill(ring.program_of(3), signal.SIGKILL)
    assert all(ring.ends())
    found = shown(ring)
    assert found["state"] == "failed"
    assert "it was restarted 1 times already" in found["reason"]
    assert ring.pids() == []
    for rank in range(WORLD):
        assert (ring.directory / f"kept/rank-{rank}/epoch-00000001").is_dir()


def test_whoever_ends_the_job_does_not_see_it_restored(ring: Ring) -> None:  # noqa: F811
    begun(ring, "--restarts", "3", steps=LONG)
    ring.signal(2, signal.SIGTERM)
    statuses = ring.ends()
    assert statuses[2] in {128 + signal.SIGTERM, JobError.exit_code}
    assert all(statuses)
    found = shown(ring)
    assert (found["state"], found["recoveries"]) == ("failed", [])
    assert ring.pids() == []


def test_a_node_that_is_killed_is_taken_over_by_the_next_keeper(ring: Ring) -> None:  # noqa: F811
    """Its keeper and its tasks die at once. Nothing is restored before a keeper there has said that
    nothing of it is left."""
    begun(ring, "--restarts", "2")
    ring.kill_node(1)
    ring.wait(lambda: "rank 1 was on " in ring.log(0))
    assert len(shown(ring)["recoveries"]) == 0
    ring.start(1, "--restarts", "2", "--standby", command=False)
    assert ring.ends() == [0] * WORLD, ring.logs()
    ring.check_end()
    (recovery,) = shown(ring)["recoveries"]
    assert recovery["restored"] == 1


def test_a_node_that_was_switched_off_is_restored_elsewhere(ring: Ring) -> None:  # noqa: F811
    """Where its dump and its addresses are; as soon as somebody says that it is off."""
    begun(ring, "--restarts", "2")
    early = ring.job("fence", "--rank", "1")
    assert early.returncode == JobError.exit_code
    assert "waits for no rank" in early.stderr
    ring.kill_node(1)
    ring.start_elsewhere(1, "--restarts", "2", "--standby")
    ring.wait(lambda: "make sure that its tasks have ended there" in ring.log(0))
    assert shown(ring)["recoveries"] == []
    told = ring.job("fence", "--rank", "1", "--json")
    assert told.returncode == 0, told.stderr
    assert check_document(told.stdout, "job fence")["life"] == 1
    ring.keepers[1] = ring.keepers_elsewhere.pop()
    assert ring.ends() == [0] * WORLD, ring.logs()
    ring.check_end()


def test_a_job_that_waits_is_given_up(ring: Ring) -> None:  # noqa: F811
    begun(ring, "--restarts", "2")
    ring.kill_node(1)
    ring.wait(lambda: "rank 1 was on " in ring.log(0))
    told = ring.job("give-up", "--json")
    assert told.returncode == 0, told.stderr
    assert check_document(told.stdout, "job give-up")["state"] == "failed"
    assert all(ring.ends())
    assert "has failed: given up by hand" in ring.log(0)
    assert ring.pids() == []


def test_a_standby_takes_over_from_a_keeper_that_is_killed(ring: Ring) -> None:  # noqa: F811
    """Its rank runs on: nothing has failed."""
    begun(ring, "--restarts", "1", steps=LATER)
    standing_by = [ring.keepers[rank] for rank in range(WORLD)]
    for rank in (0, 2):
        killed = standing_by[rank]
        assert killed is not None
        ring.start(rank, "--restarts", "1", "--standby", command=False)
        said = ring.directory / f"keeper-{rank}"
        ring.wait(lambda said=said: "stands by until" in said.read_text())
        killed.kill()
        killed.wait()
    ring.wait_for_progress()
    ring.wait(lambda: all("done " in ring.output(rank) for rank in range(WORLD)))
    assert ring.ends() == [0] * WORLD, ring.logs()
    ring.check_end()
    found = shown(ring)
    assert (found["state"], found["restarts"]) == ("done", 0)


@pytest.mark.timeout(900)
def test_a_hanging_job_leaves_evidence_and_goes_on(ring: Ring) -> None:  # noqa: F811
    begun(ring, "--restarts", "1", *HANGS, "--evidence", steps=LATER)
    os.kill(ring.program_of(1), signal.SIGUSR1)
    ring.wait(lambda: len(shown(ring)["recoveries"]) == 1, timeout_s=120)
    (recovery,) = shown(ring)["recoveries"]
    assert "hangs: CPU and GPU are idle and its log is silent for 12 s" in recovery["reason"]
    assert recovery["unnoticed_s"] >= 12
    assert (recovery["restored"], recovery["epoch"]) == (1, 3)
    assert ring.ends(240) == [0] * WORLD, ring.logs()
    ring.check_end()

    for rank in range(WORLD):
        stacks = list((ring.directory / f"kept/rank-{rank}/evidence-00000001").glob("*.proc"))
        assert any("wchan" in path.read_text() for path in stacks), rank
    listed = check_document(ring.job("list", "--json").stdout, "job list")["epochs"]
    kinds = [(one["kind"], one["state"]) for one in listed]
    assert kinds == [
        ("checkpoint", "committed"),
        ("evidence", "committed"),
        ("restore", "committed"),
    ]
    assert check_document(ring.job("show", "--json").stdout, "job show")["epoch"] == 1
    pruned = ring.job("prune", "--keep-last", "1", "--json")
    assert check_document(pruned.stdout, "job prune")["epochs"] == []
    assert (ring.directory / "kept/rank-1/epoch-00000002").is_dir()
    look_at(ring, 2)


@pytest.mark.timeout(900)
def test_a_job_that_is_recovered_is_preempted_and_goes_on(ring: Ring) -> None:  # noqa: F811
    """One command line for all of it: the first start, what follows a SIGTERM, and a failure."""
    words = ("--restarts", "2", "--checkpoint-on-sigterm", "--checkpointed-status", "75")
    words += ("--restore-newest",)
    ring.steps = 2 * STEPS
    ring.start_all(*words)
    ring.wait(lambda: min(ring.steps_now()) > 50)
    ring.signal(2, signal.SIGTERM)
    assert ring.ends() == [75] * WORLD, ring.logs()
    assert ring.pids() == [] and ring.locked() == []
    found = shown(ring)
    assert (found["state"], found["reason"]) == ("done", "ended by the checkpoint of epoch 1")

    ring.start_all(*words)
    ring.wait_for_progress()
    ring.wait(lambda: f"job {ring.name} goes on from epoch 1" in ring.log_whole(0))
    os.kill(ring.program_of(3), signal.SIGKILL)
    ring.wait(lambda: len(shown(ring)["recoveries"]) == 1)
    ring.wait_for_progress()
    ring.signal(0, signal.SIGTERM)
    assert ring.ends() == [75] * WORLD, ring.logs()

    ring.start_all(*words)
    assert ring.ends(240) == [0] * WORLD, ring.logs()
    ring.check_end()
    assert shown(ring)["restarts"] == 0  # since this start
    (recovery,) = shown(ring)["recoveries"]
    assert recovery["restored"] == 1

    # It has come to its end: the next start is one from the beginning.
    said = len(ring.log_whole(0))
    ring.start_all(*words)
    ring.wait(lambda: "starts: it has ended well after epoch" in ring.log_whole(0)[said:])
    ring.wait(lambda: len(ring.pids()) == WORLD)
    for pid in ring.pids():
        with suppress(ProcessLookupError):  # one has failed, and the others are stopped
            os.kill(pid, signal.SIGKILL)
    assert set(ring.ends()) <= {1, 128 + signal.SIGKILL, JobError.exit_code}, ring.logs()


@pytest.mark.timeout(900)
def test_a_checkpoint_that_does_not_bring_it_back_is_followed_by_the_next_older_one(
    ring: Ring,  # noqa: F811
    tmp_path: Path,
) -> None:
    check = tmp_path / "check"
    check.write_text("#!/bin/sh\n[ $GPUSTASIS_RANK-$GPUSTASIS_EPOCH != 2-2 ]\n")
    check.chmod(0o755)
    begun(ring, "--restarts", "2", "--back-off", "0", "--verify-after", str(check), steps=2 * STEPS)
    made = ring.job("checkpoint", "--world", str(WORLD), "--leave-running")
    assert made.returncode == 0, made.stderr + ring.logs()
    os.kill(ring.program_of(1), signal.SIGKILL)
    assert ring.ends(240) == [0] * WORLD, ring.logs()
    ring.check_end()
    found = shown(ring)
    assert (found["state"], found["restarts"]) == ("done", 2)
    (recovery,) = found["recoveries"]
    assert recovery["restored"] == 1
    assert "rank 2 is not back: " in recovery["reason"]
    listed = check_document(ring.job("list", "--json").stdout, "job list")["epochs"]
    assert "rank 2 is not back" in listed[1]["note"]


@pytest.mark.timeout(900)
def test_a_checkpoint_of_a_job_that_hung_already_is_not_restored_for_ever(
    ring: Ring,  # noqa: F811
) -> None:
    """It was made before anybody had noticed."""
    begun(ring, "--restarts", "3", "--back-off", "0", "--hang-after", "25")
    os.kill(ring.program_of(1), signal.SIGUSR1)
    made = ring.job("checkpoint", "--world", str(WORLD), "--leave-running")
    assert made.returncode == 0, made.stderr + ring.logs()
    assert ring.ends(240) == [0] * WORLD, ring.logs()
    ring.check_end()
    assert [one["restored"] for one in shown(ring)["recoveries"]] == [2, 1]
    listed = check_document(ring.job("list", "--json").stdout, "job list")["epochs"]
    assert "not verified: the job hung as soon as it was restored" in listed[1]["note"]


@pytest.mark.timeout(900)
def test_a_rank_that_is_stopped_is_restored_without_a_checkpoint_of_it(
    ring: Ring,  # noqa: F811
) -> None:
    """By a debugger, say: the driver answers nothing about it."""
    begun(ring, "--restarts", "1", *HANGS, "--evidence", steps=LATER)
    os.kill(ring.program_of(1), signal.SIGSTOP)
    ring.wait(lambda: len(shown(ring)["recoveries"]) == 1, timeout_s=120)
    assert ring.ends(240) == [0] * WORLD, ring.logs()
    ring.check_end()
    listed = check_document(ring.job("list", "--json").stdout, "job list")["epochs"]
    assert [one["state"] for one in listed] == ["committed", "aborted", "committed"]
    assert "no answer within 10 s" in listed[1]["note"]


def look_at(ring: Ring, epoch: int) -> None:  # noqa: F811
    """Replay it: every rank stands, in a network that leads nowhere."""
    words = ["--criu", ring.criu] if ring.criu else []
    made = ring.job("replay", str(epoch), "--json", *words)
    assert made.returncode == 0, made.stderr
    ranks = check_document(made.stdout, "job replay")["ranks"]
    try:
        assert [one["rank"] for one in ranks] == list(range(WORLD))
        assert sorted(one["pid"] for one in ranks) == ring.pids()
        spaces = {os.readlink(f"/proc/{one['pid']}/ns/net") for one in ranks}
        assert len(spaces) == WORLD
        for one in ranks:
            assert state_of(one["pid"]) == "T"
            links = Path(f"/proc/{one['pid']}/net/dev").read_text().splitlines()[2:]
            assert [line.split(":")[0].strip() for line in links] == ["lo"]
        again = ring.job("replay", str(epoch), *words)
        assert again.returncode == JobError.exit_code
        assert "exists, and is to be restored" in again.stderr
    finally:
        for one in ranks:
            os.kill(one["pid"], signal.SIGKILL)
            reap(one["pid"])


def test_a_keeper_that_is_only_cut_off_is_not_restored_elsewhere(ring: Ring) -> None:  # noqa: F811
    """It stands still and its rank runs: the job waits, until it has stopped the rank itself."""
    begun(ring, "--restarts", "2", steps=2 * STEPS)  # it runs until the keeper is missed
    ring.signal(2, signal.SIGSTOP)
    pid = ring.program_of(2)
    ring.wait(lambda: "rank 2 was on " in ring.log(0))
    assert shown(ring)["state"] == "stops"
    assert shown(ring)["recoveries"] == []
    # One with a --run-directory of its own knows nothing of the tasks that run there.
    ring.start_elsewhere(2, "--restarts", "2", "--standby")
    ring.wait(lambda: "make sure that its tasks have ended there" in ring.log(0))
    assert Path(f"/proc/{pid}").exists()
    assert shown(ring)["recoveries"] == []
    other = ring.keepers_elsewhere.pop()
    said = len(ring.log_whole(0))  # before its lease can have ended: it is said once
    other.kill()
    other.wait()
    ring.wait(lambda: "where no keeper says" in ring.log_whole(0)[said:])
    ring.signal(2, signal.SIGCONT)
    assert ring.ends() == [0] * WORLD, ring.logs()
    ring.check_end()
