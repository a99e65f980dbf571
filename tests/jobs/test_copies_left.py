# SPDX-License-Identifier: Apache-2.0
"""What the next keeper of a rank has the neighbour told of copies, and what it removes, where the
one before was killed, or the node was started anew: with real stores, and without criu."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from gpustasis._core import ARENA_MARKER
from gpustasis.errors import JobError, StoreError
from gpustasis.jobs import checkpointing, neighbour
from gpustasis.jobs.checkpointing import Checkpointing
from gpustasis.jobs.dumps import DumpRecord
from gpustasis.jobs.local import Local
from gpustasis.jobs.messages import Phase
from gpustasis.jobs.neighbour import CommitAt
from gpustasis.jobs.network import Network
from gpustasis.jobs.owed import OWED, Errand, Owed, What
from gpustasis.jobs.rank import Context
from gpustasis.jobs.records import Plan
from gpustasis.jobs.store import Put, Snapshot, Store
from gpustasis.jobs.work import Order
from gpustasis.peers.config import Config
from jobs.test_undoing import KEYS, context, decided, server, task  # noqa: F401 - fixtures
from support.job_ranks import wait_for
from support.local_checkpoints import make_local

NOWHERE = "127.0.0.1:1"
OTHER = f"{'a' * 32}-{'b' * 16}"


@pytest.fixture(autouse=True)
def seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """The neighbour is not reached, and not tried again while a test looks."""
    monkeypatch.setattr("gpustasis.jobs.aftercare._AGAIN_S", 100.0)


def epoch_of(context: Context, phase: Phase) -> int:  # noqa: F811
    return decided(context, Plan(world=1, leave_running=False), phase)


def sent(context: Context, number: int, arena: Path) -> str:  # noqa: F811
    """A dump in memory of that epoch, whose copy an earlier keeper has sent; the copy's name."""
    stored = make_local(context.place.images(number), arena)
    key = f"{stored.name}-{16 * '0'}"
    context.aftercare.sent(context.place.images(number), NOWHERE, key)
    return key


def part_of(context: Context, number: int) -> Checkpointing:  # noqa: F811
    """Of a keeper that has not looked: another one has joined."""
    return Checkpointing(context, Order(number, leave_running=False, restores=0, joined=True))


def owed(context: Context) -> Errand | None:  # noqa: F811
    return Owed(context.place).first()


@pytest.mark.parametrize("is_evidence", [False, True])
def test_older_copies_go_once_the_store_says_that_it_is_no_evidence(
    is_evidence: bool,
    context: Context,  # noqa: F811
    arena: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checkpointing, "_ASK_AGAIN_S", 0.01)
    number = epoch_of(context, Phase.COMMITTED)
    if is_evidence:
        context.store.write([], [Put(KEYS.evidence(number), "1")])
    key = sent(context, number, arena)
    context.note(epoch=number, images=str(context.place.images(number)))
    asked, is_back, read = threading.Event(), threading.Event(), context.store.read

    def away(*keys: str) -> Snapshot:
        if not is_back.is_set():
            asked.set()
            raise StoreError("the store is away")
        return read(*keys)

    monkeypatch.setattr(context.store, "read", away)
    finishing = threading.Thread(
        target=lambda: part_of(context, number).finish(leave_running=False), daemon=True
    )
    finishing.start()
    wait_for(asked.is_set, "who asks the store")
    time.sleep(0.1)
    assert finishing.is_alive()  # nothing is settled without it
    assert owed(context) is None
    is_back.set()
    finishing.join(30)
    assert not finishing.is_alive()
    assert owed(context) == (None if is_evidence else (What.DROP_OLDER, NOWHERE, key))
    context.aftercare.close()


def test_older_copies_go_where_other_tasks_run_since_the_node_was_started_anew(
    context: Context,  # noqa: F811
    task: subprocess.Popen[bytes],  # noqa: F811
    arena: Path,
) -> None:
    number = epoch_of(context, Phase.COMMITTED)
    key = sent(context, number, arena)
    context.note(pid=task.pid)
    with pytest.raises(JobError, match="it is left as it is"):
        part_of(context, number).finish(leave_running=False)
    assert owed(context) == (What.DROP_OLDER, NOWHERE, key)
    assert task.poll() is None
    context.aftercare.close()


def lose_memory(images: Path) -> None:
    """As with a start of the node."""
    marker = images / ARENA_MARKER
    lines = dict(line.split(" ", 1) for line in marker.read_text().splitlines())
    shutil.rmtree(lines["directory"])
    anew = marker.read_text().replace(lines["boot"], "00000000-0000-0000-0000-000000000000")
    marker.write_text(anew)


