# SPDX-License-Identifier: Apache-2.0
"""What the plugin costs those who do not use CUDA."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from campaigns import hook_cost
from campaigns.rig import Rig, Run
from gpustasis.criu.plugin import Scalar
from gpustasis_bench.bench.programs import compile_program
from support.cpu_memory import OURS

LIMIT_US = 50.0
# The kernel passes the mappings of 1,000 stacks one by one, whoever asks for those of files: the
# limit of the others is missed (docs/performance.md), and this one holds what was reached.
LIMIT_MANY_US = 1000.0
# System calls of criu's first thread more than without the plugin, of one process with little memory: the dump
# makes about 2,700 and the restore 900, of which these make about 180 and 280. Most of the restore's are
# descriptors with low numbers, which cost next to nothing.
MORE_CALLS_OF_DUMP = 250
MORE_CALLS_OF_RESTORE = 330


@pytest.mark.parametrize(
    ("threads", "limit_us"), [(1, LIMIT_US), (64, LIMIT_US), (1000, LIMIT_MANY_US)]
)
def test_a_process_without_cuda_costs_next_to_nothing(
    tmp_path: Path, emulator_environ: dict[str, str], threads: int, limit_us: float
) -> None:
    program = compile_program("hook_cost", tmp_path)
    hook_cost.run(program, emulator_environ, 500, limit_us, threads).require_clean()


def test_a_process_with_little_memory_is_dumped_as_without_the_plugin(rig: Rig) -> None:
    rig = replace(rig, programs=replace(rig.programs, job=rig.programs.tiny))
    with rig.job() as job:
        for _ in range(2):  # what there is once, such as criu's own cache, is not counted
            calls = {}
            for plugin in (False, True):
                config = OURS if plugin else None
                images = rig.images()
                dumped, calls["dump", plugin] = counted(
                    rig, rig.dump_words(job, images, plugin=plugin), images, "dump", config
                )
                assert dumped.status == 0, dumped.errors
                job.wait()
                words = rig.restore_words(images, plugin=plugin)
                restored, calls["restore", plugin] = counted(rig, words, images, "restore", config)
                assert restored.status == 0, restored.errors
                job.run_on()
        assert not list(images.glob("gpustasis-*.img"))
        (told,) = json.loads((images / "gpustasis-dump.json").read_text())["cpu_memory"]
        assert told["left_because"] == "there is little of it" and told["bytes"] == 0
        assert rig.dump(job, (images := rig.images()), config=OURS).status == 0
        job.wait()
        assert rig.restore(images, plugin=False).status == 0
        job.run_on()
    for stage, most in (("dump", MORE_CALLS_OF_DUMP), ("restore", MORE_CALLS_OF_RESTORE)):
        assert calls[stage, True] - calls[stage, False] <= most, calls


def counted(
    rig: Rig, words: Sequence[str], images: Path, stage: str, config: dict[str, Scalar] | None
) -> tuple[Run, int]:
    """How many system calls criu's first thread made."""
    count = rig.scratch / "calls"
    killer = [str(rig.programs.killer), str(count), "0", "-", ""]
    run = rig.run([*killer, *words], images, stage, config)
    return run, int(count.read_text())
