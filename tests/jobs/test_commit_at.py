# SPDX-License-Identifier: Apache-2.0
"""Jobs whose checkpoints are committed when they are in memory on two nodes: two ranks with a real
CRIU, emulated GPUs, and a neighbour that keeps copies."""

from __future__ import annotations

import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gpustasis._core import ARENA_MARKER
from gpustasis.draining.room import contents_of
from gpustasis.errors import JobError
from gpustasis.files import open_new
from gpustasis.image.verification import OnProgress
from gpustasis.jobs.dumps import content_of
from gpustasis.jobs.local import Local
from gpustasis.jobs.records import Keys
from gpustasis.jobs.server import Server
from gpustasis.peers.config import Address
from gpustasis.peers.copies import Copies, Copy
from support.job_ranks import ANSWER_S, Proxy
from support.json_output import check_document
from support.peer_job import WORLD, PeerJob
from support.peers import HOST, Nodes, make_nodes, serving, write_config

PROGRAMS = Path(__file__).resolve().parent.parent / "programs"


@pytest.fixture
def nodes(tmp_path: Path, arena: Path) -> Nodes:
    arena.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return make_nodes(tmp_path / "certificates", arena.parent / "peers")


@pytest.fixture
def copies(nodes: Nodes) -> Iterator[Copies]:
    """Of the neighbour, which serves."""
    with serving(nodes.keeper) as server:
        yield server.copies


@pytest.fixture
def job(
    nodes: Nodes,
    arena: Path,
    compile_cuda: Callable[..., Path],
    emulator_environ: dict[str, str],
    tmp_path: Path,
    journal: Path,
) -> Iterator[PeerJob]:
    program = compile_cuda(PROGRAMS / "steady_job.c")
    server = Server(tmp_path / "store", journal)
    with open_new(tmp_path / "config.toml") as file:
        file.write(f'arena = "{arena}"\n'.encode())
    environ = emulator_environ | {
        "GPUSTASIS_CONFIG": str(tmp_path / "config.toml"),
        "GPUSTASIS_PEER_CONFIG": str(write_config(tmp_path / "peer.toml", nodes.sender)),
    }
    job = PeerJob(tmp_path, program, arena, environ, ["--store", str(tmp_path / "store")])
    try:
        yield job
    finally:
        job.close()
        server.close()


def of_rank(copies: Copies, rank: int) -> list[Copy]:
    """Copies of one rank's dumps, oldest first."""
    return [one for one in copies.all() if Path(one.store).name == f"rank-{rank}"]


def assert_nothing_is_left(job: PeerJob, copies: Copies | None, epoch: int) -> None:
    """Of an epoch that was aborted; and the job runs on."""
    job.run_on()
    job.wait(lambda: not any(job.images(rank, epoch).exists() for rank in range(WORLD)))
    assert contents_of(job.arena).kept == ()
    if copies is not None:
        names = {job.images(rank, epoch).name for rank in range(WORLD)}
        job.wait(lambda: not names & {one.name for one in copies.all()})


def test_it_is_committed_in_memory_on_two_nodes_and_durable_after_that(
    job: PeerJob, copies: Copies, nodes: Nodes
) -> None:
    job.start_all()
    job.wait(lambda: all(job.steps(rank) for rank in range(WORLD)))
    job.checkpoint("--leave-running")
    records = job.records(1)
    for rank, one in enumerate(records):
        assert one["peer"] == str(nodes.sender.peer)
        (kept,) = of_rank(copies, rank)
        assert (kept.key, kept.checkpoint) == (one["key"], one["id"])
        # The copy is what was committed.
        assert content_of(copies.directory / kept.key) == (one["bytes"], one["digest"])
    job.wait(lambda: job.is_durable(1))
    for rank, one in enumerate(records):  # and so is what was drained
        assert content_of(job.images(rank, 1)) == (one["bytes"], one["digest"])
    job.run_on()
    verified = job.job("verify")
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert "2 of 2 dumps read" in verified.stdout
    # The next one takes its place at the neighbour, and not before it is committed.
    job.checkpoint("--leave-running")
    job.wait(lambda: [one.name for one in copies.all()] == ["epoch-00000002"] * WORLD)
    job.wait(lambda: job.is_durable(2))
    pruned = job.job("prune", "--keep-last", "1")
    assert pruned.returncode == 0, pruned.stderr
    # In memory alone it would count for none that is kept.
    assert [job.images(rank, 1).exists() for rank in range(WORLD)] == [False] * WORLD

    job.checkpoint()  # ends the job, and the keepers when it is drained
    assert job.ends() == [0] * WORLD
    assert job.is_durable(3)
    pruned = job.job("prune", "--keep-last", "1")
    assert pruned.returncode == 0, pruned.stderr
    assert [job.images(rank, 1).exists() for rank in range(WORLD)] == [False] * WORLD
    assert contents_of(job.arena).kept == ()
    job.start_all("--restore", command=False)
    restored = job.job("restore")
    assert restored.returncode == 0, restored.stderr + job.logs()
    job.run_on()


