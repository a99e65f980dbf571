# SPDX-License-Identifier: Apache-2.0
"""`gpustasis doctor` as people and scripts call it. What it looks at: test_diagnosis.py."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
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


def test_it_says_which_openssl_is_linked_in(gpustasis: Gpustasis) -> None:
    found = findings(gpustasis("doctor", "--json"))["sealing"]
    assert found["status"] == "ok"
    assert re.fullmatch(r"OpenSSL 3\.\d+\.\d+ .*, linked in", found["text"])


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


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_name_that_is_no_utf_8_is_shown(
    gpustasis: Gpustasis,
    emulator_environ: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    form: str,
) -> None:
    monkeypatch.setitem(emulator_environ, "PYTHONIOENCODING", "utf-8:strict")
    name = os.fsdecode(bytes(tmp_path) + b"/\xff.tar")
    ended = gpustasis("doctor", "--archive", name, *(["--json"] if form == "json" else []))
    assert ended.returncode == 20, ended.stderr
    assert "Traceback" not in ended.stderr
    if form == "text":
        assert f"{tmp_path}/\\xff.tar" in ended.stdout
        assert "-> name another" in ended.stdout
    else:
        assert name in findings(ended)["checkpoint"]["text"]


def test_an_ordinary_user_gets_findings(tmp_path: Path) -> None:
    """The package may lie where nobody may look: it is imported before the process is nobody."""
    code = (
        "import os, sys\nfrom gpustasis import cli\n"
        "command = cli.cli.get_command(None, 'doctor')\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "sys.argv[1:] = ['doctor']\ncli.main()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 20, ended.stderr
    assert "problem capabilities: lacking CAP_SYS_PTRACE" in ended.stdout
    assert "Traceback" not in ended.stderr
