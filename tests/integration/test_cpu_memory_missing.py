# SPDX-License-Identifier: Apache-2.0
"""Where our plugin is not asked, or cannot store: no process runs without its memory, and "auto"
fails no dump that CRIU alone could do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from campaigns.rig import Rig, Run
from gpustasis.criu.plugin import Scalar
from support.cpu_memory import FIRST_CHECKPOINT, OURS, pages_bytes, refused, require_dead, running
from support.other_plugin import with_plugin_before

PROGRAMS = Path(__file__).resolve().parent.parent / "programs"


@pytest.fixture(scope="session")
def answering_plugin(compile_c: Callable[..., Path]) -> Path:
    return compile_c(PROGRAMS / "other_plugin.c", "-shared", "-fPIC")


def restore_behind(rig: Rig, plugin: Path, images: Path) -> Run:
    words = with_plugin_before(rig, plugin, rig.restore_words(images))
    return rig.run(words, images, "restore")


def test_a_process_that_would_run_without_its_memory_is_killed(
    rig: Rig, memory_job: Path, answering_plugin: Path
) -> None:
    with running(rig, memory_job, mib=40, children=1) as job:
        images = rig.images()
        assert rig.dump(job, images, config=OURS).status == 0
        job.wait()
        output = job.log.read_bytes()
        log = refused(restore_behind(rig, answering_plugin, images))
        assert "criu lets the tasks go before their memory is there" in log
        require_dead(job)
        assert job.log.read_bytes() == output  # none has run
        told_failure = json.loads((images / "gpustasis-restore.json").read_text())
        assert told_failure["result"] == "failed" and "before their memory" in told_failure["error"]
        job.reap()
        assert rig.restore(images).status == 0
        job.run_on()


def test_a_process_that_would_run_without_its_gpu_memory_is_killed(
    newest_rig: Rig, answering_plugin: Path
) -> None:
    with newest_rig.job(module=newest_rig.programs.kernels, mib=8) as job:
        images = newest_rig.images()
        assert newest_rig.dump(job, images).status == 0
        job.wait()
        output = job.log.read_bytes()
        log = refused(restore_behind(newest_rig, answering_plugin, images))
        assert "criu lets the tasks go before their memory is there" in log
        require_dead(job)
        assert job.log.read_bytes() == output  # none has run
        job.reap()
        assert newest_rig.restore(images).status == 0
        job.run_on()


@pytest.mark.parametrize("config", [{"parent": "missing"}, {"incremental": True}], ids=str)
def test_auto_leaves_to_criu_what_has_no_usable_parent(
    newest_rig: Rig, memory_job: Path, config: dict[str, Scalar]
) -> None:
    """Asked for by name, it is an error before anything is frozen."""
    with running(newest_rig, memory_job, mib=100, criu_restores=True) as job:
        log = refused(newest_rig.dump(job, newest_rig.images(), config={**OURS, **config}))
        assert next(iter(config)) in log and FIRST_CHECKPOINT not in log
        job.run_on(1)
        images = newest_rig.images()
        dumped = newest_rig.dump(job, images, config={"cpu_memory": "auto", **config})
        assert dumped.status == 0, dumped.errors
        job.wait()
        assert 'cpu_memory = "auto": the CPU memory of pid' in dumped.log
        assert pages_bytes(images) > 100 << 20
        assert newest_rig.restore(images).status == 0
        job.run_on()
