# SPDX-License-Identifier: Apache-2.0
"""A job of two processes with a connection between them, under `python -m gpustasis.jit`: with
CRIU, and all that it writes compared with what it writes when nobody interrupts it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpustasis.preemption.network import unlock
from support.command import call
from support.json_output import check_document
from support.supervised import Supervised, end_session, soon

PAIR = Path(__file__).resolve().parent.parent / "programs" / "pair.py"
CHECKPOINTED = 75
NOT_THE_STATUS_OF_A_BUG = 3
ROUNDS = 1000  # of 0.02 s: the job still runs when its dump begins, on a busy machine as well
Supervise = Callable[..., Supervised]


def sums(rounds: int) -> list[str]:
    """What the job writes."""
    total, lines = 0, []
    for number in range(rounds):
        total = (total * 31 + number * 7919) % (1 << 61)
        lines.append(f"{number} {total}")
    return lines


def names(store: Path) -> list[str]:
    return sorted(path.name for path in store.iterdir() if path.is_dir())


def flip_a_byte(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def test_three_starts_write_what_one_would_have_written(
    supervise: Supervise, tmp_path: Path
) -> None:
    words = ("--keep-last", 1, PAIR, ROUNDS, 80, 0.02)
    wrote: list[str] = []
    for _ in range(2):
        run = supervise(*words)
        run.wait_for(soon(wrote) if wrote else "\n20 ")
        run.tell_to_end()
        assert run.wait() == CHECKPOINTED, run.said()
        wrote += run.wrote()
    assert names(tmp_path / "store") == ["jit-000002"]  # keep_last
    last = supervise(*words)
    assert last.wait() == 0, last.said()
    assert "goes on, restored from" in last.said()
    assert len(wrote) < ROUNDS and wrote + last.wrote() == sums(ROUNDS)

    again = supervise(*words)  # it ended well: nobody wants its middle again
    again.wait_for("starts afresh")
    assert "the job has ended with status 0 since" in again.said()
    again.wait_for("\n3 ")
    again.process.send_signal(signal.SIGINT)  # the job's own
    assert again.wait() == 128 + signal.SIGINT, again.said()
    assert again.wrote()[:3] == sums(3)


def test_its_checkpoints_go_to_the_disk_whatever_the_configuration_says(
    supervise: Supervise, environ: dict[str, str], tmp_path: Path
) -> None:
    """Those in memory cannot be packed, and go with the host."""
    (tmp_path / "config.toml").write_text('tier = "ram"\n')
    environ["GPUSTASIS_CONFIG"] = str(tmp_path / "config.toml")
    run = supervise(PAIR, 5000, 8, 0.02)
    run.wait_for("\n3 ")
    run.tell_to_end()
    assert run.wait() == CHECKPOINTED, run.said()
    assert names(tmp_path / "store") == ["jit-000001"]


def test_memory_of_every_process_counts_and_the_next_estimate_is_measured(
    supervise: Supervise,
) -> None:
    words = (PAIR, 5000, 100, 0.02)
    for expected in ("assumed, for none of this job was measured", "the last checkpoint took"):
        run = supervise(*words)
        run.wait_for("\n3 ") if expected.startswith("assumed") else run.wait_for("goes on")
        run.tell_to_end()
        assert run.wait() == CHECKPOINTED
        assert expected in run.said()
        size = float(run.said().split("MiB of CPU memory")[0].split("(")[-1])
        assert 100 < size < 200


def test_a_dump_that_would_take_too_long_is_not_begun(supervise: Supervise, tmp_path: Path) -> None:
    run = supervise("--speed", "1M", PAIR, 5000, 60, 0.02)
    run.wait_for("\n3 ")
    run.tell_to_end()
    assert run.wait() == 40, run.said()  # its own, as it ends when it is told
    assert run.wrote()[-1] == "told to end"
    assert "it would take about" in run.said() and "s are left for it" in run.said()
    assert names(tmp_path / "store") == []


def test_a_criu_that_hangs_is_killed_and_the_job_told_in_time(
    supervise: Supervise, slow_criu: Callable[[float, float], Path], tmp_path: Path
) -> None:
    criu = slow_criu(600, 0)
    run = supervise(
        "--criu", criu, "--grace", 26, "--reserve", 16, "--speed", "1T", PAIR, 5000, 8, 0.02
    )
    run.wait_for("\n3 ")
    begin = time.monotonic()
    run.tell_to_end()
    assert run.wait() == 40, run.said()
    assert 18 <= time.monotonic() - begin < 60  # killed when half of the reserve is left
    assert "was killed after" in run.said()
    store = tmp_path / "store"
    assert names(store) == []
    (store / "jit-000002").mkdir()  # as a supervisor that was killed leaves it
    (store / "jit-000002/dump.log").write_text("why")
    failed = supervise(PAIR, 5000, 8, 0.02)
    failed.wait_for("starts afresh")
    assert "jit-000002 is no whole checkpoint: its dump failed or was broken off" in failed.said()
    assert names(store) == []
    assert (store / "gpustasis-jit-failed.log").read_text() == "why"


def test_a_second_sigterm_while_the_dump_is_at_work_changes_nothing(
    supervise: Supervise, slow_criu: Callable[[float, float], Path]
) -> None:
    words = ("--criu", slow_criu(1, 0), PAIR, ROUNDS, 8, 0.02)
    run = supervise(*words)
    run.wait_for("\n20 ")
    run.tell_to_end()
    run.wait_for("checkpointing process")
    run.tell_to_end()
    assert run.wait() == CHECKPOINTED, run.said()
    last = supervise(*words)
    assert last.wait() == 0
    assert run.wrote() + last.wrote() == sums(ROUNDS)


def test_sigterms_that_came_while_a_dump_failed_are_passed_on_as_one(
    supervise: Supervise, slow_criu: Callable[[float, float], Path], tmp_path: Path
) -> None:
    job = "trap 'echo told' TERM; echo ready; while [ ! -e go ]; do sleep 0.05; done"
    words = ("--grace", 12, "--reserve", 4, "sh", "-c", job)
    run = supervise("--criu", slow_criu(600, 0), *words)
    run.wait_for("ready")
    run.tell_to_end()
    run.wait_for("checkpointing process")
    run.tell_to_end()
    run.wait_for("ready\ntold\n")
    run.tell_to_end()  # after that, each one
    run.wait_for("ready\ntold\ntold\n")
    (tmp_path / "go").touch()
    assert run.wait() == 0
    assert run.wrote() == ["ready", "told", "told"]


def test_sigterm_during_the_restore_makes_a_new_checkpoint(
    supervise: Supervise, slow_criu: Callable[[float, float], Path], tmp_path: Path
) -> None:
    words = ("--criu", slow_criu(0, 2), PAIR, ROUNDS, 8, 0.02)
    run = supervise(*words)
    run.wait_for("\n20 ")
    run.tell_to_end()
    assert run.wait() == CHECKPOINTED
    second = supervise(*words)
    while not (tmp_path / "restoring").exists():
        assert second.process.poll() is None, second.said()
        time.sleep(0.02)
    second.tell_to_end()
    assert second.wait() == CHECKPOINTED, second.said()
    assert "goes on, restored from" in second.said()
    last = supervise(*words)
    assert last.wait() == 0
    assert run.wrote() + second.wrote() + last.wrote() == sums(ROUNDS)


def test_a_damaged_checkpoint_is_named_and_stays_and_an_older_one_is_restored(
    supervise: Supervise, tmp_path: Path
) -> None:
    words = (PAIR, ROUNDS, 8, 0.02)
    first = supervise(*words)
    first.wait_for("\n20 ")
    first.tell_to_end()
    assert first.wait() == CHECKPOINTED
    second = supervise(*words)
    second.wait_for(soon(first.wrote()))
    second.tell_to_end()
    assert second.wait() == CHECKPOINTED
    store = tmp_path / "store"
    assert names(store) == ["jit-000001", "jit-000002"]
    flip_a_byte(store / "jit-000002/gpustasis-files.img")
    third = supervise(*words)
    assert third.wait() == 0, third.said()  # nothing holds its connection back any more
    assert "jit-000002 cannot be restored: it is damaged: " in third.said()
    assert f"restored from {store}/jit-000001" in third.said()
    assert first.wrote() + third.wrote() == sums(ROUNDS)
    assert names(store) == ["jit-000001", "jit-000002"]


def test_where_none_can_be_restored_it_starts_afresh_or_fails_as_asked(
    supervise: Supervise, tmp_path: Path
) -> None:
    words = (PAIR, ROUNDS, 8, 0.02)
    run = supervise(*words)
    run.wait_for("\n20 ")
    run.tell_to_end()
    assert run.wait() == CHECKPOINTED
    log = tmp_path / "store/jit-000001/dump.log"
    (tmp_path / "dump.log").write_bytes(log.read_bytes())
    assert len(unlock(tmp_path)) == 1 and unlock(tmp_path) == []
    flip_a_byte(tmp_path / "store/jit-000001/gpustasis-files.img")
    failed = supervise("--never-afresh", *words)
    assert failed.wait() == NOT_THE_STATUS_OF_A_BUG
    assert "none of the job's checkpoints can be restored" in failed.said()
    afresh = supervise(*words)
    assert afresh.wait() == 0
    assert afresh.wrote() == sums(ROUNDS)
    assert names(tmp_path / "store") == ["jit-000001"]


def test_another_command_directory_or_script_is_another_job(
    supervise: Supervise, tmp_path: Path, environ: dict[str, str]
) -> None:
    script = tmp_path / "job.py"
    script.write_bytes(PAIR.read_bytes())
    run = supervise(script, 5000, 8, 0.02)
    run.wait_for("\n5 ")
    run.tell_to_end()
    assert run.wait() == CHECKPOINTED
    other = supervise(script, 5, 8, 0.02)
    assert other.wait() == 0
    assert "is of another command: " in other.said() and other.wrote() == sums(5)
    (tmp_path / "store/gpustasis-jit-ended").unlink()
    script.write_text(PAIR.read_text() + "# changed\n")
    changed = supervise(script, 5000, 8, 0.02)
    changed.wait_for("starts afresh")
    assert "jit-000001 is of another version of the script" in changed.said()


def test_two_supervisors_and_a_job_whose_supervisor_was_killed(supervise: Supervise) -> None:
    words = ("sleep", 613)  # one that writes would end when nobody reads
    run = supervise(*words)
    root = run.root()
    second = supervise(*words)
    assert second.wait() == NOT_THE_STATUS_OF_A_BUG
    assert f"another supervisor holds {run.out.parent}/store: process {run.pid}" in second.said()
    run.process.kill()
    run.wait()
    third = supervise(*words)
    assert third.wait() == NOT_THE_STATUS_OF_A_BUG
    assert f"still runs as process {root}, whose supervisor was killed" in third.said()
    end_session(root)  # it has come to the test
    fourth = supervise(*words)
    fourth.wait_for("starts afresh")


def test_preempt_asks_the_supervisor_of_any_process_of_the_job(supervise: Supervise) -> None:
    run = supervise(PAIR, 5000, 8, 0.02)
    run.wait_for("\n3 ")
    (child,) = Path(f"/proc/{run.root()}/task/{run.root()}/children").read_text().split()
    done = call("preempt", child, "--json")
    assert done.exit_code == 0, done.output
    said = check_document(done.stdout, "preempt")
    assert said["supervisor"] == run.pid
    assert said["checkpoint"] == f"{run.out.parent}/store/jit-000001"
    assert run.wait() == CHECKPOINTED

    slow = supervise("--speed", "1K", PAIR, 5000, 8, 0.02)
    slow.wait_for("goes on")
    done = call("preempt", slow.pid)
    assert done.exit_code == NOT_THE_STATUS_OF_A_BUG
    assert "has ended without a checkpoint: it would take about" in done.output
    assert slow.wait() == 40
    alone = call("preempt", os.getpid())
    assert alone.exit_code == NOT_THE_STATUS_OF_A_BUG
    assert f"process {os.getpid()} runs under no `python -m gpustasis.jit`" in alone.output


@pytest.mark.parametrize(("code", "status"), [("exit 7", 7), ("kill -USR1 $$", 128 + 10)])
def test_a_job_that_fails_by_itself_has_its_own_status_and_ends_nothing(
    supervise: Supervise, tmp_path: Path, code: str, status: int
) -> None:
    run = supervise("sh", "-c", f"echo said; echo wrong >&2; {code}")
    assert run.wait() == status
    assert run.wrote() == ["said"] and "wrong\n" in run.said()
    assert not (tmp_path / "store/gpustasis-jit-ended").exists()


def test_what_left_the_tree_stops_the_dump(supervise: Supervise) -> None:
    run = supervise("sh", "-c", "(sleep 611 & echo $!); echo ready; sleep 612")
    run.wait_for("ready")
    stray = int(run.wrote()[0])
    deadline = time.monotonic() + 60
    while Path(f"/proc/{stray}/comm").read_text() != "sleep\n":  # it is the shell's copy before
        assert time.monotonic() < deadline, "the shell's copy executes no sleep"
        time.sleep(0.02)
    run.tell_to_end()
    assert run.wait() == 128 + signal.SIGTERM
    assert f"process {stray} (sleep) of the job is no longer below its root" in run.said()
    os.kill(stray, signal.SIGKILL)
