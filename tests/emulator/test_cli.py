# SPDX-License-Identifier: Apache-2.0
"""`gpustasis emulator`: start, status, run, env, faults, settings, stop."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpustasis.emulator import RUN_DIRECTORY

PROGRAMS = Path(__file__).resolve().parent / "programs"
UUID = "GPU-00112233-4455-6677-8899-aabbccddeeff"
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    environ = dict(os.environ) | {"GPUSTASIS_EMULATOR": str(tmp_path / "folder" / "socket")}

    def call(*words: str | Path) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "gpustasis", "emulator", *map(str, words)]
        return subprocess.run(
            argv, env=environ, capture_output=True, text=True, check=False, timeout=60
        )

    yield call
    call("stop")


def test_run_starts_an_emulator_that_stays(
    command: Command, compile_cuda: Callable[..., Path]
) -> None:
    program = compile_cuda(PROGRAMS / "plain_vectors.c")
    ended = command("run", "--gpus", "3", "--memory", "64M", "--", program, "1", "2", "1")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.endswith("done\n")
    assert "3 emulated GPUs, no real GPU is used" in ended.stderr
    status = json.loads(command("status", "--json").stdout)
    assert status["backend"] == "emulator"
    assert [gpu["memory_bytes"] for gpu in status["gpus"]] == [64 << 20] * 3
    assert command("stop").returncode == 0
    stopped = command("status")
    assert stopped.returncode == 15
    assert "start one with `gpustasis emulator start`" in stopped.stderr


def test_its_directory_is_root_s_whatever_the_umask(tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "GPUSTASIS_EMULATOR"}
    instance = f"test-{os.getpid()}"
    argv = [sys.executable, "-m", "gpustasis", "emulator", "--instance", instance]

    def call(word: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*argv, word], env=environ, capture_output=True, text=True, check=False, umask=0
        )

    place = RUN_DIRECTORY / instance
    try:
        started = call("start")
        assert started.returncode == 0, started.stderr
        assert place.stat().st_mode & 0o7777 == 0o755
        assert call("stop").returncode == 0
        place.chmod(0o777)
        refused = call("start")
        assert refused.returncode == 15
        assert f"cannot use {place}: belongs to user 0 with mode 0777" in refused.stderr
    finally:
        call("stop")
        shutil.rmtree(place, ignore_errors=True)


def test_exit_status_of_the_program_is_that_of_run(command: Command) -> None:
    assert command("run", "--", "sh", "-c", "exit 7").returncode == 7
    missing = command("run", "--", "/nonexistent/program")
    assert missing.returncode == 15
    assert "cannot run /nonexistent/program: No such file or directory" in missing.stderr


def test_options_of_a_running_emulator_are_held_against_it(command: Command) -> None:
    options = ["--uuid", UUID, "--driver", "570.86.10", "--name", "emulated chip X"]
    assert command("start", *options).returncode == 0
    assert command("start", *options).returncode == 0
    assert command("run", "--", "true").returncode == 0
    refused = command("run", "--gpus", "2", "--memory", "1G", "--driver", "580.95.05", "--", "true")
    assert refused.returncode == 15
    assert "runs with other options: it has 1 GPUs, not 2; its GPUs have" in refused.stderr
    assert "its driver is 570.86.10, not 580.95.05" in refused.stderr
    status = json.loads(command("status", "--json").stdout)
    assert status["gpus"][0]["uuid"] == UUID
    assert status["gpus"][0]["name"] == "emulated chip X"
    assert status["api_version"] == 12080


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--driver", "550.54"], "driver 550.54 is not emulated"),
        (["--uuid", "GPU-12"], "not a GPU UUID"),
        (["--set", "nothing=1"], "no such setting: nothing"),
        (["--set", "init_ms=many"], "must be a number"),
    ],
)
def test_bad_options_say_what_is_wrong(command: Command, options: list[str], says: str) -> None:
    ended = command("start", *options)
    assert ended.returncode == 15
    assert says in ended.stderr
    assert command("status").returncode == 15


def test_settings_and_faults(command: Command) -> None:
    command("start")
    assert command("set", "h2d_ms_per_gib", "230").returncode == 0
    assert "h2d_ms_per_gib = 230" in command("status").stdout
    assert command("set", "nothing", "1").returncode == 15
    added = command("fault", "add", "restore", "error", "--code", "304", "--count", "3")
    assert added.stdout == "emulator fault 1 added\n"
    listed = command("fault", "list").stdout
    assert listed == "1: restore error, code 304, 3 times, after 0 ms, any process\n"
    assert command("fault", "clear").returncode == 0
    assert command("fault", "list").stdout == ""
    assert command("fault", "add", "complete", "error").returncode == 0
    assert command("fault", "list").stdout.startswith("2: complete error,")


@pytest.mark.parametrize(
    ("words", "down", "back"),
    [((), 537, 153), (("--rates", "0"), 0, 0), (("--rates", "4,8.5"), 268, 126)],
)
def test_rates_are_as_measured_unless_others_are_asked_for(
    command: Command, words: tuple[str, ...], down: int, back: int
) -> None:
    assert command("start", *words).returncode == 0
    settings = json.loads(command("status", "--json").stdout)["settings"]
    assert (settings["d2h_ms_per_gib"], settings["h2d_ms_per_gib"]) == (down, back)
    other = command("start", "--rates", "1,1")
    assert other.returncode == 15
    assert f"its d2h_ms_per_gib is {down}, not 1074" in other.stderr


@pytest.mark.parametrize(
    ("words", "down", "back"),
    [
        ((), 121, 99),
        (("--rates", "2,7"), 121, 99),
        (("--rates", "0"), 0, 0),
        (("--direct-rates", "12,25"), 89, 43),
        (("--rates", "0", "--direct-rates", "12,25"), 89, 43),
    ],
)
def test_rates_of_custom_storage_are_their_own(
    command: Command, words: tuple[str, ...], down: int, back: int
) -> None:
    assert command("start", *words).returncode == 0
    settings = json.loads(command("status", "--json").stdout)["settings"]
    assert (settings["direct_d2h_ms_per_gib"], settings["direct_h2d_ms_per_gib"]) == (down, back)
    other = command("start", "--direct-rates", "1,1")
    assert other.returncode == 15
    assert f"its direct_h2d_ms_per_gib is {back}, not 1074" in other.stderr


@pytest.mark.parametrize("rates", ["fast", "1,2,3", "-1", "1,nan"])
def test_what_is_no_rate_is_refused(command: Command, rates: str) -> None:
    ended = command("start", f"--rates={rates}")
    assert ended.returncode == 2
    assert rates in ended.stderr


def test_env_is_for_a_shell(command: Command, compile_cuda: Callable[..., Path]) -> None:
    command("start")
    program = compile_cuda(PROGRAMS / "plain_vectors.c")
    script = f"{command('env').stdout}\nexec {program} 1 1 1"
    environ = {key: value for key, value in os.environ.items() if "GPUSTASIS" not in key}
    ended = subprocess.run(["sh", "-c", script], env=environ, capture_output=True, check=False)
    assert ended.returncode == 0


def test_socket_of_a_killed_emulator_is_taken_over(command: Command) -> None:
    command("start")
    pid = json.loads(command("status", "--json").stdout)["pid"]
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)  # until then it may be found; it is ours, as a subreaper (tests/conftest.py)
    assert command("start").returncode == 0
    assert command("status").returncode == 0


def test_starting_many_at_once_makes_one(command: Command, tmp_path: Path) -> None:
    environ = dict(os.environ) | {"GPUSTASIS_EMULATOR": str(tmp_path / "folder" / "socket")}
    argv = [sys.executable, "-m", "gpustasis", "emulator", "start"]
    starters = [subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE) for _ in range(4)]
    said = [starter.communicate(timeout=60)[0].decode() for starter in starters]
    assert sum("emulator started at" in one for one in said) == 1
    assert sum("was already running" in one for one in said) == 3
