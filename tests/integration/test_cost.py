# SPDX-License-Identifier: Apache-2.0
"""What the plugin costs those who do not use CUDA."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from campaigns import hook_cost
from campaigns.rig import Rig
from gpustasis.criu.plugin import Scalar
from gpustasis_bench.bench.programs import compile_program

LIMIT_US = 50.0
# The kernel passes the mappings of 1,000 stacks one by one, whoever asks for those of files: the
# limit of the others is missed (docs/performance.md), and this one holds what was reached.
LIMIT_MANY_US = 1000.0
# System calls of criu's first thread more than without the plugin, of one process with little
# memory. The dump makes about 2,000 and the restore 900, of which these make 200 and 280. Dumps of
# other tests that are under way add some, for what they have noted is read; other processes of the
# machine may not: there are CROWD of them.
MORE_CALLS_OF_DUMP = 1000
MORE_CALLS_OF_RESTORE = 600
CROWD = 500
AUTO: dict[str, Scalar] = {"cpu_memory": "auto"}


@pytest.mark.parametrize(
    ("threads", "limit_us"), [(1, LIMIT_US), (64, LIMIT_US), (1000, LIMIT_MANY_US)]
)
def test_a_process_without_cuda_costs_next_to_nothing(
    tmp_path: Path, emulator_environ: dict[str, str], threads: int, limit_us: float
) -> None:
    program = compile_program("hook_cost", tmp_path)
    hook_cost.run(program, emulator_environ, 500, limit_us, threads).require_clean()


@pytest.fixture
def crowd() -> Iterator[None]:
    """Processes that nobody dumps."""
    ended, end = os.pipe()
    pids = []
    for _ in range(CROWD):
        pid = os.fork()
        if pid == 0:
            os.close(end)
            os.read(ended, 1)
            os._exit(0)
        pids.append(pid)
    os.close(ended)
    yield
    os.close(end)
    for pid in pids:
        os.waitpid(pid, 0)


@pytest.mark.one_criu
def test_a_process_with_little_memory_is_dumped_as_without_the_plugin(
    rig: Rig, crowd: None
) -> None:
    rig = replace(rig, programs=replace(rig.programs, job=rig.programs.tiny))
    calls = {}
    with rig.job() as job:
        for plugin in (False, True):
            config = AUTO if plugin else None
            images = rig.images()
            words = rig.dump_words(job, images, plugin=plugin)
            calls["dump", plugin] = count_calls(rig, words, images, "dump", config)
            job.wait()
            words = rig.restore_words(images, plugin=plugin)
            calls["restore", plugin] = count_calls(rig, words, images, "restore", config)
            job.run_on()
        assert not list(images.glob("gpustasis-*.img"))
        (told,) = json.loads((images / "gpustasis-dump.json").read_text())["cpu_memory"]
        assert told["left_because"] == "there is little of it" and told["bytes"] == 0
        images = rig.images()
        assert rig.dump(job, images, config=AUTO).status == 0
        job.wait()
        assert rig.restore(images, plugin=False).status == 0  # it is a checkpoint of CRIU's
        job.run_on()
    for stage, most in (("dump", MORE_CALLS_OF_DUMP), ("restore", MORE_CALLS_OF_RESTORE)):
        assert calls[stage, True] - calls[stage, False] <= most, calls


def count_calls(
    rig: Rig, words: Sequence[str], images: Path, stage: str, config: dict[str, Scalar] | None
) -> int:
    """How many system calls criu's first thread makes."""
    count = rig.scratch / "calls"
    killer = [str(rig.programs.killer), str(count), "0", "-", ""]
    run = rig.run([*killer, *words], images, stage, config)
    assert run.status == 0, run.errors
    return int(count.read_text())
