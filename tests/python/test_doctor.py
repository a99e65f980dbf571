"""`gpustasis doctor` as people and scripts call it. What it looks at: test_diagnosis.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from gpustasis.criu.find import Criu
from gpustasis.emulator import Emulator

Gpustasis = Callable[..., CompletedProcess[str]]


def findings(ended: CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    return {item["name"]: item for item in json.loads(ended.stdout)["findings"]}


def test_it_names_what_it_found(gpustasis: Gpustasis, criu: Criu, emulator: Emulator) -> None:
    ended = gpustasis("doctor", "--json", "--criu", criu.root or criu.program)
    found = findings(ended)
    assert found["CRIU"]["text"].startswith(criu.version_text)
    for name in ("CRIU", "criu check", "plugin", "NVML", "GPU 0", "GPU 1", "pidfd_open"):
        assert found[name]["status"] == "ok", found[name]
    uuids = [gpu["uuid"] for gpu in emulator.status()["gpus"]]
    assert uuids[0] in found["GPU 0"]["text"]
    assert uuids[1] in found["GPU 1"]["text"]


def test_it_says_emulator_when_the_driver_is_one(gpustasis: Gpustasis, emulator: Emulator) -> None:
    driver = findings(gpustasis("doctor", "--json"))["CUDA driver"]
    assert driver["status"] == "note"
    assert "emulator: nothing here runs on a real GPU" in driver["text"]


def test_the_exit_status_follows_the_problems(gpustasis: Gpustasis, tmp_path: Path) -> None:
    ended = gpustasis("doctor", "--json")
    problems = [item for item in findings(ended).values() if item["status"] == "problem"]
    assert ended.returncode == (20 if problems else 0), problems
    assert all(item["remedy"] for item in problems)

    broken = gpustasis("doctor", "--criu", tmp_path / "no-criu")
    assert broken.returncode == 20
    assert "problem CRIU: " in broken.stdout
    assert "-> install criu >= 4.1" in broken.stdout
    assert f"{broken.stdout.count('problem ')} problem" in broken.stderr


@pytest.mark.parametrize("line", ["threads = ", 'driver = "libno-such-driver.so.1"'])
def test_it_reads_the_configuration(
    gpustasis: Gpustasis,
    emulator_environ: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    line: str,
) -> None:
    config = tmp_path / "config.toml"
    config.write_text(line + "\n")
    monkeypatch.setitem(emulator_environ, "GPUSTASIS_CONFIG", str(config))
    ended = gpustasis("doctor", "--json")
    assert ended.returncode == 20
    wrong = "configuration" if line.startswith("threads") else "CUDA driver"
    assert findings(ended)[wrong]["status"] == "problem"
