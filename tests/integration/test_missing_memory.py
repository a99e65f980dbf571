# SPDX-License-Identifier: Apache-2.0
"""Memory of a process that a dump which was broken off has alone: whoever removes what failed dumps
leave keeps that one, whichever way the memory left the process, and says so."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from campaigns.rig import Rig, with_config, with_driver
from gpustasis.agent.work import remove_failed
from gpustasis.criu.images import INVENTORY_NAME
from gpustasis.criu.plugin import Setting
from gpustasis.diagnosis.host import check_dropped_memory
from gpustasis.dump_records import find_missing, why_needed
from gpustasis.errors import CheckpointError
from gpustasis.preemption.store import JobStore
from gpustasis.streaming.tree import Tree
from support.broken_dumps import break_off, recover
from support.direct_memory import DIRECT, DRIVER


@pytest.mark.parametrize("config", [{}, DIRECT], ids=["dropped", "handed over"])
def test_what_is_nowhere_else_is_kept(
    newest_rig: Rig,
    tmp_path: Path,
    config: dict[str, Setting],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for wait in ("agent.work._REFILL_S", "streaming.tree.SETTLE_S"):
        monkeypatch.setattr(f"gpustasis.{wait}", 1)
    with (
        with_driver(newest_rig, DRIVER) as plain,
        plain.job(mib=8) as job,
        JobStore(tmp_path / "store") as store,
    ):
        rig = with_config(plain, config)
        images = store.directory / "jit-000001"
        images.mkdir(0o700)
        tree = Tree(job.pid)
        assert find_missing(job.pid) is None and why_needed(images) == ""
        break_off(rig, job, images)
        rig.settle(images)
        (images / INVENTORY_NAME).unlink(missing_ok=True)  # as if criu had not come to its end
        needed = f"it holds memory that is missing in process {job.pid}"
        assert needed in why_needed(images)
        assert f"memory of process {job.pid} is only in {images}" in tree.why_not_running(images)
        assert f"memory of process {job.pid}" in [one.name for one in check_dropped_memory()]
        before = sorted(images.iterdir())
        with pytest.raises(CheckpointError, match=needed):
            store.discard(images)
        with caplog.at_level(logging.WARNING):
            assert not remove_failed(images)
        assert needed in caplog.text
        assert sorted(images.iterdir()) == before
        recover(plain, job.pid, "-D", images)
        job.run_on()
        assert find_missing(job.pid) is None and why_needed(images) == ""
        assert tree.why_not_running(images) == ""
        tree.close()
        assert f"memory of process {job.pid}" not in [one.name for one in check_dropped_memory()]
        assert store.discard(images)
