# SPDX-License-Identifier: Apache-2.0
"""Four ranks, with CRIU and emulated GPUs, whose connections are closed at a safe point and made
anew after it (tests/programs/safe_rank.py)."""

from __future__ import annotations

import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gpustasis import job
from gpustasis.emulator import Emulator
from gpustasis.errors import JobError
from jobs.test_ranks import PROGRAMS, network, store  # noqa: F401 - fixtures
from support.json_output import check_document
from support.ring import WORLD, Network, Ring, ring_of

SAFE = ("--safe-points", "--safe-point-limit", "60")


@pytest.fixture
def ring(
    network: Network,  # noqa: F811
    store: list[str],  # noqa: F811
    emulator_environ: dict[str, str],
    tmp_path: Path,
) -> Iterator[Ring]:
    program = Path(shutil.copy(PROGRAMS / "safe_rank.py", tmp_path))
    with ring_of(tmp_path, network, program, emulator_environ, store) as ring:
        ring.interpreter = (sys.executable,)
        ring.name = f"safe-{tmp_path.name}"
        yield ring


def told(ring: Ring, word: str) -> list[list[int]]:
    """The numbers of the connections that each rank has closed ("down") or made anew ("up")."""
    texts = [ring.output(rank) for rank in range(WORLD)]
    return [list(map(int, re.findall(rf"^{word} (\d+)$", text, re.MULTILINE))) for text in texts]


def test_ranks_are_checkpointed_without_their_connections(ring: Ring) -> None:
    ring.start_all(*SAFE)
    ring.wait(lambda: min(ring.steps_now()) > 40)

    left = ring.job("checkpoint", "--world", str(WORLD), "--leave-running", "--json")
    assert left.returncode == 0, left.stderr + ring.logs()
    assert check_document(left.stdout, "job checkpoint")["state"] == "committed"
    ring.wait(lambda: told(ring, "up") == [[2]] * WORLD)
    ring.wait_for_progress()

    made = ring.job("checkpoint")
    assert made.returncode == 0, made.stderr + ring.logs()
    assert ring.ends() == [0] * WORLD
    assert told(ring, "down") == [[1, 2]] * WORLD
    assert told(ring, "up") == [[2]] * WORLD
    shown = check_document(ring.job("show", "--json").stdout, "job show")
    assert [one["network"] for one in shown["ranks"]] == [{"ports": [], "connections": []}] * WORLD

    stopped = [ring.output(rank).count("\n") for rank in range(WORLD)]
    ring.start_restoring()
    back = ring.job("restore")
    assert back.returncode == 0, back.stderr + ring.logs()
    ring.wait(lambda: told(ring, "up") == [[2, 3]] * WORLD)
    ring.wait_for_progress()
    for rank, lines in enumerate(stopped):  # it went on in the step in which it had stopped
        assert re.fullmatch(r"up 3", ring.output(rank).splitlines()[lines])


def test_a_restored_job_is_checkpointed_again(ring: Ring) -> None:
    ring.start_all(*SAFE)
    ring.wait(lambda: min(ring.steps_now()) > 40)
    assert ring.job("checkpoint", "--world", str(WORLD)).returncode == 0, ring.logs()
    assert ring.ends() == [0] * WORLD
    for rank in range(WORLD):  # as on another host
        (ring.directory / f"kept/rank-{rank}/.safe-point").unlink()
    ring.start_all("--restore", *SAFE, command=False)
    back = ring.job("restore")
    assert back.returncode == 0, back.stderr + ring.logs()
    ring.wait_for_progress()
    again = ring.job("checkpoint", "-R")
    assert again.returncode == 0, again.stderr + ring.logs()
    ring.wait(lambda: told(ring, "up") == [[2, 3]] * WORLD)
    ring.wait_for_progress()


def test_all_ranks_go_on_after_a_dump_that_fails(ring: Ring, emulator: Emulator) -> None:
    """Their connections are closed by then: all have made new ones."""
    ring.start_all(*SAFE)
    ring.wait(lambda: min(ring.steps_now()) > 40)
    emulator.add_fault("checkpoint", "error", code=999, count=1)
    made = ring.job("checkpoint", "--world", str(WORLD))
    assert made.returncode == JobError.exit_code, made.stderr
    ring.wait(lambda: told(ring, "up") == [[2]] * WORLD)
    ring.wait_for_progress()
    again = ring.job("checkpoint", "-R")
    assert again.returncode == 0, again.stderr + ring.logs()
    ring.wait_for_progress()