def test_without_the_neighbour_an_epoch_is_aborted_before_anything_is_touched(
    job: PeerJob,
) -> None:
    job.start_all()
    job.wait(lambda: all(job.steps(rank) for rank in range(WORLD)))
    done = job.job("checkpoint", "--world", str(WORLD), "--leave-running")
    assert done.returncode == JobError.exit_code
    assert "no copy can be made at the neighbour: cannot reach the neighbour" in done.stderr
    assert not job.arena.exists()
    job.run_on()
    assert not any(job.images(rank, 1).exists() for rank in range(WORLD))


def test_one_that_is_committed_on_the_disk_is_in_no_arena(job: PeerJob, tmp_path: Path) -> None:
    """Whatever the host's configuration says."""
    with (tmp_path / "config.toml").open("a") as file:
        file.write('tier = "ram"\n')
    for rank in range(WORLD):
        job.start(rank)
    job.wait(lambda: all(job.steps(rank) for rank in range(WORLD)))
    job.checkpoint("--leave-running")
    assert job.is_durable(1)
    assert not any(one["peer"] for one in job.records(1))
    assert not job.arena.exists()
    job.run_on()
    verified = job.job("verify")
    assert verified.returncode == 0, verified.stdout + verified.stderr


@contextmanager
def held_at(copies: Copies, rank: int, happens: Callable[[], object]) -> Iterator[None]:
    """In the block this happens once a copy of that rank's dump is about to come."""
    keep = copies.keep

    def late(
        copy: Copy, take: Callable[[Path], int], on_progress: OnProgress, *, last: bool
    ) -> Copy:
        if Path(copy.store).name == f"rank-{rank}":
            happens()
        return keep(copy, take, on_progress, last=last)

    copies.keep = late  # type: ignore[method-assign]
    try:
        yield
    finally:
        copies.keep = keep  # type: ignore[method-assign]


def test_a_copy_that_breaks_off_aborts_the_epoch_and_nothing_of_it_stays(
    job: PeerJob, nodes: Nodes, tmp_path: Path
) -> None:
    assert nodes.sender.peer is not None
    proxy = Proxy(nodes.sender.peer.port)
    port = int(proxy.url.rpartition(":")[2])
    write_config(tmp_path / "peer.toml", replace(nodes.sender, peer=Address(HOST, port)))
    begun = threading.Event()

    def cut() -> None:
        job.wait(lambda: of_rank(server.copies, 0))  # or its handshake fails, in other words
        proxy.cut()
        begun.set()

    try:
        with serving(nodes.keeper) as server:
            job.start_all()
            job.wait(lambda: all(job.steps(rank) for rank in range(WORLD)))
            with held_at(server.copies, 1, cut):
                found: list[Any] = []
                words = ("checkpoint", "--world", str(WORLD), "--leave-running")
                asking = threading.Thread(target=lambda: found.append(job.job(*words)))
                asking.start()
                assert begun.wait(60), job.logs()
                proxy.mend()
                asking.join()
            assert found[0].returncode == JobError.exit_code
            assert "the connection" in found[0].stderr
            assert_nothing_is_left(job, server.copies, 1)
            job.checkpoint("--leave-running")
            job.wait(lambda: job.is_durable(2))
    finally:
        proxy.close()


