# SPDX-License-Identifier: Apache-2.0
"""What recover says when it cannot go on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpustasis import recovery
from gpustasis._core import MANIFEST_NAME
from gpustasis.driver import Driver
from gpustasis.dumped import Dumped
from gpustasis.errors import CheckpointError, ImageError
from gpustasis.recovery import GUARDIAN_COMM, WORKER_COMM, recover

WORKER, GUARDIAN = 4001, 4002


def refusal(
    images: Path, monkeypatch: pytest.MonkeyPatch, running: dict[str, int], *, recorded: bool
) -> str:
    """Of recover of this process, while these use `images`."""

    def users(directory: Path, *comms: str) -> list[int]:
        assert directory == images
        return sorted(pid for comm, pid in running.items() if comm in comms)

    monkeypatch.setattr(recovery, "find_users", users)
    monkeypatch.setattr(recovery, "find_dropped", lambda pid: object() if recorded else None)
    monkeypatch.setattr(recovery, "WORKER_TIMEOUT_S", 0.01)
    with pytest.raises(CheckpointError) as caught:
        recover(os.getpid(), images, Driver.__new__(Driver))
    return str(caught.value)


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("running", [(GUARDIAN_COMM,), (WORKER_COMM, GUARDIAN_COMM)])
def test_nobody_is_told_to_end_a_guardian(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    running: tuple[str, ...],
    *,
    recorded: bool,
) -> None:
    """Nor the worker while there is one: the process would run on, and read zeros."""
    pids = {WORKER_COMM: WORKER, GUARDIAN_COMM: GUARDIAN}
    said = refusal(tmp_path, monkeypatch, {comm: pids[comm] for comm in running}, recorded=recorded)
    whose = f"process {os.getpid()}" if recorded else "the process that it guards"
    assert said == (
        f"process {GUARDIAN} guards memory that it cannot put back yet; gpustasis-undo.log in "
        f"{tmp_path} says why. Make the images readable again, and it goes on by itself, or end "
        f"{whose} and restore it from a checkpoint. Do not end the guard: the process would run "
        "on with zeros"
    )


def test_a_worker_may_be_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = refusal(tmp_path, monkeypatch, {WORKER_COMM: WORKER}, recorded=True)
    assert said.startswith(f"process {WORKER}, ")
    assert said.endswith("wait for it, or end it and try again")


def test_only_a_manifest_that_is_not_there_says_that_nothing_was_taken(tmp_path: Path) -> None:
    """Else the driver would restore a process from memory that is missing."""
    assert Dumped(tmp_path).find_manifest(os.getpid(), 1) is None
    (tmp_path / MANIFEST_NAME).symlink_to("nowhere")
    with pytest.raises(ImageError):
        Dumped(tmp_path).find_manifest(os.getpid(), 1)
    (tmp_path / "file").touch()
    with pytest.raises(ImageError, match="cannot look at"):
        Dumped(tmp_path / "file").find_manifest(os.getpid(), 1)