def test_a_rank_that_does_not_come_aborts_the_epoch(ring: Ring) -> None:
    """Nobody's connections were closed: all run on, also the one that did not come."""
    environ = dict(ring.environ)
    ring.environ = environ | {"SAFE_RANK_FORGETS": "2:40"}
    ring.start_all("--safe-points", "--safe-point-limit", "8")
    ring.wait(lambda: min(ring.steps_now()) > 60)
    made = ring.job("checkpoint", "--world", str(WORLD))
    assert made.returncode == JobError.exit_code, made.stderr
    assert re.search(r"rank 2, process \d+: its program has not come to call", made.stderr)
    assert "within 8 s" in made.stderr
    ring.wait_for_progress()
    assert told(ring, "down") == [[]] * WORLD
    assert not any("lock-cuda" in ring.log_whole(rank) for rank in range(WORLD))


def test_a_rank_that_cannot_close_its_connections_aborts_the_epoch(ring: Ring) -> None:
    ring.environ = dict(ring.environ) | {"SAFE_RANK_FAILS": "1"}
    ring.start_all(*SAFE)
    ring.wait(lambda: min(ring.steps_now()) > 40)
    made = ring.job("checkpoint", "--world", str(WORLD))
    assert made.returncode == JobError.exit_code, made.stderr
    assert re.search(r"rank 1, process \d+: what it does `before` a safe point", made.stderr)
    assert not any("lock-cuda" in ring.log_whole(rank) for rank in range(WORLD))
    ring.wait(lambda: ring.status(1) is not None)  # what was raised is the program's to handle


def test_ranks_that_say_no_are_asked_for_nothing(ring: Ring) -> None:
    (ring.directory / "kept/rank-2/epoch-00000001").mkdir(parents=True)
    ring.start_all(*SAFE)
    ring.wait(lambda: min(ring.steps_now()) > 40)
    made = ring.job("checkpoint", "--world", str(WORLD))
    assert made.returncode == JobError.exit_code, made.stderr
    ring.wait_for_progress()
    assert told(ring, "down") == [[]] * WORLD


def crash(ring: Ring, rank: int) -> None:
    """A keeper; there is another one at once."""
    ring.signal(rank, signal.SIGKILL)
    ring.wait(lambda: ring.status(rank) is not None)
    ring.start(rank, *SAFE, command=False)


def test_a_keeper_that_crashes_when_its_program_has_stopped(ring: Ring) -> None:
    """Not all programs have: none has closed its connections."""
    ring.environ = dict(ring.environ) | {"SAFE_RANK_FORGETS": "3:40"}
    ring.start_all(*SAFE)
    ring.wait(lambda: min(ring.steps_now()) > 60)

    def has_stopped() -> bool:
        data = (ring.directory / "kept/rank-2/.safe-point").read_bytes()
        words = memoryview(data).cast("Q")
        return bool(words[job.ASKED] and words[job.WAITS] == words[job.ASKED])

    with ThreadPoolExecutor() as pool:
        asked = pool.submit(ring.job, "checkpoint", "--world", str(WORLD), "-R")
        ring.wait(has_stopped)
        crash(ring, 2)
        done = asked.result()
    assert done.returncode == JobError.exit_code, done.stderr
    assert "the rank's keeper has crashed" in done.stderr
    ring.wait_for_progress()
    assert told(ring, "down") == [[]] * WORLD


