# SPDX-License-Identifier: Apache-2.0
"""The agent's checkpoints of which CRIU has all, as of trees without CUDA with tier = "ram": they
have no manifest, and are checkpoints all the same."""

from __future__ import annotations

import errno
import os
import signal
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import gpustasis
from gpustasis._core import MANIFEST_NAME
from gpustasis.agent import criu_alone
from gpustasis.agent.aftermath import settle
from gpustasis.agent.config import Config, Target
from gpustasis.agent.operations import Figures, Operation, State
from gpustasis.agent.subjects import Subject, held
from gpustasis.agent.work import Work, require_whole
from gpustasis.criu.images import INVENTORY_NAME, STATISTICS_NAME
from gpustasis.criu.run import Run
from gpustasis.draining.drain import drain
from gpustasis.errors import AgentError
from gpustasis.image.store import is_trash
from gpustasis.task import read_task
from support.agent import Agent
from support.chains import make_link, memory_of
from support.inventory import write_inventory
from support.job import Job
from support.local_checkpoints import make_local

RESTORES = """
import os, sys, time
open("/proc/self/comm", "w").write("criu")
images = os.open(sys.argv[1], os.O_RDONLY)
print("ready", flush=True)
time.sleep(100)
"""
FIRST = 1_800_000_000
# Magic words, and one record: stats_entry.dump, with a freezing_time of 5.
FIGURES = struct.pack("<III", 0x55105940, 0x57093306, 4) + b"\x0a\x02\x08\x05"


def name(number: int) -> str:
    """As the agent names its checkpoints, by time."""
    return f"20260101T00000{number}.0-0123456789abcdef"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Of a target of the agent's."""
    found = tmp_path / "store/targets/train"
    found.mkdir(parents=True)
    return found


def of_criu(place: Path) -> Path:
    """What a dump leaves that has put nothing into images of ours."""
    place.mkdir(mode=0o700)
    (place / "pages-1.img").write_bytes(b"memory")
    write_inventory(place)
    (place / STATISTICS_NAME).write_bytes(FIGURES)
    return place


def ours(place: Path, number: int) -> Path:
    make_link(place, {7: memory_of(["A", "b"])}, taken=FIRST + number)
    return place


def tidy(
    directory: Path, keep_last: int = 2, *not_over: Path, made: Path | None = None
) -> list[str]:
    """As after a success, of the newest; the last digits of the names that are left."""
    target = Target(name="train", pidfile=Path("/x"), keep_last=keep_last)
    newest = made or max(directory.iterdir())
    operation = Operation(subject=Subject(pid=1), uid=0, target="train", place=str(newest))
    at_work = (newest, *not_over)
    Work(operation, Config(), target, not_over=lambda: at_work)._tidy(directory)
    assert not any(is_trash(place.name) for place in directory.iterdir())
    return sorted(place.name[14] for place in directory.iterdir())


def test_the_last_ones_stay(directory: Path) -> None:
    for number in range(4):
        of_criu(directory / name(number))
    assert tidy(directory) == ["2", "3"]
    assert tidy(directory) == ["2", "3"]


def test_they_count_with_those_of_ours(directory: Path) -> None:
    for number, make in enumerate((ours, None, ours, None, ours)):
        place = directory / name(number)
        of_criu(place) if make is None else make(place, number)
    assert tidy(directory, 4) == ["1", "2", "3", "4"]
    assert tidy(directory, 3) == ["2", "3", "4"]
    assert tidy(directory, 2) == ["3", "4"]
    of_criu(directory / name(5))
    of_criu(directory / name(6))
    # Prune keeps one in any case.
    assert tidy(directory, 1) == ["4", "6"]


def test_what_is_in_memory_only_does_not_count(directory: Path, arena: Path) -> None:
    """The next boot may take it."""
    for number in range(2):
        of_criu(directory / name(number))
    make_local(directory / name(2), arena)
    assert tidy(directory) == ["0", "1", "2"]
    drain(directory / name(2))
    assert tidy(directory) == ["1", "2"]


