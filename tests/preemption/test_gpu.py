# SPDX-License-Identifier: Apache-2.0
"""A job with GPU memory, on the emulator, under `python -m gpustasis.jit`."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpustasis.errors import CheckpointError
from gpustasis.preemption.dumping import Limits, criu_words, dump
from support.criu_roots import preferred_criu
from support.job import Job, check_memory
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


@pytest.mark.parametrize("after_s", [0.0, 0.1, 0.2])
def test_a_dump_that_is_broken_off_leaves_gpu_memory_as_it_was(
    gpu_generations: Callable[..., Job],
    emulator_environ: dict[str, str],
    images: Path,
    unfinished: list[str],
    monkeypatch: pytest.MonkeyPatch,
    after_s: float,
) -> None:
    for name, value in emulator_environ.items():
        monkeypatch.setenv(name, value)
    job = gpu_generations(160)
    stop = time.monotonic() + after_s
    with pytest.raises(CheckpointError, match="was broken off after"):
        limits = Limits(stop=stop, kill=stop + 60)
        words = [*criu_words("nftables"), *unfinished]
        dump(preferred_criu(), job.pid, images, lambda: limits, words)
    check_memory(job, 0)
    check_memory(job, 1)