def test_a_copy_of_the_last_checkpoint_outlasts_an_epoch_that_is_aborted(
    job: PeerJob, copies: Copies
) -> None:
    job.start_all()
    job.wait(lambda: all(job.steps(rank) for rank in range(WORLD)))
    job.checkpoint("--leave-running")
    job.wait(lambda: job.is_durable(1))

    def refuse() -> None:
        job.wait(lambda: len(of_rank(copies, 0)) == 2)  # the other rank has copied its dump
        raise OSError("no more")

    with held_at(copies, 1, refuse):
        done = job.job("checkpoint", "--leave-running")
    assert done.returncode == JobError.exit_code
    assert_nothing_is_left(job, copies, 2)
    assert [one.name for one in copies.all()] == ["epoch-00000001"] * WORLD


def test_a_rank_whose_node_is_lost_comes_back_from_the_neighbour(
    job: PeerJob, copies: Copies
) -> None:
    job.start_all()
    job.wait(lambda: all(len(job.steps(rank)) > 20 for rank in range(WORLD)))
    job.checkpoint("--leave-running")
    job.run_on()
    job.kill_all()
    record = job.records(1)[0]
    before = max(job.steps(0))
    job.lose_node(0)
    verified = job.job("verify")
    assert verified.returncode == JobError.exit_code

    job.start_all("--restore", command=False)
    restored = job.job("restore")
    assert restored.returncode == 0, restored.stderr + job.logs()
    job.run_on()  # each step compares all memory
    assert 20 <= job.steps(0)[0] <= before  # it has not begun anew
    assert f"is fetched from {record['peer']}" in job.log(0)
    assert content_of(job.images(0, 1)) == (record["bytes"], record["digest"])
    job.wait(lambda: job.is_durable(1))
    verified = job.job("verify")
    assert verified.returncode == 0, verified.stdout


def test_what_is_lost_in_memory_alone_is_kept_beside_what_is_fetched(
    job: PeerJob, copies: Copies
) -> None:
    """As after a start of the host: the disk is there, and memory is not."""
    job.start_all()
    job.wait(lambda: all(job.steps(rank) for rank in range(WORLD)))
    job.checkpoint("--leave-running")
    job.wait(lambda: job.is_durable(1))
    job.kill_all()
    images = job.images(1, 1)
    (images / ARENA_MARKER).write_text(
        "gpustasis-arena 1\ncheckpoint " + "0" * 32 + "\nboot " + "0" * 32 + "\ndirectory /none\n"
    )
    (images / "gpustasis-manifest.img").unlink()
    job.start_all("--restore", command=False)
    restored = job.job("restore")
    assert restored.returncode == 0, restored.stderr + job.logs()
    job.run_on()
    assert (images.with_name(f"{images.name}.lost-1") / "inventory.img").exists()


def kill_between_epochs(job: PeerJob) -> None:
    """Whoever has the clock stands while it is looked at, and begins none."""

    def is_settled() -> bool:
        keeper = job.keepers[0]
        assert keeper is not None
        # Not in the middle of an epoch: it would get on only between one look and the next.
        before = job.log(0).count(": committed")
        job.wait(lambda: job.log(0).count(": committed") > before)
        keeper.send_signal(signal.SIGSTOP)
        shown = check_document(job.job("list", "--json").stdout, "job list")["epochs"][-1]
        if (shown["state"], shown["settled"]) == ("committed", WORLD):
            return True
        keeper.send_signal(signal.SIGCONT)
        return False

    job.wait(is_settled)
    job.kill_all()