@pytest.mark.parametrize("left", ["all", "names alone"])
def test_the_dump_of_an_aborted_epoch_goes_after_the_node_was_started_anew(
    left: str,
    context: Context,  # noqa: F811
    arena: Path,
) -> None:
    number = epoch_of(context, Phase.ABORTED)
    key = sent(context, number, arena)
    images = context.place.images(number)
    lose_memory(images)
    if left == "names alone":  # with its power
        for path in images.iterdir():
            path.write_bytes(b"")
    part_of(context, number).release()
    assert not images.exists()
    assert owed(context) == (What.FORGET, NOWHERE, key)
    context.aftercare.close()


@pytest.mark.parametrize("host", [socket.gethostname(), "another"])
def test_what_the_store_has_of_the_dump_says_whose_it_is(
    host: str,
    context: Context,  # noqa: F811
    arena: Path,
) -> None:
    number = epoch_of(context, Phase.ABORTED)
    images = context.place.images(number)
    key = sent(context, number, arena)
    record = DumpRecord(
        id=neighbour.id_in(key),
        parent="",
        directory=str(images),
        host=host,
        bytes=1,
        digest="0" * 64,
        pid=1,
        dump_ms=1,
        addresses=(),
        network=Network(),
    )
    context.store.write([], [Put(KEYS.record(number, 0), record.to_text())])
    (context.place.directory / OWED).unlink()
    context.aftercare = Context(context.place, 1, context.store, KEYS, context.options).aftercare
    lose_memory(images)
    part_of(context, number).release()
    assert images.exists() == (host == "another")
    assert owed(context) is None


def test_a_copy_goes_while_the_store_is_away_and_the_dump_stays(
    context: Context,  # noqa: F811
    arena: Path,
    tmp_path: Path,
) -> None:
    number = epoch_of(context, Phase.ABORTED)
    key = sent(context, number, arena)
    context.store = Local(tmp_path / "nowhere")
    part_of(context, number).release()
    assert context.place.images(number).is_dir()
    assert owed(context) == (What.FORGET, NOWHERE, key)
    context.aftercare.close()


def test_a_dump_that_may_be_another_epochs_stays(
    context: Context,  # noqa: F811
    task: subprocess.Popen[bytes],  # noqa: F811
    arena: Path,
) -> None:
    number = epoch_of(context, Phase.ABORTED)
    images = context.place.images(number)
    make_local(images, arena)
    part_of(context, number).release()
    assert images.is_dir()  # nothing was sent
    assert owed(context) is None
    context.aftercare.sent(images, NOWHERE, OTHER)
    part_of(context, number).release()
    assert images.is_dir()  # that was another one
    assert owed(context) == (What.FORGET, NOWHERE, OTHER)
    shutil.rmtree(images)
    sent(context, number, arena / "another")
    context.note(pid=task.pid)
    part_of(context, number).release()
    assert images.is_dir()  # tasks of this boot: its keeper has begun nothing
    context.aftercare.close()


def test_a_dump_whose_epoch_is_not_known_to_be_aborted_stays(
    context: Context,  # noqa: F811
    arena: Path,
) -> None:
    number = epoch_of(context, Phase.COMMITTED)
    sent(context, number, arena)
    part_of(context, number).release()
    assert context.place.images(number).is_dir()
    assert owed(context) is None
    context.aftercare.close()


def test_a_dump_that_a_process_lacks_memory_of_stays(
    context: Context,  # noqa: F811
    arena: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The state may be gone without a start of the node."""
    number = epoch_of(context, Phase.ABORTED)
    key = sent(context, number, arena)
    monkeypatch.setattr("gpustasis.jobs.aborted.why_needed", lambda _: "it holds memory")
    part_of(context, number).release()
    assert context.place.images(number).is_dir()
    assert "stays: it holds memory" in caplog.text
    assert owed(context) == (What.FORGET, NOWHERE, key)
    context.aftercare.close()


@pytest.mark.parametrize("is_evidence", [False, True])
def test_evidence_goes_to_the_disk(
    is_evidence: bool,
    context: Context,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its copy would stay at the neighbour: no later one takes its place."""
    asked: list[CommitAt] = []

    class EnoughError(Exception):
        pass

    def require(_: str, commit_at: CommitAt, *__: object) -> Config | None:
        asked.append(commit_at)
        raise EnoughError

    monkeypatch.setattr("gpustasis.jobs.neighbour.require", require)
    context.options = replace(context.options, commit_at=CommitAt.PEER)
    store: Store = context.store
    if is_evidence:
        store.write([], [Put(KEYS.evidence(1), "1")])
    context.note(pid=os.getpid())
    monkeypatch.setattr(checkpointing, "require_dumpable", lambda *_: None)
    with pytest.raises(EnoughError):
        Checkpointing(context, Order(1, leave_running=False, restores=0)).look()
    assert asked == [CommitAt.DURABLE if is_evidence else CommitAt.PEER]