def test_what_is_drained_meanwhile_costs_no_other(
    directory: Path, arena: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours(directory / name(0), 0)
    make_local(directory / name(1), arena)
    really = gpustasis.prune

    def late(place: Path, *, keep_last: int) -> object:
        drain(directory / name(1))
        return really(place, keep_last=keep_last)

    monkeypatch.setattr(gpustasis, "prune", late)
    assert tidy(directory) == ["0", "1"]


@pytest.mark.parametrize("made", [of_criu, lambda place: ours(place, 0)])
def test_the_one_that_was_just_made_stays_whatever_the_clock_says(
    directory: Path, made: Callable[[Path], object]
) -> None:
    """It was set back since those before it."""
    for number in (2, 3):
        ours(directory / name(number), number)
    for left in ("123", "023"):  # the others are still the last ones, by their time
        place = directory / name(int(left[0]))
        made(place)
        assert tidy(directory, made=place) == [*left]


def no_inventory(place: Path) -> None:
    (place / INVENTORY_NAME).unlink()


def empty_inventory(place: Path) -> None:
    (place / INVENTORY_NAME).write_bytes(b"")


def zeros(place: Path) -> None:
    (place / INVENTORY_NAME).write_bytes(bytes(64))


def names_us(place: Path) -> None:
    write_inventory(place, "gpustasis", f"checkpoint-{'e' * 32}", "names-images")


@pytest.mark.parametrize("leave", [no_inventory, empty_inventory, zeros, names_us])
def test_what_was_broken_off_goes(directory: Path, leave: Callable[[Path], None]) -> None:
    leave(of_criu(directory / name(0)))
    of_criu(directory / name(1))
    assert tidy(directory) == ["1"]


def test_what_cannot_be_read_now_stays(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = of_criu(directory / name(0))
    of_criu(directory / name(1))
    of_criu(directory / name(2))
    with monkeypatch.context() as patch:
        patch.setattr("gpustasis.criu.images.open_regular", refusing(place / INVENTORY_NAME))
        assert tidy(directory) == ["0", "1", "2"]
    assert tidy(directory) == ["1", "2"]


def refusing(refused: Path) -> Callable[..., object]:
    def opened(path: Path, *more: int) -> object:
        if path == refused:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return open(path, "rb")

    return opened


def test_what_cannot_be_read_for_good_keeps_no_other(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts for none. What is ours goes, what is CRIU's alone, and what was broken off."""
    place = of_criu(directory / name(3))
    of_criu(directory / name(0))
    ours(directory / name(1), 1)
    no_inventory(of_criu(directory / name(2)))
    of_criu(directory / name(4))
    ours(directory / name(5), 5)
    monkeypatch.setattr("gpustasis.criu.images.open_regular", refusing(place / INVENTORY_NAME))
    assert tidy(directory) == ["3", "4", "5"]


def test_one_that_cannot_be_put_aside_keeps_no_other(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (0, 1, 3):
        of_criu(directory / name(number))
    ours(directory / name(2), 2)
    ours(directory / name(4), 4)
    put_aside = criu_alone.put_aside

    def sometimes(place: Path) -> None:
        if place.name == name(0):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        put_aside(place)

    monkeypatch.setattr(criu_alone, "put_aside", sometimes)
    assert tidy(directory) == ["0", "3", "4"]


@pytest.mark.parametrize("figures", [None, b"", bytes(len(FIGURES)), FIGURES[:-1]])
def test_one_that_may_have_been_broken_off_behind_its_inventory_counts_for_none(
    directory: Path, figures: bytes | None
) -> None:
    """criu and its agent were killed together, or power was lost: nothing says more."""
    for number in range(3):
        of_criu(directory / name(number))
    statistics = directory / name(1) / STATISTICS_NAME
    if figures is None:
        statistics.unlink()
    else:
        statistics.write_bytes(figures)
    assert tidy(directory) == ["0", "1", "2"]
    of_criu(directory / name(3))
    assert tidy(directory) == ["2", "3"]


def test_what_is_at_work_or_in_use_stays(directory: Path, launch: Callable[..., Job]) -> None:
    for number in range(3):
        of_criu(directory / name(number))
    assert tidy(directory, 1, directory / name(0)) == ["0", "2"]
    of_criu(directory / name(1))
    job = launch([sys.executable, "-c", RESTORES, str(directory / name(0))])
    job.wait_for("ready")
    assert tidy(directory, 1) == ["0", "2"]
    job.signal(signal.SIGKILL)
    job.wait()
    assert tidy(directory, 1) == ["2"]


def dumped(directory: Path, monkeypatch: pytest.MonkeyPatch, *, verify: bool) -> Figures:
    """What the agent says of such a dump of this process, which is done into the first place."""
    pid, images = os.getpid(), directory / name(0)

    def dump(_: int, place: Path, **__: object) -> gpustasis.Checkpoint:
        place.rmdir()
        of_criu(place)
        run = Run(pid=pid, criu_version="4.3", log=place, seconds=1.0, statistics=None)
        return gpustasis.Checkpoint(place, dump=run)

    monkeypatch.setattr(gpustasis, "checkpoint", dump)
    monkeypatch.setattr("gpustasis.agent.work.require_not_ours", lambda _: None)
    target = Target(name="train", pidfile=Path("/x"), verify=verify)
    operation = Operation(subject=Subject(pid=pid), uid=0, place=str(images))
    with held(pid) as process:
        return Work(operation, Config(tier="ram"), target, process).run()


def test_there_is_nothing_to_be_verified(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[str] = set()
    fsync = os.fsync

    def sync(fd: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", sync)
    found = dumped(directory, monkeypatch, verify=True)
    assert (found.tier, found.verified) == ("durable", False)
    images = directory / name(0)
    assert {str(one) for one in (*images.iterdir(), images, directory)} <= synced
    assert not require_whole(images, keep=False)


def fail(_: Path) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_one_that_cannot_be_synced_is_none(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(criu_alone, "make_durable", fail)
    words = f"^the checkpoint in {directory / name(0)} cannot be synced: .*error; it was removed"
    with pytest.raises(AgentError, match=words):
        dumped(directory, monkeypatch, verify=False)
    assert list(directory.iterdir()) == []


def settled(place: Path) -> Operation:
    """What an agent says that finds it begun."""
    subject = Subject(pid=os.getpid(), start_time=read_task(os.getpid()).start_time)
    operation = Operation(
        subject=subject, uid=0, target="train", state=State.RUNNING, place=str(place), began=1.0
    )
    target = Target(name="train", pidfile=Path("/x"), verify=True)
    settle(operation, Config(targets=(target,)), lambda: False)
    return operation


def test_one_whose_agent_was_killed_is_done(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, synced = of_criu(directory / name(0)), list[Path]()
    monkeypatch.setattr(criu_alone, "make_durable", synced.append)
    found = settled(place)
    assert found.state is State.DONE and "the checkpoint is whole" in found.note
    assert synced == [place]


def test_one_that_cannot_be_synced_by_the_next_agent_counts_for_none(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it later, when a sync says nothing of what was lost."""
    for number in range(3):
        of_criu(directory / name(number))
    with monkeypatch.context() as patch:
        patch.setattr(criu_alone, "make_durable", fail)
        found = settled(directory / name(1))
    assert found.state is State.INTERRUPTED and "cannot be told" in found.note
    assert settled(directory / name(1)).state is State.INTERRUPTED
    assert tidy(directory) == ["0", "1", "2"]


@pytest.mark.parametrize("missing", [INVENTORY_NAME, STATISTICS_NAME])
def test_one_whose_criu_was_killed_too_is_none(directory: Path, missing: str) -> None:
    place = of_criu(directory / name(0))
    (place / missing).unlink()
    found = settled(place)
    assert found.state is State.INTERRUPTED and "there is no whole checkpoint" in found.note


def test_a_tree_without_cuda_is_checkpointed_again_and_again(
    agents: Callable[..., Agent], launch: Callable[..., Job], tmp_path: Path, arena: Path
) -> None:
    job = launch(["/bin/sh", "-c", "echo ready; while :; do sleep 0.1; done"])
    job.wait_for("ready")
    pidfile = tmp_path / "train.pid"
    pidfile.write_text(str(job.pid))
    target = f'[[target]]\nname = "train"\npidfile = "{pidfile}"\nverify = true\nkeep_last = 2\n'
    words = f'tier = "ram"\ncpu_memory = "criu"\n{target}'
    agent = agents(words, config={"arena": str(arena)})
    places = []
    for _ in range(3):
        with agent.client() as client:
            found = client.checkpoint(target="train")
        assert found["state"] == "done", found
        assert (found["figures"]["tier"], found["figures"]["verified"]) == ("durable", False)
        places.append(Path(found["place"]))
    assert not (places[-1] / MANIFEST_NAME).exists()
    assert sorted(places[0].parent.iterdir()) == places[1:]
