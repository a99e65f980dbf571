# SPDX-License-Identifier: Apache-2.0
"""Nodes that are started anew in the middle of an epoch that commits in memory."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

from gpustasis.jobs.local import Local
from gpustasis.jobs.records import Keys
from gpustasis.peers.copies import Copies
from jobs.test_commit_at import (
    copies,  # noqa: F401 - fixture
    held_at,
    job,  # noqa: F401 - fixture
    nodes,  # noqa: F401 - fixture
    of_rank,
)
from support.job_ranks import ANSWER_S
from support.peer_job import WORLD, PeerJob


def test_what_an_aborted_epoch_has_left_goes_when_the_nodes_were_started_anew(
    job: PeerJob,  # noqa: F811
    copies: Copies,  # noqa: F811
    tmp_path: Path,
) -> None:
    job.start_all()
    job.wait(lambda: all(job.steps(rank) for rank in range(WORLD)))
    job.checkpoint("--leave-running")
    job.wait(lambda: job.is_durable(1))
    store, record = Local(tmp_path / "store", ANSWER_S), Keys(job.name).record(2, 1)

    killed = threading.Event()

    def kill() -> None:
        job.wait(lambda: record in store.read(record).entries)
        job.kill_all()
        killed.set()

    with held_at(copies, 0, kill):
        asking = threading.Thread(target=job.job, args=("checkpoint", "--leave-running"))
        asking.start()
        job.wait(killed.is_set)
    assert all(job.images(rank, 2).is_dir() for rank in range(WORLD))
    assert len(of_rank(copies, 1)) == WORLD
    for place in (tmp_path / "run", job.arena):  # both are of one boot
        shutil.rmtree(place)
    job.start_all("--restore-newest")
    asking.join()
    job.run_on()
    job.wait(lambda: not any(job.images(rank, 2).exists() for rank in range(WORLD)))
    job.wait(lambda: len(copies.all()) == WORLD)
    assert [one.name for one in copies.all()] == ["epoch-00000001"] * WORLD
    store.close()
