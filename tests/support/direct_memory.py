# SPDX-License-Identifier: Apache-2.0
"""Dumps with gpu_memory = "direct", and what they are tested on."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from campaigns.rig import Programs, Rig, with_config, workers
from campaigns.steady_job import SteadyJob
from gpustasis.criu.find import Criu
from gpustasis.criu.plugin import Scalar
from gpustasis.driver import ProcessState
from gpustasis.emulator import RATES_OFF, Emulator, Options, api_version_of
from gpustasis.recovery import WORKER_COMM
from support.driver_states import driver_of

DIRECT: dict[str, Scalar] = {"gpu_memory": "direct"}
DRIVER = "615.71.09"
MIB = 1 << 20
_SLOW = 0.1  # GB/s of a GPU: 64 MiB take 0.6 s
_TIMEOUT_S = 40.0


def tasks(images: Path, stage: str = "dump") -> list[dict[str, Any]]:
    """Of the statistics of that stage."""
    found: list[dict[str, Any]] = json.loads((images / f"gpustasis-{stage}.json").read_text())[
        "tasks"
    ]
    return found


@contextmanager
def slow_copies(
    criu: Criu, programs: Programs, scratch: Path, memory: int = 256 * MIB
) -> Iterator[Rig]:
    """Two GPUs, of that memory, which is copied slowly, both ways; each dump is direct."""
    emulator = Emulator(path=scratch / "emulator" / "socket")
    emulator.start(
        Options(
            gpus=2,
            memory_bytes=memory,
            driver=DRIVER,
            rates=RATES_OFF,
            direct_rates=(_SLOW, _SLOW),
        )
    )
    environ = dict(os.environ) | emulator.environment(api_version_of(DRIVER))
    rig = Rig(criu, emulator, environ, programs, scratch)
    yield with_config(rig, DIRECT)
    rig.close()
    if emulator.is_running():
        emulator.stop()


def slow_down(rig: Rig, way: str, rate: float = 0.01) -> None:
    """Copy GPU memory at `rate` GB/s from now on; way: "d2h" or "h2d". At 0.01, 64 MiB take 6.7 s:
    time enough for a test to act meanwhile on a machine that does other work. What the driver hands
    over, or takes back, keeps the rate that it has at its begin."""
    rig.emulator.set(f"direct_{way}_ms_per_gib", str(round(2**30 / 1e6 / rate)))


def await_state(rig: Rig, pid: int, state: ProcessState) -> None:
    driver = driver_of(rig.environ)
    deadline = time.monotonic() + _TIMEOUT_S
    while driver.get_state(pid) is not state:
        assert time.monotonic() < deadline, f"{pid} is {driver.get_state(pid).name}"
        time.sleep(0.01)


def worker_of(images: Path) -> int:
    (found,) = [
        pid
        for pid in workers(images)
        if Path(f"/proc/{pid}/comm").read_text().strip() == WORKER_COMM
    ]
    return found


@contextmanager
def handed_over(
    rig: Rig, job: SteadyJob, *extra: str
) -> Iterator[tuple[subprocess.Popen[bytes], Path, int]]:
    """criu, its image directory and its worker, while GPU memory is on its way into the image."""
    images = rig.images()
    criu = rig.start(rig.dump_words(job, images, extra))
    await_state(rig, job.pid, ProcessState.CHECKPOINTING)
    yield criu, images, worker_of(images)


@contextmanager
def lying_disk(mount_point: Path, backing: Path, size: int, room: int) -> Iterator[Path]:
    """An ext4 of `size` bytes, all of which it lets be reserved, on a medium that has `room` bytes:
    what is written beyond is an error of the medium."""
    backing.mkdir()
    mount_point.mkdir(mode=0o700)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={room}", "tmpfs", backing], check=True, timeout=30
    )
    device = backing / "disk"
    with device.open("wb") as file:
        file.truncate(size)
    for words in (
        ["mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", "-E", "lazy_itable_init=1", device],
        ["mount", "-o", "loop", device, mount_point],
    ):
        subprocess.run(words, check=True, timeout=60)
    try:
        yield mount_point
    finally:
        subprocess.run(["umount", "-l", mount_point], check=False, timeout=60)
        subprocess.run(["umount", "-l", backing], check=False, timeout=60)
