# SPDX-License-Identifier: Apache-2.0
"""The demo's training program on the emulator: it learns, it repeats to the bit, it says what
fails."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SMALL = ("--data-mib", "1", "--pool-mib", "3", "--hidden", "32", "--report-every", "1000")
Train = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def programs(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("programs")
    make = ["make", "-s", "-C", repository / "demo", f"OUT={folder}"]
    subprocess.run(make, check=True, timeout=120)
    return folder


@pytest.fixture
def train(programs: Path, emulator_environ: dict[str, str]) -> Train:
    """train(*options): run the program to its end on an emulated GPU."""

    def run(*options: str | Path) -> subprocess.CompletedProcess[str]:
        command = [programs / "train", "--module", programs / "train_kernels.so", *SMALL, *options]
        return subprocess.run(
            command,
            env=emulator_environ,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run


def result_of(train: Train, path: Path, *options: str) -> dict[str, Any]:
    ended = train("--result", path, *options)
    assert ended.returncode == 0, ended.stderr
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def test_two_runs_are_the_same_to_the_bit(train: Train, tmp_path: Path) -> None:
    one = result_of(train, tmp_path / "one.json", "--steps", "40")
    other = result_of(train, tmp_path / "other.json", "--steps", "40")
    del one["step_seconds"], other["step_seconds"]
    assert one == other
    assert one["data_intact"] is True
    assert one["pool_zero"] is True
    assert len(one["losses"]) == 40


def test_another_seed_gives_other_weights(train: Train, tmp_path: Path) -> None:
    one = result_of(train, tmp_path / "one.json", "--steps", "2")
    other = result_of(train, tmp_path / "other.json", "--steps", "2", "--seed", "2")
    assert one["weights_sha256"] != other["weights_sha256"]


def test_the_network_learns(train: Train, tmp_path: Path) -> None:
    result = result_of(train, tmp_path / "result.json", "--steps", "400")
    losses = [float.fromhex(loss) for loss in result["losses"]]
    assert sum(losses[-20:]) < 0.8 * sum(losses[:20])


def test_the_mark_is_written_and_training_goes_on(train: Train, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    result = result_of(
        train, tmp_path / "r.json", *("--steps", "3", "--mark-step", "2", "--mark-file", str(mark))
    )
    assert mark.read_text() == "2\n"
    assert len(result["losses"]) == 3


@pytest.mark.parametrize(
    ("options", "status", "says"),
    [
        (("--steps", "0"), 2, "--steps takes a number from 1"),
        (("--mark-step", "1"), 2, "go together"),
        (("--module", "/nowhere.so"), 4, "cuModuleLoad: CUDA_ERROR_FILE_NOT_FOUND"),
        (("--result", "/nowhere/r.json", "--steps", "1"), 6, "cannot write /nowhere/r.json"),
    ],
)
def test_what_fails_is_said(train: Train, options: tuple[str, ...], status: int, says: str) -> None:
    ended = train(*options)
    assert ended.returncode == status
    assert says in ended.stderr


def test_the_ptx_in_the_tree_is_of_these_kernels(repository: Path) -> None:
    """`make -C demo ptx` makes it anew; that takes nvcc, this does not."""
    source = (repository / "demo/train_kernels.cu").read_bytes()
    ptx = (repository / "demo/train_kernels.ptx").read_text()
    assert hashlib.sha256(source).hexdigest() in ptx.splitlines()[0]
    kernels = set(re.findall(rb"^GPUSTASIS_KERNEL\((\w+),", source, re.MULTILINE))
    assert kernels == {name.encode() for name in re.findall(r"\.entry (\w+)", ptx)}
    assert ".target sm_75" in ptx
    assert ".version 7.0" in ptx, "a driver of CUDA 12.8 refuses newer ones"
    assert ".file" not in ptx, "no path of the machine that made it"
