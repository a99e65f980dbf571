# SPDX-License-Identifier: Apache-2.0
"""Restores that cannot come to anything are refused before CRIU makes a single process."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from campaigns import damage
from campaigns.rig import Rig, Run
from gpustasis.criu.plugin import Setting
from gpustasis.emulator import Options
from support.pids import sleep_as

MIB = 1 << 20
DRIVER = "580.95.05"


def restart(rig: Rig, options: Options) -> list[str]:
    """Another machine: the emulator with other GPUs. Returns the UUIDs that it had."""
    uuids = [str(gpu["uuid"]) for gpu in rig.emulator.status()["gpus"]]
    rig.emulator.stop()
    rig.emulator.start(options)
    return uuids


def uuids_of(rig: Rig) -> tuple[str, ...]:
    return tuple(str(gpu["uuid"]) for gpu in rig.emulator.status()["gpus"])


def require_refused_before_anything(rig: Rig, checkpoint: damage.Checkpoint, reason: str) -> None:
    outcome = damage.expect_refusal(rig, checkpoint.job, checkpoint.images)
    log = checkpoint.images.with_name(f"{checkpoint.images.name}.restore.log").read_text()
    assert re.search(reason, log), log[-2000:]
    assert outcome == "refused before anything was made"
    assert "Forking task" not in log


def require_restored(
    rig: Rig, checkpoint: damage.Checkpoint, config: Mapping[str, Setting] | None = None
) -> Run:
    restored = rig.restore(checkpoint.images, config=config)
    assert restored.status == 0, restored.errors
    checkpoint.job.run_on()
    checkpoint.job.end()
    return restored


def test_too_little_gpu_memory_left(own_rig: Rig) -> None:
    restart(own_rig, Options(gpus=1, memory_bytes=64 * MIB, driver=DRIVER))
    checkpoint = damage.take(own_rig, mib=40)
    with own_rig.job(mib=32):
        require_refused_before_anything(own_rig, checkpoint, r"holds \d+ MiB .* \d+ MiB free")
    require_restored(own_rig, checkpoint)


def test_too_little_memory_left_on_the_gpu_that_needs_it(own_rig: Rig) -> None:
    """The other GPU has room enough for all of it, and is of no help: unless a map says so."""
    checkpoint = damage.take(own_rig, mib=40)
    with own_rig.job(mib=32):
        reason = r"holds 4\d MiB .* for GPU-.* which has \d+ MiB free"
        require_refused_before_anything(own_rig, checkpoint, reason)
        require_restored(own_rig, checkpoint, config={"gpu_map": ["0=1", "1=0"]})


def test_fewer_gpus(own_rig: Rig) -> None:
    checkpoint = damage.take(own_rig, mib=4)
    uuids = uuids_of(own_rig)
    restart(own_rig, Options(gpus=1, memory_bytes=64 * MIB, driver=DRIVER, uuids=uuids[:1]))
    require_refused_before_anything(own_rig, checkpoint, r"2 GPU\(s\), this machine has 1")


def test_another_model(own_rig: Rig) -> None:
    checkpoint = damage.take(own_rig, mib=4)
    restart(own_rig, Options(gpus=2, memory_bytes=64 * MIB, driver=DRIVER, name="another GPU"))
    require_refused_before_anything(own_rig, checkpoint, r'needs another GPU "gpustasis emulated')


def test_an_older_driver(own_rig: Rig) -> None:
    checkpoint = damage.take(own_rig, mib=4)
    uuids = uuids_of(own_rig)
    older = Options(gpus=2, memory_bytes=64 * MIB, driver="570.124.06", uuids=uuids)
    restart(own_rig, older)
    require_refused_before_anything(own_rig, checkpoint, r"CUDA 13\.0, .* is for 12\.8")


def test_no_driver(own_rig: Rig) -> None:
    checkpoint = damage.take(own_rig, mib=4)
    restored = own_rig.restore(checkpoint.images, config={"driver": "/nonexistent/libcuda.so.1"})
    assert restored.status != 0
    assert "Error (gpustasis): cuda_plugin: " in restored.log
    assert "/nonexistent/libcuda.so.1" in restored.log
    assert "Forking task" not in restored.log
    require_restored(own_rig, checkpoint)


def test_the_same_model_under_other_uuids(own_rig: Rig) -> None:
    """GPUs of the same model are as good: the memory moves to them."""
    checkpoint = damage.take(own_rig, mib=4, pinned_kib=64)
    uuids = uuids_of(own_rig)
    restart(own_rig, Options(gpus=2, memory_bytes=64 * MIB, driver=DRIVER))
    assert set(uuids).isdisjoint(uuids_of(own_rig))
    restored = require_restored(own_rig, checkpoint)
    assert "moves to another GPU" in restored.log


@pytest.mark.parametrize("externalize", [True, False])
def test_criu_without_the_plugin_refuses_and_names_it(newest_rig: Rig, externalize: bool) -> None:
    """What only our plugin can restore names it; the rest names the stock plugin."""
    with newest_rig.job(mib=4) as job:
        images = newest_rig.images()
        dumped = newest_rig.dump(job, images, config={"externalize": externalize})
        assert dumped.status == 0, dumped.errors
        job.wait()
        newest_rig.settle(images)
        restored = newest_rig.restore(images, plugin=False)
        assert restored.status != 0
        assert job.alive_pids() == []
        missing = set(re.findall(r"[Mm]issing required plugin: (\S+)", restored.log))
        if externalize:
            assert "gpustasis" in missing or any(m.startswith("checkpoint-") for m in missing)
        else:
            assert missing == {"cuda_plugin"}
            assert list(images.glob(f"gpustasis-{job.pid}.img")) == []
            # As a checkpoint of the stock plugin: nothing of ours is needed to restore it.
            for path in images.glob("gpustasis-*"):
                path.unlink()
        assert newest_rig.restore(images).status == 0
        job.run_on()


def test_an_externalised_checkpoint_without_its_files_is_refused(newest_rig: Rig) -> None:
    checkpoint = damage.take(newest_rig, mib=4)
    for path in checkpoint.images.glob("gpustasis-*"):
        path.unlink()
    require_refused_before_anything(newest_rig, checkpoint, r"gpustasis-manifest\.img")


def test_a_task_that_took_the_pid_is_left_alone(newest_rig: Rig) -> None:
    """A failing restore kills what it made, and nothing else."""
    checkpoint = damage.take(newest_rig, mib=4)
    pid = checkpoint.job.pid
    images = checkpoint.images
    sleep_as(pid)
    try:
        # Not by restore(), which waits until the pid is free.
        restored = newest_rig.run(newest_rig.restore_words(images), images, "restore")
        assert restored.status != 0
        assert Path(f"/proc/{pid}/comm").read_text() == "sleep\n"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_pid_that_another_process_has_for_a_moment_is_waited_for(newest_rig: Rig) -> None:
    """By these tests: they are not alone on this machine."""
    checkpoint = damage.take(newest_rig, mib=4)
    pid = checkpoint.job.pid
    sleep_as(pid)

    def end() -> None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    waiting = threading.Timer(1.0, end)
    waiting.start()
    require_restored(newest_rig, checkpoint)
    waiting.join()
