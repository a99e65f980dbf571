# SPDX-License-Identifier: Apache-2.0
"""What goes wrong around a job under `python -m gpustasis.jit`: readers that go away, supervisors
that are killed, checkpoints that are damaged, disks that are full. With CRIU."""

from __future__ import annotations

import os
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpustasis.preemption.network import unlock
from gpustasis.preemption.records import RECORD_NAME
from support.criu_roots import newest_criu
from support.supervised import Supervised, end_session

CHECKPOINTED = 75
NOT_THE_STATUS_OF_A_BUG = 3
Supervise = Callable[..., Supervised]


def names(store: Path) -> list[str]:
    return sorted(path.name for path in store.iterdir() if path.is_dir())


def test_a_reader_of_stderr_that_went_away_costs_no_checkpoint(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    words = [sys.executable, "-m", "gpustasis.jit", "--store", "store", "sleep", "614"]
    with subprocess.Popen(
        words, cwd=tmp_path, env=environ, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as run:
        assert run.stderr is not None
        root = int(run.stderr.readline().split()[2])
        run.stderr.close()
        run.terminate()
        try:
            assert run.wait(120) == CHECKPOINTED
        finally:
            end_session(root)
    assert (tmp_path / "store/jit-000001/gpustasis-jit.json").exists()
    unlock(tmp_path / "store/jit-000001")


def test_a_job_restored_by_a_supervisor_that_was_killed_meanwhile_is_not_run_twice(
    supervise: Supervise, tmp_path: Path
) -> None:
    hold, held_criu = tmp_path / "hold", tmp_path / "held-criu"
    hold.touch()
    command = shlex.join(newest_criu().command(dict(os.environ)))
    held_criu.write_text(
        f'#!/bin/sh\nif [ "$1" = restore ]; then touch {tmp_path}/restoring; '
        f'while [ -e {hold} ]; do sleep 0.05; done; fi\nexec {command} "$@"\n'
    )
    held_criu.chmod(0o755)
    words = ("sleep", 617)
    run = supervise(*words)
    root = run.root()
    run.tell_to_end()
    assert run.wait() == CHECKPOINTED
    killed = supervise("--criu", held_criu, *words)
    while not (tmp_path / "restoring").exists():
        assert killed.process.poll() is None, killed.said()
        time.sleep(0.02)
    killed.process.kill()
    killed.wait()
    try:
        early = supervise(*words)
        assert early.wait() == NOT_THE_STATUS_OF_A_BUG
        assert "jit-000001, whose supervisor was killed, is still at work" in early.said()
        hold.unlink()
        deadline = time.monotonic() + 60
        last = early
        while "still at work" in last.said() and time.monotonic() < deadline:
            last = supervise(*words)
            assert last.wait() == NOT_THE_STATUS_OF_A_BUG
        assert f"still runs as process {root}, restored from" in last.said()
        (tmp_path / "store/gpustasis-jit.lock").unlink()  # nothing says so any more
        late = supervise(*words)
        assert late.wait() == NOT_THE_STATUS_OF_A_BUG
        assert f"process {root} (sleep) has a pid of the job; if that is the job" in late.said()
    finally:
        hold.unlink(missing_ok=True)
        end_session(root)
    again = supervise(*words)
    again.wait_for("goes on, restored from")


def checkpointed(supervise: Supervise, *words: object) -> Supervised:
    run = supervise(*words)
    run.root()
    run.tell_to_end()
    assert run.wait() == CHECKPOINTED, run.said()
    return run


@pytest.mark.parametrize(
    ("name", "said"), [(RECORD_NAME, "is damaged"), ("inventory.img", "whole")]
)
def test_a_broken_checkpoint_of_the_job_counts_as_one(
    supervise: Supervise, tmp_path: Path, name: str, said: str
) -> None:
    words = ("sleep", 618)
    checkpointed(supervise, *words)
    images = tmp_path / "store/jit-000001"
    (images / name).unlink()
    if name == RECORD_NAME:
        (images / name).write_text("{")
    failed = supervise("--never-afresh", *words)
    assert failed.wait() == NOT_THE_STATUS_OF_A_BUG
    assert said in failed.said()
    assert f"none of the job's checkpoints can be restored, {images} among" in failed.said()
    assert images.is_dir()


def test_a_checkpoint_that_was_not_restored_this_time_outlives_the_next_one(
    supervise: Supervise, tmp_path: Path
) -> None:
    words = ("--keep-last", 1, "sleep", 619)
    checkpointed(supervise, *words)
    criu = tmp_path / "refusing-criu"
    command = shlex.join(newest_criu().command(dict(os.environ)))
    criu.write_text(f'#!/bin/sh\n[ $1 != restore ] && exec {command} "$@"\nexit 1\n')
    criu.chmod(0o755)
    afresh = checkpointed(supervise, "--criu", criu, *words)
    assert "jit-000001 cannot be restored: criu " in afresh.said()
    assert names(tmp_path / "store") == ["jit-000001", "jit-000002"]


def test_a_job_that_ended_well_on_a_full_disk_is_not_gone_on_with(
    supervise: Supervise, tmp_path: Path
) -> None:
    words = ("sh", "-c", "while [ ! -e go ]; do sleep 0.05; done")
    checkpointed(supervise, *words)
    run = supervise(*words)
    run.wait_for("goes on")
    resource.prlimit(run.pid, resource.RLIMIT_FSIZE, (0, 0))  # it can write nothing more
    (tmp_path / "go").touch()
    assert run.wait() == 0
    again = supervise(*words)
    assert again.wait() == 0
    assert "starts afresh" in again.said()
    assert names(tmp_path / "store") == ["jit-000001"]
