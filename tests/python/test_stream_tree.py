# SPDX-License-Identifier: Apache-2.0
"""The processes below one, while they come and go."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpustasis.errors import CheckpointError
from gpustasis.streaming.tree import Tree, resident_bytes

LOOKS = 300
LOOP = "while :; do (/bin/true); done & while :; do (/bin/true & /bin/true); done"


@pytest.fixture
def busy() -> Iterator[int]:
    """A process whose children begin and end all the time."""
    with subprocess.Popen(["/bin/sh", "-c", LOOP], start_new_session=True) as job:
        try:
            yield job.pid
        finally:
            os.killpg(job.pid, signal.SIGKILL)


def test_a_child_that_ends_while_it_is_looked_at(busy: int) -> None:
    for _ in range(LOOKS):
        assert resident_bytes(busy) > 0
        tree = Tree(busy)
        assert tree.pids[0] == busy
        tree.close()


def test_a_root_that_has_ended() -> None:
    with subprocess.Popen(["/bin/true"]) as job:
        pass
    for look in (Tree, resident_bytes):
        with pytest.raises(CheckpointError, match=f"there is no process {job.pid}"):
            look(job.pid)


def test_the_end_of_a_process_is_what_is_said_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends in a look that finds something which passes."""
    with subprocess.Popen(["/bin/sleep", "60"]) as job:
        tree = Tree(job.pid)

        def end_meanwhile(_images: Path) -> bool:
            job.kill()
            os.waitid(os.P_PID, job.pid, os.WEXITED | os.WNOWAIT)
            return True

        monkeypatch.setattr("gpustasis.streaming.tree._is_in_use", end_meanwhile)
        assert tree.why_not_running(tmp_path) == f"process {job.pid} has ended"
        tree.close()