def test_a_keeper_that_crashes_when_all_programs_have_stopped(ring: Ring) -> None:
    """All close their connections, and none makes new ones before the last has."""
    held = ring.directory / "held"
    held.touch()
    ring.environ = dict(ring.environ) | {"SAFE_RANK_HELD": f"3:{held}"}
    ring.start_all(*SAFE)
    ring.wait(lambda: min(ring.steps_now()) > 40)
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(ring.job, "checkpoint", "--world", str(WORLD), "-R")
        ring.wait(lambda: told(ring, "down") == [*[[1]] * 3, []])
        crash(ring, 2)
        ring.wait(lambda: all("acting release" in ring.log(rank) for rank in range(WORLD)))
        time.sleep(0.5)
        assert told(ring, "up") == [[]] * WORLD
        held.unlink()
        done = asked.result()
    assert done.returncode == JobError.exit_code, done.stderr
    ring.wait(lambda: told(ring, "up") == [[2]] * WORLD)
    ring.wait_for_progress()
    again = ring.job("checkpoint", "-R")
    assert again.returncode == 0, again.stderr + ring.logs()
    ring.wait_for_progress()


def test_a_job_that_hangs_is_kept_as_evidence_where_it_stands(ring: Ring) -> None:
    """Its programs come to no safe point, and none is asked to."""
    stuck = ring.directory / "stuck"
    ring.environ = dict(ring.environ) | {"SAFE_RANK_HANGS": f"1:{stuck}"}
    ring.start_all(*SAFE, "--restarts", "1", "--hang-after", "3", "--evidence")
    ring.wait(lambda: min(ring.steps_now()) > 40)
    made = ring.job("checkpoint", "--world", str(WORLD), "--leave-running")
    assert made.returncode == 0, made.stderr + ring.logs()
    ring.wait_for_progress()
    stuck.touch()

    def kinds() -> list[tuple[str, str]]:
        listed = check_document(ring.job("list", "--json").stdout, "job list")["epochs"]
        return [(one["kind"], one["state"]) for one in listed]

    # By its log: a command takes seconds on a busy machine, and what is restored meanwhile hangs
    # again, for good.
    ring.wait(lambda: re.search("epoch 2: (?:committed|aborted)", ring.log_whole(0)) is not None)
    stuck.unlink()
    assert kinds()[1] == ("evidence", "committed"), ring.logs()
    ring.wait(lambda: len(kinds()) > 2 and kinds()[2] == ("restore", "committed"))
    ring.wait_for_progress()


def test_what_nccl_has_in_a_rank_is_a_no_unless_it_is_allowed(ring: Ring) -> None:
    """A file named as NCCL's library is stands for it: there is no NCCL here. Where another rank is
    on the host, P2P breaks a checkpoint, but not at a safe point."""
    library = ring.directory / "libnccl.so.2"
    library.write_bytes(bytes(4096))
    environ = dict(ring.environ) | {"SAFE_RANK_MAPS": str(library)}
    ring.environ = environ | {"NCCL_RAS_ENABLE": "0", "NCCL_NVLS_ENABLE": "1"}
    ring.start_all()
    ring.wait(lambda: min(ring.steps_now()) > 40)
    made = ring.job("checkpoint", "--world", str(WORLD))
    assert made.returncode == JobError.exit_code, made.stderr
    assert re.search(
        r"rank \d: process \d+: NCCL_NVLS_ENABLE is '1': .*; start it with NCCL_NVLS_ENABLE=0, or "
        "allow it with --risk nccl-nvls",
        made.stderr,
    )
    assert not any("lock-cuda" in ring.log_whole(rank) for rank in range(WORLD))
    ring.wait_for_progress()
    ring.end()

    ring.start_all("--risk", "nccl-nvls")
    ring.wait_for_progress()
    made = ring.job("checkpoint")
    assert made.returncode == JobError.exit_code, made.stderr
    assert "or allow it with --risk nccl-p2p" in made.stderr
    ring.wait_for_progress()
    ring.end()

    ring.start_all("--risk", "nccl-nvls", *SAFE)
    ring.wait_for_progress()
    made = ring.job("checkpoint")
    assert made.returncode == 0, made.stderr + ring.logs()
    assert ring.ends() == [0] * WORLD
    for rank in range(WORLD):
        warned = [line for line in ring.log(rank).splitlines() if line.startswith("WARNING")]
        assert any("NCCL_NVLS_ENABLE is '1'" in line for line in warned)
        assert any("NCCL_P2P_DISABLE is not set" in line for line in warned)
