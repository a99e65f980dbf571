# SPDX-License-Identifier: Apache-2.0
"""A job that fails goes back to a checkpoint that was made by the clock."""

from __future__ import annotations

import os
import signal
import time
from contextlib import closing

import pytest

from gpustasis.jobs.etcd import Etcd
from gpustasis.jobs.etcd_words import Access
from gpustasis.jobs.kept import all_epochs, marks
from gpustasis.jobs.records import Keys
from jobs.test_ranks import network, ring, store  # noqa: F401 - fixtures
from jobs.test_recovery import STEPS, shown
from support.json_output import check_document
from support.ring import WORLD, Ring


def whole(ring: Ring) -> list[int]:  # noqa: F811
    listed = check_document(ring.job("list", "--json").stdout, "job list")["epochs"]
    return [
        one["epoch"] for one in listed if (one["kind"], one["state"]) == ("checkpoint", "committed")
    ]


@pytest.mark.timeout(900)
def test_it_goes_back_to_what_was_made_by_the_clock_and_is_checkpointed_on(
    ring: Ring,  # noqa: F811
) -> None:
    ring.steps = 4 * STEPS  # three checkpoints lie before its end, however fast the machine is
    ring.start_all("--restarts", "2", "--interval", "1s", "--keep-last", "2")
    ring.wait(lambda: "epoch 3: committed" in ring.log_whole(0))
    os.kill(ring.program_of(2), signal.SIGKILL)
    ring.wait(lambda: len(shown(ring)["recoveries"]) == 1)
    (recovery,) = shown(ring)["recoveries"]
    assert recovery["restored"] >= 3
    ring.wait(lambda: max(whole(ring)) > recovery["epoch"] + 1)
    assert ring.ends(240) == [0] * WORLD, ring.logs()
    ring.check_end()
    assert shown(ring)["restarts"] == 1, shown(ring)["recoveries"]
    assert len(whole(ring)) == 2
    for rank in range(WORLD):
        kept = {one.name for one in (ring.directory / f"kept/rank-{rank}").glob("epoch-*")}
        # And what those are built on.
        assert {f"epoch-{epoch:08d}" for epoch in whole(ring)} <= kept, rank


@pytest.mark.timeout(900)
def test_checkpoints_by_the_clock_hide_no_hang_and_leave_one_from_before_it(
    ring: Ring,  # noqa: F811
    store: list[str],  # noqa: F811
) -> None:
    ring.steps = 4 * STEPS  # six checkpoints lie before its end, however fast the machine is
    words = "--restarts 5 --back-off 0 --hang-after 12 --interval 2s --keep-last 1"
    ring.start_all(*words.split())
    ring.wait(lambda: "epoch 6: committed" in ring.log_whole(0), timeout_s=120)
    hung_at = time.time()
    os.kill(ring.program_of(1), signal.SIGUSR1)
    ring.wait(lambda: len(shown(ring)["recoveries"]) > 0, timeout_s=240)
    # On a loaded machine connections that were locked again and again may stand still once more:
    # what is marked then is marked after this.
    recovery = shown(ring)["recoveries"][0]
    assert "hangs: " in recovery["reason"]
    with closing(Etcd(Access(endpoints=(store[1],)))) as client:
        found = all_epochs(client, Keys(ring.name))
        marked = marks(client, Keys(ring.name))
    before = [one.number for one in found if one.was_whole and 0 < one.begun_at <= hung_at]
    assert recovery["epoch"] > before[-1] + 1  # one was made while it hung
    # To one from before, although --keep-last is 1: to the newest that was not begun so shortly
    # before that it may be of a job that hung.
    assert recovery["restored"] == [number for number in before if number not in marked][-1]
    assert ring.ends(240) == [0] * WORLD, ring.logs()
    ring.check_end()