def test_dumps_in_between_are_built_on_others_wherever_these_are(
    job: PeerJob, copies: Copies
) -> None:
    job.start_all("--restore-newest", "--interval", "2s", "--max-chain", "8")
    job.wait(lambda: "epoch 4: committed" in job.log(0))
    kill_between_epochs(job)
    shown = [job.records(epoch) for epoch in range(1, 5)]
    for older, newer in pairwise(shown):
        assert [one["parent"] for one in newer] == [one["id"] for one in older]
    listed = check_document(job.job("list", "--json").stdout, "job list")["epochs"]
    newest = max(one["epoch"] for one in listed if one["whole"])
    job.lose_node(0)
    shutil.rmtree(job.arena)
    job.start_all("--restore-newest", "--max-chain", "8")
    job.wait(lambda: f"epoch {newest + 1}: committed" in job.log(0))
    job.run_on()


def test_the_next_keeper_drains_what_one_that_was_killed_has_left(
    job: PeerJob, copies: Copies, tmp_path: Path
) -> None:
    """And has the neighbour remove what that one's last copy takes the place of."""
    job.start_all()
    job.wait(lambda: all(job.steps(rank) for rank in range(WORLD)))
    job.checkpoint("--leave-running")
    job.wait(lambda: job.is_durable(1))
    store, record = Local(tmp_path / "store", ANSWER_S), Keys(job.name).record(2, 1)

    def kill() -> None:
        """The other rank's keeper, whose record is in the store."""
        job.wait(lambda: record in store.read(record).entries)
        job.kill_keeper(1)

    with held_at(copies, 0, kill):
        asking = threading.Thread(target=job.job, args=("checkpoint", "--leave-running"))
        asking.start()
        job.wait(lambda: "epoch 2: committed" in job.log(0))
    assert (job.images(1, 2) / ARENA_MARKER).exists()
    assert len(job.records(2)) == WORLD
    assert [one.name for one in of_rank(copies, 1)] == [job.images(1, n).name for n in (1, 2)]
    job.start(1, "--commit-at", "peer", command=False)
    job.wait(lambda: job.is_durable(2))
    job.wait(lambda: [one.name for one in of_rank(copies, 1)] == [job.images(1, 2).name])
    asking.join()
    store.close()
    job.run_on()


def test_after_a_copy_that_fails_the_next_dump_is_full(job: PeerJob, copies: Copies) -> None:
    """Whatever it is built on may be to blame."""
    job.start_all("--interval", "2s", "--max-chain", "8")
    job.wait(lambda: "epoch 2: committed" in job.log(0))

    def refuse() -> None:
        raise OSError("no more")

    with held_at(copies, 1, refuse):
        job.wait(lambda: ": aborted" in job.log(0))

    def made() -> list[int]:
        """Epochs that were committed after that."""
        after = job.log(0).rpartition(": aborted")[2]
        return [int(one) for one in re.findall(r"epoch ([0-9]+): committed", after)]

    job.wait(made)
    job.kill_all()
    assert [bool(one["parent"]) for one in job.records(made()[0])] == [True, False]


def test_no_rank_waits_for_room_while_the_job_stands(
    job: PeerJob, copies: Copies, tmp_path: Path
) -> None:
    config = tmp_path / "config.toml"
    config.write_text(config.read_text() + 'arena_limit = 4096\nwhen_full = "wait"\n')
    job.start_all()
    job.wait(lambda: all(job.steps(rank) for rank in range(WORLD)))
    begin = time.monotonic()
    done = job.job("checkpoint", "--world", str(WORLD), "--leave-running")
    assert time.monotonic() - begin < 60  # when_full_timeout_s is 300
    assert done.returncode == JobError.exit_code
    assert "arena" in done.stderr
    assert_nothing_is_left(job, copies, 1)


def test_a_rank_without_memory_of_ours_cannot_be_committed_so(job: PeerJob, copies: Copies) -> None:
    job.start_all(cuda=False)
    job.wait(lambda: all(job.steps(rank) for rank in range(WORLD)))
    done = job.job("checkpoint", "--world", str(WORLD), "--leave-running")
    assert done.returncode == JobError.exit_code
    assert "holds no memory that gpustasis has stored" in done.stderr
    assert "give this rank --commit-at durable" in done.stderr
    job.run_on()
    assert not any(job.images(rank, 1).exists() for rank in range(WORLD))
    assert copies.all() == []
