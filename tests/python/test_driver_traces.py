# SPDX-License-Identifier: Apache-2.0
"""The emulator against traces of real drivers: what a process holds and is answered, in each state.

Traces lie in tests/data/driver-traces. The emulator plays the driver version of each, and has
persistence mode on where the GPU had: that is a setting of the machine, and the driver then
restores for callers without cuInit.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpustasis.emulator import Emulator, Options, api_version_of
from gpustasis_bench.gpucheck.facts import differences, facts

Trace = dict[str, Any]
TRACES = sorted((Path(__file__).parent.parent / "data/driver-traces").glob("*.json"))


@pytest.fixture(scope="session")
def take_emulator_trace(
    repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Trace]:
    """take(driver, persistence): a new trace of the emulator as that driver version, in seconds."""
    programs = tmp_path_factory.mktemp("programs")
    make = ["make", "-s", "-C", repository / "demo", f"OUT={programs}"]
    subprocess.run(make, check=True, timeout=120)

    def take(driver: str = "580.95.05", *, persistence: bool = False) -> Trace:
        out = tmp_path_factory.mktemp("trace")
        command = [
            sys.executable,
            "-m",
            "gpustasis_bench.gpucheck",
            "--emulator",
            "--step",
            "trace",
        ]
        command += ["--programs", str(programs), "--out", str(out)]
        emulator = Emulator(path=out / "socket")
        emulator.start(Options(driver=driver))
        try:
            emulator.set("persistence", str(int(persistence)))
            environ = os.environ | emulator.environment(api_version_of(driver))
            ended = subprocess.run(
                command, env=environ, capture_output=True, text=True, timeout=200, check=False
            )
        finally:
            emulator.stop()
        assert ended.returncode == 0, ended.stdout + ended.stderr
        trace: Trace = json.loads((out / "trace.json").read_text())
        return trace

    return take


@pytest.fixture(scope="session")
def emulator_trace(take_emulator_trace: Callable[..., Trace]) -> Trace:
    return take_emulator_trace()


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_the_emulator_does_as_a_real_driver_did(
    path: Path, take_emulator_trace: Callable[..., Trace]
) -> None:
    real = json.loads(path.read_text())
    assert real["emulator"] is False, "only traces that were taken on a GPU belong here"
    assert real["complete"] and real["driver"] and real["gpu"] and real["date"]
    emulated = take_emulator_trace(real["driver"], persistence=real["persistence_mode"])
    assert real["schema"] == emulated["schema"]
    assert differences(real, emulated) == []


def test_the_folder_of_real_traces_holds_none_of_the_emulator() -> None:
    assert TRACES
    for path in TRACES:
        assert json.loads(path.read_text())["backend"] != "emulator", path.name


@pytest.mark.timeout(240)
def test_two_traces_of_the_emulator_share_all_facts(
    emulator_trace: Trace, take_emulator_trace: Callable[..., Trace]
) -> None:
    assert differences(emulator_trace, take_emulator_trace()) == []


def test_a_trace_says_where_it_was_taken(emulator_trace: Trace) -> None:
    assert emulator_trace["backend"] == "emulator"
    assert emulator_trace["emulator"] is True
    for key in ("complete", "schema", "date", "kernel", "gpu", "driver", "driver_api"):
        assert emulator_trace[key]
    assert emulator_trace["persistence_mode"] is False


# What the public descriptions of the driver say, as facts: the emulator must show them.
EXPECTED: dict[str, Any] = {
    "the restore thread is named cuda and 11 digits": True,
    "its name holds a pipe's write end and a pipe's read end": True,
    "it waits in poll": True,
    "staging: kinds of memory": ["rw-p anonymous"],
    "staging holds all GPU memory": True,
    "states reported": [1, 2, 1, 0],
    "process without CUDA: GetState": ["CUDA_ERROR_NOT_INITIALIZED"],
    "wrong call while running: Checkpoint": ["CUDA_ERROR_ILLEGAL_STATE", "then state 0"],
    "target in a ptrace stop: GetRestoreThreadId": ["CUDA_SUCCESS"],
    "target in a ptrace stop: GetState": ["no answer"],
}


@pytest.mark.parametrize("name", EXPECTED)
def test_what_is_publicly_known_is_in_the_trace(name: str, emulator_trace: Trace) -> None:
    assert facts(emulator_trace)[name] == EXPECTED[name]


def rename_restore_thread(trace: Trace) -> None:
    for stage in trace["stages"].values():
        for thread in stage["threads"]:
            if thread["tid"] == trace["restore_thread"]:
                thread["comm"] = "cuda-restore"


def keep_devices_open(trace: Trace) -> None:
    devices = [d for d in trace["stages"]["locked"]["descriptors"] if d["kind"] == "device"]
    trace["stages"]["checkpointed"]["descriptors"] += devices


def stage_in_shared_memory(trace: Trace) -> None:
    for mapping in trace["stages"]["checkpointed"]["mappings"]:
        if mapping["perms"] == "rw-p" and not mapping["path"]:
            mapping["perms"] = "rw-s"


def answer_otherwise(trace: Trace) -> None:
    trace["mistakes"]["dead pid"]["GetState"]["name"] = "CUDA_ERROR_UNKNOWN"


def leave_a_thread(trace: Trace) -> None:
    thread = {"tid": 1, "comm": "cuda-helper", "state": "S", "wchan": "0"}
    trace["stages"]["checkpointed_later"]["threads"].append(thread)


def close_on_exec(trace: Trace) -> None:
    for descriptor in trace["caller"]["stages"]["initialized"]["descriptors"]:
        descriptor["cloexec"] = not descriptor["cloexec"]


@pytest.mark.parametrize(
    "alter",
    [
        rename_restore_thread,
        keep_devices_open,
        stage_in_shared_memory,
        answer_otherwise,
        leave_a_thread,
        close_on_exec,
    ],
)
def test_a_trace_that_differs_is_told_apart(
    alter: Callable[[Trace], None], emulator_trace: Trace
) -> None:
    altered = copy.deepcopy(emulator_trace)
    alter(altered)
    assert differences(altered, emulator_trace)
