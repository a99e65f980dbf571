# SPDX-License-Identifier: Apache-2.0
"""`gpustasis plan --from`: figures of a job's own checkpoints, with real CRIU and the emulator."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from gpustasis.criu.find import Criu
from support.job import Job
from support.json_output import check_document

Gpustasis = Callable[..., CompletedProcess[str]]
Generations = Callable[..., Job]

FAILURES = ("--gpu-failures", "5", "--json")


def measured(done: CompletedProcess[str]) -> dict[str, float]:
    assert done.returncode == 0, done.stderr
    found = check_document(done.stdout, "plan")
    assert found["emulated"]
    figures: dict[str, Any] = found["figures"]
    return {key: one["value"] for key, one in figures.items() if one["source"] == "measured"}


def test_a_job_s_own_checkpoint(
    criu: Criu, gpustasis: Gpustasis, gpu_generations: Generations, tmp_path: Path
) -> None:
    job = gpu_generations()
    images = tmp_path / "images"
    program = ("--json", "--criu", str(criu.root or criu.program))
    dumped = check_document(
        gpustasis("checkpoint", str(job.pid), *program, "-D", images).stdout, "checkpoint"
    )
    job.wait()

    refused = gpustasis("plan", "--from", images, *FAILURES)
    assert refused.returncode == 2
    assert "disk.restore_s is not given" in refused.stderr

    found = measured(gpustasis("plan", "--from", images, "--restore", "9", *FAILURES))
    assert found.keys() == {"gpus", "disk.drain_s", "disk.downtime_s", "disk.size_gb"}
    assert found["gpus"] == 1
    size = sum(path.stat().st_size for path in images.iterdir() if path.is_file())
    assert found["disk.size_gb"] * 1e9 == pytest.approx(size, rel=0.02)
    statistics = json.loads((images / "gpustasis-dump.json").read_text())
    phases = [task["phases_ms"] for task in statistics["tasks"]]
    assert found["disk.drain_s"] == pytest.approx(sum(one["lock"] for one in phases) / 1000)
    written = sum(one["driver_checkpoint"] + one["write"] for one in phases) / 1000
    assert written < found["disk.downtime_s"] < dumped["seconds"]

    words = ("plan", "--from", images, "--gpus", "64", "--restore", "9", *FAILURES)
    assert measured(gpustasis(*words))["disk.size_gb"] == pytest.approx(64 * found["disk.size_gb"])

    done = check_document(gpustasis("restore", "-D", images, *program).stdout, "restore")
    found = measured(gpustasis("plan", "--from", images, "--from", images, *FAILURES))
    assert found["gpus"] == 1  # it is the same one
    assert 0 < found["disk.restore_s"] < done["seconds"]
    refilled = json.loads((images / "gpustasis-restore.json").read_text())
    assert (
        found["disk.restore_s"]
        > sum(one["phases_ms"]["refill"] for one in refilled["tasks"]) / 1000
    )

    for what in ("failed", "no times", "a number that is none", "no file"):
        spoil(images, what)
        ended = gpustasis("plan", "--from", images, *FAILURES)
        assert ended.returncode == 10, (what, ended.stderr)
        assert str(images) in ended.stderr


def spoil(images: Path, what: str) -> None:
    """Each is undone by the next one."""
    record, times = images / "gpustasis-dump.json", images / "stats-dump"
    statistics = json.loads(record.read_text())
    if what == "failed":
        record.write_text(json.dumps(statistics | {"result": "failed"}))
    elif what == "no times":
        record.write_text(json.dumps(statistics | {"result": "ok"}))
        times.rename(images / "kept")
        shutil.copy(images / "inventory.img", times)
    elif what == "a number that is none":
        (images / "kept").rename(times)
        statistics["tasks"][0]["phases_ms"]["lock"] = float("nan")
        record.write_text(json.dumps(statistics))
    else:
        statistics["tasks"][0]["phases_ms"]["lock"] = 1.0
        record.write_text(json.dumps(statistics))
        times.unlink()
