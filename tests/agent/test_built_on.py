# SPDX-License-Identifier: Apache-2.0
"""What the agent builds a checkpoint on while the last one is in memory."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gpustasis._core import ARENA_MARKER
from gpustasis.agent.config import Config, Target
from gpustasis.agent.operations import Operation
from gpustasis.agent.subjects import Subject
from gpustasis.agent.work import Work
from gpustasis.draining.drain import can_be_drained, drain
from gpustasis.draining.recycle import UNSYNCED
from support import local_checkpoints
from support.arena_by_hand import Local, make_local


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Of a target of the agent's."""
    found = tmp_path / "store/targets/train"
    found.mkdir(parents=True)
    return found


def unsynced(local: Local) -> None:
    (local.stored / UNSYNCED).touch()


def given_up(local: Local) -> None:
    (local.images / ARENA_MARKER).unlink()


def gone(local: Local) -> None:
    shutil.rmtree(local.images)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("act", [unsynced, given_up, gone])
def test_nothing_is_built_on_what_can_never_be_drained(
    arena: Path, directory: Path, act: Callable[[Local], None], depth: int
) -> None:
    """It would stay in memory as well, and so would all that follows."""
    arena.mkdir(mode=0o700, parents=True)
    chain: list[Local] = []
    for number in range(3):
        below = chain[-1] if chain else None
        chain.append(make_local(arena, directory / f"{number}", number + 1, parent=below))
    target = Target(name="train", pidfile=Path("/x"))
    last = Operation(subject=Subject(pid=1), uid=0, target="train", place=str(directory / "2"))
    config = Config(store=directory.parent.parent, tier="ram")
    work = Work(last, config, target, last=last)
    assert work._parent() == chain[2].images
    act(chain[2 - depth])
    assert work._parent() is None


def test_a_checkpoint_on_the_disk_is_built_on_what_is_there(arena: Path, directory: Path) -> None:
    """As the last one of a job that is to end: a dump to the disk on one in memory is refused."""
    images = directory / "0"
    local_checkpoints.make_local(images, arena)
    target = Target(name="train", pidfile=Path("/x"))
    last = Operation(subject=Subject(pid=1), uid=0, target="train", place=str(images))
    ending = Operation(subject=Subject(pid=1), uid=0, target="train", stop=True)
    work = Work(ending, Config(store=directory.parent.parent, tier="ram"), target, last=last)
    assert work._parent() is None
    drain(images)
    assert work._parent() == images


def test_one_may_be_built_on_what_is_drained_by_now(arena: Path, directory: Path) -> None:
    arena.mkdir(mode=0o700, parents=True)
    parent = make_local(arena, directory / "0", 1)
    child = make_local(arena, directory / "1", 2, parent=parent)
    parent.drain()
    assert can_be_drained(child.images)
    child.drain()
    assert can_be_drained(child.images)
