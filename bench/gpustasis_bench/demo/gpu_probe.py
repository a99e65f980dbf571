"""Whether this machine has a GPU that works, asked in a process of its own.

`python -m gpustasis_bench.demo.gpu_probe` prints one JSON object: the first GPU's name, or what is missing.
The driver leaves threads and descriptors behind, which nobody wants in the process that asks.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from dataclasses import dataclass

from gpustasis import process

_TIMEOUT_S = 120  # 8 GPUs without persistence mode take seconds to wake


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuAnswer:
    """gpu: the first GPU's name, or None. reason: why there is none, in half a sentence."""

    gpu: str | None
    reason: str


def probe_gpu() -> GpuAnswer:
    """Ask the system's own CUDA driver and NVML, in a subprocess."""
    try:
        ended = process.run(
            [sys.executable, "-m", "gpustasis_bench.demo.gpu_probe"],
            timeout_s=_TIMEOUT_S,
            env={k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"},
        )
    except TimeoutError:
        return GpuAnswer(gpu=None, reason=f"the driver gave no answer in {_TIMEOUT_S} s")
    try:
        answer = json.loads(ended.output.splitlines()[-1])  # a driver may talk before that
        return GpuAnswer(gpu=answer["gpu"], reason=answer["reason"])
    except (ValueError, KeyError, IndexError):
        return GpuAnswer(gpu=None, reason=f"the driver's process failed ({ended.ending})")


def _ask() -> GpuAnswer:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        management = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as exc:
        return GpuAnswer(gpu=None, reason=str(exc))
    count = ctypes.c_uint()
    status = management.nvmlInit_v2() or management.nvmlDeviceGetCount_v2(ctypes.byref(count))
    if status != 0 or count.value == 0:
        return GpuAnswer(gpu=None, reason=f"NVML lists no GPU (status {status})")
    status = driver.cuInit(0)
    if status != 0:
        return GpuAnswer(gpu=None, reason=f"cuInit answers {status}")
    device = ctypes.c_int()
    name = ctypes.create_string_buffer(256)
    status = driver.cuDeviceGet(ctypes.byref(device), 0)
    status = status or driver.cuDeviceGetName(name, 256, device)
    if status != 0:
        return GpuAnswer(gpu=None, reason=f"the first GPU answers {status}")
    return GpuAnswer(gpu=name.value.decode(errors="replace"), reason="")


if __name__ == "__main__":
    found = _ask()
    print(json.dumps({"gpu": found.gpu, "reason": found.reason}))
