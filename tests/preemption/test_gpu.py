# SPDX-License-Identifier: Apache-2.0
"""A job with GPU memory, on the emulator, under `python -m gpustasis.jit`."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path

from support.supervised import Supervised

PROGRAM = Path(__file__).resolve().parent.parent / "programs" / "gpu_generations.c"


def test_gpu_memory_counts_and_comes_back(
    tmp_path: Path, emulator_environ: dict[str, str], compile_cuda: Callable[..., Path]
) -> None:
    words = ("--store", "store", compile_cuda(PROGRAM), 8, 1, 4)
    first = Supervised(tmp_path, *words, environ=emulator_environ)
    second = None
    try:
        first.wait_for("ready")
        first.process.send_signal(signal.SIGUSR1)  # passed on
        first.wait_for("intact 0\n")
        first.tell_to_end()
        assert first.wait() == 75, first.said()
        (size,) = re.findall(r"and ([0-9.]+) MiB of GPU memory", first.said())
        assert 12 <= float(size) < 100
        second = Supervised(tmp_path, *words, environ=emulator_environ)
        second.wait_for("goes on, restored from")
        second.process.send_signal(signal.SIGUSR1)
        second.wait_for("intact 1\n")
        assert second.wrote() == ["intact 1"]
    finally:
        first.close()
        if second is not None:
            second.close()
