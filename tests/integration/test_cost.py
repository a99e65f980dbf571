"""What the plugin costs those who do not use CUDA."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from campaigns import hook_cost

PROGRAMS = Path(__file__).resolve().parent.parent / "programs"
LIMIT_US = 50.0


def test_a_process_without_cuda_costs_next_to_nothing(
    compile_c: Callable[..., Path], emulator_environ: dict[str, str]
) -> None:
    program = compile_c(PROGRAMS / "hook_cost.c", "-rdynamic", "-ldl")
    hook_cost.run(program, emulator_environ, 500, LIMIT_US).require_clean()
