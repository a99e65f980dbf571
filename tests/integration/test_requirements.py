# SPDX-License-Identifier: Apache-2.0
"""A restore is refused, before anything is created, where the files that the job had mapped are not
there any more, or GPU memory is short; and goes on where that is asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace as replaced
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from campaigns import damage
from campaigns.damage import Checkpoint
from campaigns.rig import Rig
from gpustasis._core import FileIdentity, Manifest, RequiredFile, read_manifest, write_manifest
from gpustasis.emulator import RATES_OFF, Options
from support.cpu_memory import OURS, require_dead, running
from support.json_output import check_document
from support.library import CompileC, changed, library, replace

DRIVER = "580.95.05"
FORKING = "Forking task"
IGNORE = {"requirements": "ignore"}
COST_MS = 500.0  # some ms where nothing else runs


def take(rig: Rig, mapped: Path, **options: int) -> Checkpoint:
    """A checkpoint of a job that has loaded `mapped`."""
    return damage.take(rig, {**rig.environ, "LD_PRELOAD": str(mapped)}, **options)


def recorded(images: Path, path: Path) -> RequiredFile:
    requirements = read_manifest(images).requirements
    assert requirements is not None
    assert requirements.unrecorded == 0
    (found,) = [file for file in requirements.files if file.path == str(path)]
    return found


def require_refused(rig: Rig, checkpoint: Checkpoint, *reasons: str) -> None:
    restored = rig.restore(checkpoint.images)
    assert restored.status != 0
    for reason in reasons:
        assert reason in restored.log, restored.errors
    assert FORKING not in restored.log
    assert checkpoint.job.alive_pids() == []


def test_a_library_with_another_build_id_is_refused(rig: Rig, compile_c: CompileC) -> None:
    mapped = rig.scratch / "library.so"
    old = library(compile_c, rig.scratch, "0x1111111111111111")
    new = library(compile_c, rig.scratch, "0x2222222222222222")
    assert len(old) == len(new)
    replace(mapped, old)
    checkpoint = take(rig, mapped, mib=4, children=1)
    file = recorded(checkpoint.images, mapped)
    assert (file.identity, file.id, file.size) == (FileIdentity.BUILD_ID, b"\x11" * 8, len(old))

    replace(mapped, new)
    said = f"{mapped} has build id 2222222222222222, {len(new)} bytes (expected: build id 11111111"
    require_refused(rig, checkpoint, said)
    failed = json.loads((checkpoint.images / "gpustasis-restore.json").read_text())
    assert said in failed["error"]
    mapped.unlink()
    require_refused(rig, checkpoint, f"{mapped} is missing (expected: build id 1111111111111111")
    mapped.mkdir()
    require_refused(rig, checkpoint, f"{mapped} is no regular file")
    mapped.rmdir()

    replace(mapped, old)  # another file of the same build id
    restored = rig.restore(checkpoint.images)
    assert restored.status == 0, restored.errors
    checkpoint.job.run_on()
    checkpoint.job.end()


def test_other_content_without_a_build_id_is_refused_unless_told(
    rig: Rig, compile_c: CompileC
) -> None:
    """CRIU itself compares no more than its size."""
    mapped = rig.scratch / "library.so"
    replace(mapped, library(compile_c, rig.scratch, "none"))
    checkpoint = take(rig, mapped, mib=4)
    assert recorded(checkpoint.images, mapped).identity == FileIdentity.CONTENT
    replace(mapped, changed(mapped.read_bytes()))
    require_refused(rig, checkpoint, f"{mapped} has hash ", 'set requirements = "ignore"')
    restored = rig.restore(checkpoint.images, config=IGNORE)
    assert restored.status == 0, restored.errors
    assert f'ignored, as requirements = "ignore" says: {mapped} has hash ' in restored.log
    checkpoint.job.run_on()
    checkpoint.job.end()


def test_a_gpu_with_too_little_memory_is_refused_unless_told(
    own_rig: Rig, compile_c: CompileC
) -> None:
    """The driver says no where the plugin was told not to."""
    mapped = own_rig.scratch / "library.so"
    replace(mapped, library(compile_c, own_rig.scratch, "sha1"))
    checkpoint = take(own_rig, mapped, mib=8)
    own_rig.emulator.stop()
    small = Options(gpus=2, memory_bytes=6 << 20, driver=DRIVER, rates=RATES_OFF)
    own_rig.emulator.start(small)
    require_refused(own_rig, checkpoint, "of GPU memory for", "6 MiB free")
    restored = own_rig.restore(checkpoint.images, config=IGNORE)
    assert restored.status != 0
    assert 'ignored, as requirements = "ignore" says: the checkpoint holds ' in restored.log
    assert FORKING in restored.log
    assert "every restored task was killed" in restored.log
    require_dead(checkpoint.job)
    checkpoint.job.reap()
    checkpoint.job.end()


def test_a_checkpoint_without_a_record_is_restored(newest_rig: Rig, compile_c: CompileC) -> None:
    """As an older gpustasis made it."""
    mapped = newest_rig.scratch / "library.so"
    replace(mapped, library(compile_c, newest_rig.scratch, "none"))
    checkpoint = take(newest_rig, mapped, mib=4)
    forget_record(checkpoint.images)
    assert read_manifest(checkpoint.images).requirements is None
    replace(mapped, changed(mapped.read_bytes()))
    restored = newest_rig.restore(checkpoint.images)
    assert restored.status == 0, restored.errors
    checkpoint.job.run_on()
    checkpoint.job.end()


def forget_record(images: Path) -> None:
    old = read_manifest(images)
    write_manifest(
        images,
        Manifest(
            checkpoint_id=old.checkpoint_id,
            driver_api_version=old.driver_api_version,
            driver_version=old.driver_version,
            gpus=old.gpus,
            tasks=old.tasks,
        ),
    )


def test_a_tree_without_cuda_whose_memory_we_store_has_a_record(
    gpustasis: Callable[..., CompletedProcess[str]],
    newest_rig: Rig,
    memory_job: Path,
    compile_c: CompileC,
) -> None:
    mapped = newest_rig.scratch / "library.so"
    replace(mapped, library(compile_c, newest_rig.scratch, "0x1111111111111111"))
    environ = {**newest_rig.environ, "LD_PRELOAD": str(mapped)}
    with running(replaced(newest_rig, environ=environ), memory_job, mib=20, children=1) as job:
        images = newest_rig.images()
        dumped = newest_rig.dump(job, images, config=OURS)
        assert dumped.status == 0, dumped.errors
        job.wait()
        assert recorded(images, mapped).identity == FileIdentity.BUILD_ID
        assert recorded(images, memory_job).size == memory_job.stat().st_size
        assert finding(gpustasis("doctor", "--archive", images, "--json"))["status"] == "ok"

        old = library(compile_c, newest_rig.scratch, "0x1111111111111111")
        replace(mapped, library(compile_c, newest_rig.scratch, "0x2222222222222222"))
        require_refused(newest_rig, Checkpoint(job, images), f"{mapped} has build id 22222222")
        replace(mapped, old)
        assert newest_rig.restore(images).status == 0
        job.run_on()


def test_what_the_record_costs(newest_rig: Rig, compile_c: CompileC) -> None:
    """All tasks are frozen meanwhile."""
    mapped = newest_rig.scratch / "library.so"
    replace(mapped, library(compile_c, newest_rig.scratch, "sha1"))
    dumps, restores = [], []
    for _ in range(3):  # other work makes some slower, and none faster
        checkpoint = take(newest_rig, mapped, mib=4, children=1, plain_children=48)
        dumped = json.loads((checkpoint.images / "gpustasis-dump.json").read_text())
        dumps.append(dumped["phases_ms"]["mapped_files"])
        assert recorded(checkpoint.images, mapped).identity == FileIdentity.BUILD_ID
        restored = newest_rig.restore(checkpoint.images)
        assert restored.status == 0, restored.errors
        checkpoint.job.run_on()
        checkpoint.job.end()
        done = json.loads((checkpoint.images / "gpustasis-restore.json").read_text())
        restores.append(done["phases_ms"]["check_files"])
    print(dumps, restores)
    assert min(dumps) < COST_MS, dumps
    assert min(restores) < COST_MS, restores


def test_commands_show_compare_and_ignore_them(
    gpustasis: Callable[..., CompletedProcess[str]], newest_rig: Rig, compile_c: CompileC
) -> None:
    mapped = newest_rig.scratch / "library.so"
    old = library(compile_c, newest_rig.scratch, "none")
    replace(mapped, old)
    checkpoint = take(newest_rig, mapped, mib=8)
    images = checkpoint.images

    shown = gpustasis("inspect", "--requirements", images)
    assert shown.returncode == 0, shown.stderr
    assert f"{DRIVER}, CUDA 13.0, with these libraries" in shown.stdout
    assert "8.0 MiB free; was GPU-" in shown.stdout
    assert f"{mapped}: hash " in shown.stdout
    document = check_document(
        gpustasis("inspect", "--requirements", "--json", images).stdout, "inspect"
    )
    needed = document["requirements"]
    assert needed["driver_version"] == DRIVER
    assert needed["unplaced_bytes"] == 0
    assert max(gpu["memory_bytes"] for gpu in needed["gpus"]) >= 8 << 20
    (driver,) = [f for f in needed["driver_libraries"] if "/libcuda.so" in f["path"]]
    assert driver["identity"] == "build_id"
    (file,) = [file for file in needed["files"] if file["path"] == str(mapped)]
    assert (file["place"], file["identity"], file["bytes"]) == ("host", "content", len(old))
    assert "requirements" not in json.loads(gpustasis("inspect", "--json", images).stdout)

    assert finding(gpustasis("doctor", "--archive", images, "--json"))["status"] == "ok"
    replace(mapped, changed(old))
    found = finding(gpustasis("doctor", "--archive", images, "--json"))
    assert found["status"] == "problem"
    assert f"{mapped} has hash " in found["text"]
    assert "--ignore-requirements" in found["remedy"]

    refused = gpustasis("restore", "-D", images)
    assert refused.returncode != 0
    assert f"{mapped} has hash " in refused.stderr
    assert checkpoint.job.alive_pids() == []
    ended = gpustasis("restore", "-D", images, "--ignore-requirements")
    assert ended.returncode == 0, ended.stderr
    checkpoint.job.run_on()
    checkpoint.job.end()


def finding(ended: CompletedProcess[str]) -> dict[str, Any]:
    (found,) = [
        one for one in json.loads(ended.stdout)["findings"] if one["name"] == "mapped files"
    ]
    return dict(found)
