# SPDX-License-Identifier: Apache-2.0
"""What the plugin costs those who do not use CUDA."""

from __future__ import annotations

from pathlib import Path

from campaigns import hook_cost
from gpustasis_bench.bench.programs import compile_program

LIMIT_US = 50.0


def test_a_process_without_cuda_costs_next_to_nothing(
    tmp_path: Path, emulator_environ: dict[str, str]
) -> None:
    program = compile_program("hook_cost", tmp_path)
    hook_cost.run(program, emulator_environ, 500, LIMIT_US).require_clean()
