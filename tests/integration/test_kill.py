# SPDX-License-Identifier: Apache-2.0
"""criu is killed in the middle; the long form is the campaign kill-points of make soak."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from campaigns import kill_points, kill_restore
from campaigns.kill_points import require_kills
from campaigns.rig import Rig, lasting_workers, log_path
from campaigns.steady_job import SteadyJob, is_alive, process_state
from campaigns.tampering import sealed_for
from gpustasis.criu.plugin import Setting
from support.certificates import Pair
from support.cpu_memory import OURS

SEED = 20
TRIES = 6


# The bound is that no job is lost at all; `make soak` holds it, and counts. CRIU loses about one in
# a hundred by itself, which is too often for a test: here a loss counts that is not CRIU's own.
@pytest.mark.one_criu
def test_the_plugin_loses_no_job_when_criu_is_killed_during_a_dump(rig: Rig) -> None:
    require_kills(kill_points.run(rig, Random(SEED), 15, whole_bound=False))


def test_the_plugin_loses_no_job_when_criu_is_killed_while_it_stores_cpu_memory(
    newest_rig: Rig,
) -> None:
    shape = kill_points.SMALL_CPU
    tally = kill_points.run(
        newest_rig, Random(SEED), 15, whole_bound=False, each=1, shape=shape, settings=OURS
    )
    require_kills(tally)
    assert tally.counts["in store"], tally.counts


@pytest.mark.parametrize("sealed", [False, True])
def test_no_job_is_lost_when_criu_is_killed_while_it_packs_or_seals(
    newest_rig: Rig, me: Pair, sealed: bool
) -> None:
    settings: dict[str, Setting] = sealed_for(me) if sealed else OURS | {"layout": "packed"}
    shape = kill_points.SMALL_ALL
    tally = kill_points.run(
        newest_rig, Random(SEED), 11, whole_bound=False, shape=shape, settings=settings
    )
    require_kills(tally)


def test_recover_brings_back_what_is_sealed_when_the_worker_is_killed_too(
    newest_rig: Rig, me: Pair
) -> None:
    tally = kill_points.run(
        newest_rig,
        Random(SEED),
        8,
        with_worker=True,
        whole_bound=False,
        shape=kill_points.SMALL_ALL,
        settings=sealed_for(me),
    )
    require_kills(tally)


def test_recover_brings_back_what_is_left_when_the_worker_is_killed_too(newest_rig: Rig) -> None:
    tally = kill_points.run(newest_rig, Random(SEED), 15, with_worker=True, whole_bound=False)
    require_kills(tally)


def test_the_job_dies_during_its_dump(rig: Rig) -> None:
    """The dump fails; nothing of it stays, no zombie either."""
    random = Random(SEED)
    for _ in range(4):
        mark = random.choice(["cuda_plugin: backend", "Seized task", "' hook 11 "])
        which = random.sample((0, 1), random.randint(1, 2))
        assert any(dies_during_its_dump(rig, mark, which) for _ in range(TRIES)), "seen too late"


def dies_during_its_dump(rig: Rig, mark: str, which: Sequence[int]) -> bool:
    """False: criu was done with the tasks before it could be stopped."""
    with rig.job(mib=8, children=1) as job:
        images = rig.images()
        criu = rig.start(rig.dump_words(job, images))
        log = log_path(images, "dump")
        while criu.poll() is None and not (log.exists() and mark in log.read_text()):
            time.sleep(0.001)
        if not is_stopped_in_time(criu, images, job):  # or it is done before they are killed
            criu.send_signal(signal.SIGCONT)
            assert criu.wait(30) == 0, log.read_text()[-2000:]
            rig.settle(images)
            return False
        for number in which:
            os.kill(job.pids[number], signal.SIGKILL)
        await_end(job.pids if 0 in which else job.pids[1:])  # a child ends with its parent
        criu.send_signal(signal.SIGCONT)
        assert criu.wait(30) != 0, "criu says it dumped a dead tree"
        rig.settle(images)
        assert lasting_workers(images) == []
        if 0 in which:
            job.wait()
        else:
            job.pids = (job.pid,)
            job.run_on()  # the one that is left
        assert all(process_state(pid) != "t" for pid in job.pids)
    return True


def await_end(pids: Sequence[int]) -> None:
    """A signal is not there at once: criu must not be quicker."""
    deadline = time.monotonic() + 30
    while left := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, f"killed, and still there: {left}"
        time.sleep(0.001)


def is_stopped_in_time(criu: subprocess.Popen[bytes], images: Path, job: SteadyJob) -> bool:
    """Stop it. Whether it has the last task still to dump: afterwards it needs none of them."""
    criu.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + 30
    while (state := process_state(criu.pid)) not in {"T", "Z", ""}:
        assert time.monotonic() < deadline, f"criu does not stop, its state is {state!r}"
        time.sleep(0.001)
    return state == "T" and not (images / f"core-{job.pids[-1]}.img").exists()


def test_a_restore_that_breaks_off_leaves_nothing_that_runs_wrong(newest_rig: Rig) -> None:
    kill_restore.run(newest_rig, Random(SEED), 8).require_clean()


def test_the_worker_alone_is_killed(newest_rig: Rig) -> None:
    """criu tells that the dump failed, or had no more need of it; either way the job runs on."""
    kill_points.run_worker_kills(newest_rig, Random(SEED), 10).require_clean()
