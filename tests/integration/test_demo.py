# SPDX-License-Identifier: Apache-2.0
"""The demo, whole, with every CRIU found here; and that it would tell if a bit came out wrong."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from rich.console import Console

from gpustasis.criu.find import Criu
from gpustasis_bench.demo.flow import Demo, prepare_work
from gpustasis_bench.demo.report import Report
from gpustasis_bench.demo.training import Result, c_program
from gpustasis_bench.errors import DemoError
from support.criu_roots import criu_place, preferred_criu

STEPS = "120"


@pytest.fixture(scope="module")
def programs(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("programs")
    make = ["make", "-s", "-C", repository / "demo", f"OUT={folder}"]
    subprocess.run(make, check=True, timeout=120)
    return folder


def run_demo(
    programs: Path, criu: Criu, out: Path, environ: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "gpustasis_bench.demo",
        "--backend",
        "emulator",
        "--steps",
        STEPS,
    ]
    command += ["--program", str(programs), "--criu", criu_place(criu)]
    command += ["--work", str(out / "work"), "--out", str(out / "demo.json")]
    return subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=200, check=False
    )


@pytest.mark.one_criu
@pytest.mark.timeout(240)
def test_the_demo_comes_back_to_the_bit_and_says_so(
    programs: Path, criu: Criu, tmp_path: Path
) -> None:
    ended = run_demo(programs, criu, tmp_path, dict(os.environ))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = json.loads((tmp_path / "demo.json").read_text())
    assert list(report) == [field.name for field in fields(Report)]
    assert report["backend"] == "emulator"
    assert report["criu"] == criu.version_text
    assert report["restored_bit_exact"] is True
    assert report["stored_bytes"] < report["gpu_bytes"] < report["stock_bytes"]
    stored_as = report["zero_bytes"] + report["lz4_bytes"] + report["raw_bytes"]
    assert stored_as == report["gpu_bytes"]
    assert "EMULATOR" in ended.stdout


@pytest.mark.timeout(240)
def test_a_demo_that_cannot_dump_fails_with_a_sentence(programs: Path, tmp_path: Path) -> None:
    environ = dict(os.environ) | {"GPUSTASIS_PLUGIN_DIR": str(tmp_path)}
    ended = run_demo(programs, preferred_criu(), tmp_path, environ)
    assert ended.returncode != 0
    assert "demo: " in ended.stderr
    assert "cuda_plugin.so is missing" in ended.stderr
    assert not (tmp_path / "demo.json").exists()


def small_demo(programs: Path, work: Path) -> Demo:
    prepare_work(work)
    program = c_program(programs, "train_kernels.so", data_mib=2, pool_mib=2, hidden=256)
    return Demo(program, preferred_criu(), work, Console(quiet=True))


@pytest.fixture
def on_emulator(emulator_environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in emulator_environ.items():
        monkeypatch.setenv(key, value)


@pytest.mark.usefixtures("on_emulator")
def test_one_wrong_bit_of_one_loss_is_told(programs: Path, tmp_path: Path) -> None:
    demo = small_demo(programs, tmp_path / "work")
    # Two thirds of the steps are left when criu is started: on a busy machine few are done by then.
    reference = demo.reference(450)
    raw = copy.deepcopy(reference.raw)
    mantissa, exponent = raw["losses"][300].split("p")
    raw["losses"][300] = f"{mantissa}1p{exponent}"
    assert demo.trip("altered", Result(raw=raw), {}).exact is False
    assert demo.trip("true", reference, {}).exact is True


@pytest.mark.usefixtures("on_emulator")
def test_a_program_that_ends_too_early_is_told(programs: Path, tmp_path: Path) -> None:
    demo = small_demo(programs, tmp_path / "work")
    reference = demo.reference(1)
    with pytest.raises(DemoError, match="ended early"):
        demo.trip("too short", reference, {})
