# SPDX-License-Identifier: Apache-2.0
"""Which GPUs a task has, and where they go at a restore."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from campaigns import damage
from campaigns.rig import Rig
from campaigns.steady_job import SteadyJob
from gpustasis._core import GpuSource, TaskGpu, read_manifest
from gpustasis.emulator import Options
from support.checkpoint import Checkpointer
from support.criu_roots import newest_criu
from support.job import Job

MIB = 1 << 20
DRIVER = "580.95.05"


def machine(rig: Rig, gpus: int, **options: Any) -> list[str]:
    """Another machine of so many GPUs, with UUIDs of their own: which are returned."""
    if rig.emulator.is_running():
        rig.emulator.stop()
    rig.emulator.start(Options(gpus=gpus, memory_bytes=64 * MIB, driver=DRIVER, **options))
    return [str(gpu["uuid"]) for gpu in rig.emulator.status()["gpus"]]


def see_only(directory: Path, *gpus: int) -> None:
    """Make it the /dev of a container that was given these GPUs of its machine."""
    directory.mkdir(exist_ok=True)
    for path in directory.iterdir():
        path.unlink()
    for name in ("nvidia-uvm", *(f"nvidia{gpu}" for gpu in gpus)):
        (directory / name).write_bytes(bytes(4096))


@contextmanager
def job_that_sees(rig: Rig, directory: Path, **options: int) -> Iterator[SteadyJob]:
    environ = {**rig.environ, "GPUSTASIS_EMULATOR_DEV": str(directory)}
    job = SteadyJob(rig.programs.job, rig.scratch / f"job-{directory.name}", environ, **options)
    try:
        yield job
    finally:
        job.end()


def statistics(images: Path, stage: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((images / f"gpustasis-{stage}.json").read_text())
    return found


@pytest.mark.parametrize("named", [False, True], ids=["automatic", "gpu_map"])
def test_one_gpu_of_eight_goes_to_a_machine_with_four(own_rig: Rig, named: bool) -> None:
    old = machine(own_rig, 8)
    dev = own_rig.scratch / "dev"
    see_only(dev, 3)
    with job_that_sees(own_rig, dev, mib=8) as job:
        images = own_rig.images()
        dumped = own_rig.dump(job, images)
        assert dumped.status == 0, dumped.errors
        job.wait()
        (task,) = statistics(images, "dump")["tasks"]
        assert task["gpus"]["source"] == "nvml"
        (gpu,) = task["gpus"]["list"]
        assert gpu["uuid"] == old[3]
        assert 8 * MIB <= gpu["memory_bytes"] <= 24 * MIB
        (saved,) = read_manifest(images).tasks
        assert saved.gpu_source == GpuSource.NVML
        assert [(gpu.gpu, gpu.memory_size) for gpu in saved.gpus] == [(3, gpu["memory_bytes"])]

        new = machine(own_rig, 4)
        see_only(dev, 2 if named else 0)
        restored = own_rig.restore(images, config={"gpu_map": ["3=2"]} if named else None)
        assert restored.status == 0, restored.errors
        job.run_on()
        moves = statistics(images, "restore")["gpu_moves"]
        assert moves == [{"from": old[3], "to": new[2 if named else 0]}]


def test_a_map_that_cannot_hold_is_refused_before_anything(own_rig: Rig) -> None:
    machine(own_rig, 2)
    checkpoint = damage.take(own_rig, mib=4)
    for words, reason in (
        (["0=7"], "this machine has no GPU 7"),
        (["5=0"], "the checkpoint has no GPU 5"),
        (["0=1"], "name a place for it as well"),
        (["0=0", "1=0"], "another GPU goes to 0 already"),
        (["zero=1"], "each a GPU's UUID or number"),
    ):
        restored = own_rig.restore(checkpoint.images, config={"gpu_map": words})
        assert restored.status != 0, words
        assert reason in restored.log
        assert "Forking task" not in restored.log
    restored = own_rig.restore(checkpoint.images, config={"gpu_map": ["0=1", "1=0"]})
    assert restored.status == 0, restored.errors
    checkpoint.job.run_on()
    checkpoint.job.end()


@pytest.mark.parametrize(
    ("setting", "source", "sized"),
    [
        (("nvml_memory", "1"), GpuSource.NVML, True),
        (("nvml_processes", "1"), GpuSource.DEVICE_FILES, False),
        (("nvml_processes", "2"), GpuSource.NVML, False),
    ],
    ids=["no memory of its own", "no processes", "processes without sizes"],
)
def test_what_nvml_cannot_say_is_no_refusal(
    own_rig: Rig, setting: tuple[str, str], source: GpuSource, sized: bool
) -> None:
    own_rig.emulator.set(*setting)
    checkpoint = damage.take(own_rig, mib=4)
    (task,) = read_manifest(checkpoint.images).tasks
    assert task.gpu_source == source
    assert len(task.gpus) == 2
    assert (task.gpus[0].memory_size != TaskGpu.UNKNOWN_SIZE) == sized
    restored = own_rig.restore(checkpoint.images)
    assert restored.status == 0, restored.errors
    checkpoint.job.run_on()
    checkpoint.job.end()


def test_without_device_files_nothing_is_known(own_rig: Rig) -> None:
    machine(own_rig, 1)
    (own_rig.emulator.path.parent / "dev" / "nvidia0").unlink()
    checkpoint = damage.take(own_rig, mib=4)
    (task,) = read_manifest(checkpoint.images).tasks
    assert (task.gpu_source, task.gpus) == (GpuSource.UNKNOWN, [])
    (found,) = statistics(checkpoint.images, "dump")["tasks"]
    assert "no device file" in found["gpus"]["why_not_all"]
    restored = own_rig.restore(checkpoint.images)
    assert restored.status == 0, restored.errors
    checkpoint.job.run_on()
    checkpoint.job.end()


def test_commands_show_and_map_the_gpus_of_a_task(
    gpustasis: Callable[..., CompletedProcess[str]],
    gpu_generations: Callable[..., Job],
    emulator_environ: dict[str, str],
    images: Path,
) -> None:
    checkpointer = Checkpointer(newest_criu(), emulator_environ)
    job = gpu_generations()
    checkpointer.dump(job, images)
    shown = json.loads(gpustasis("inspect", images, "--json").stdout)
    (process,) = shown["processes"]
    assert process["cuda"]["gpu_source"] == "nvml"
    uuids = [gpu["uuid"] for gpu in shown["gpus"]]
    assert [gpu["uuid"] for gpu in process["cuda"]["gpus"]] == uuids
    first, second = process["cuda"]["gpus"]
    assert first["memory_bytes"] >= 12 * MIB
    assert second["memory_bytes"] == 0
    text = gpustasis("inspect", images).stdout
    assert f"GPU 0, {uuids[0]}: 12.0 MiB in use" in text
    assert f"GPU 1, {uuids[1]}: visible, not used" in text

    refused = gpustasis("restore", "-D", images, "--gpu-map", "0=1")
    assert refused.returncode != 0
    assert "name a place for it as well" in refused.stderr
    swap = ("--gpu-map", "0=1", "--gpu-map", f"{uuids[1]}={uuids[0]}")
    ended = gpustasis("restore", "-D", images, *swap)
    assert ended.returncode == 0, ended.stderr
    moves = statistics(images, "restore")["gpu_moves"]
    assert [(move["from"], move["to"]) for move in moves] == [
        (uuids[0], uuids[1]),
        (uuids[1], uuids[0]),
    ]
