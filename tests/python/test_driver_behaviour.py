# SPDX-License-Identifier: Apache-2.0
"""The emulator against what a real driver did when its calls were disturbed, and with kinds of
memory.

Records lie in tests/data/driver-behaviour: of the step behaviour of gpu-check. The emulator does
the same step, as the driver version of each. It has no managed memory and no CUDA IPC, but settings
that make a program count as having them: these kinds are done one by one.
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
from gpustasis_bench.gpucheck.behaviour import steps_on
from gpustasis_bench.gpucheck.behaviour_facts import (
    NOT_EMULATED,
    PARTS_WITH_FACTS,
    differences,
    facts,
)
from gpustasis_bench.gpucheck.cuda_process import Lab

Record = dict[str, Any]
FOLDER = Path(__file__).parent.parent / "data/driver-behaviour"
RECORDS = sorted(p for p in FOLDER.glob("*.json") if not p.stem.endswith("-checkpoints"))

ACTED_OUT = {"managed": "managed_memory", "ipc importer": "cuda_ipc"}  # kinds, and their settings
# 1.6 s for a target of 16 MiB: a call still goes on when somebody is killed 0.3 s after it began.
SLOW_COPIES = {"d2h_ms_per_gib": "100000", "h2d_ms_per_gib": "100000"}
ACT_SECONDS = 6.0  # a lost importer never says how its memory is, and is waited for until then
# gpu-check, in which a call that somebody is killed in has reached the target by the time that
# counts from its beginning: on a busy machine that may take longer than the kill waits.
GPU_CHECK = """
import re, runpy, time
from pathlib import Path
from gpustasis_bench.gpucheck import behaviour_faults

def is_at_work(pid):
    for thread in Path(f"/proc/{pid}/task").iterdir():
        try:
            name, place = ((thread / file).read_text().strip() for file in ("comm", "wchan"))
        except OSError:  # one of those that copy has ended
            continue
        if re.fullmatch("cuda[0-9a-f]{11}", name):
            return place != "0" and "poll" not in place

class Begun(behaviour_faults.Call):
    def __init__(self, lab, caller, name, target):
        super().__init__(lab, caller, name, target)
        while self._thread.is_alive() and lab.left and not is_at_work(target.pid):
            time.sleep(0.01)

behaviour_faults.Call = Begun
runpy.run_module("gpustasis_bench.gpucheck", run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="session")
def emulator_behaviour(
    repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Record], Record]:
    """What the emulator does as the driver of a record does it: once for each such driver."""
    programs = tmp_path_factory.mktemp("programs")
    make = ["make", "-s", "-C", repository / "demo", f"OUT={programs}", programs / "spin.so"]
    subprocess.run(make, check=True, timeout=120)
    known: dict[tuple[str, bool], Record] = {}

    def ask(real: Record) -> Record:
        key = (real["driver"], real["persistence_mode"])
        if key not in known:
            known[key] = run_step(*key, programs, tmp_path_factory.mktemp("behaviour"))
        return known[key]

    return ask


def run_step(driver: str, persistence: bool, programs: Path, out: Path) -> Record:
    command = [sys.executable, "-c", GPU_CHECK, "--emulator", "--step", "behaviour"]
    command += ["--programs", str(programs), "--out", str(out)]
    for part in PARTS_WITH_FACTS:
        command += ["--part", part]
    emulator = Emulator(path=out / "socket")
    emulator.start(Options(driver=driver, settings=SLOW_COPIES))
    environ = emulator.environment(api_version_of(driver))
    try:
        emulator.set("persistence", str(int(persistence)))
        ended = subprocess.run(
            command,
            env=os.environ | environ,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        record: Record = json.loads((out / "behaviour.json").read_text())
        for kind, setting in ACTED_OUT.items():
            record["kinds of memory"][kind] = act_out(emulator, environ, setting)
    finally:
        emulator.stop()
    return record


def act_out(emulator: Emulator, environ: dict[str, str], setting: str) -> Record:
    """The calls on a program that the setting makes into one with that kind of memory."""
    emulator.set(setting, "1")
    with pytest.MonkeyPatch.context() as patch, Lab(emulated=True, seconds=ACT_SECONDS) as lab:
        for name, value in environ.items():
            patch.setenv(name, value)
        found = steps_on(lab, lab.target(1 / 16))
    emulator.set(setting, "0")
    return found


@pytest.fixture(scope="session")
def real() -> Record:
    record: Record = json.loads(RECORDS[0].read_text())
    return record


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_the_emulator_behaves_as_a_real_driver_did(
    path: Path, emulator_behaviour: Callable[[Record], Record]
) -> None:
    real = json.loads(path.read_text())
    assert real["driver"] and real["date"]
    assert real.keys() & PARTS_WITH_FACTS, "it has nothing that is compared"
    assert differences(real, emulator_behaviour(real)) == []


def test_the_folder_of_real_records_holds_none_of_the_emulator() -> None:
    assert RECORDS
    for path in RECORDS:
        assert json.loads(path.read_text())["backend"] != "emulator", path.name


def test_what_is_not_compared_is_not_there(
    real: Record, emulator_behaviour: Callable[[Record], Record]
) -> None:
    """A kind that the emulator learns to make is to be compared from then on."""
    kinds = emulator_behaviour(real)["kinds of memory"]
    assert {kind for kind, found in kinds.items() if "not_made" in str(found)} == {
        *(kind for kind in NOT_EMULATED if not kind.startswith("ipc")),
        "ipc",
    }


# What docs/hardware.md says was seen, as facts: a reduction that loses them compares nothing.
EXPECTED: dict[str, Any] = {
    "caller killed: Checkpoint: state at last": ["CUDA_SUCCESS", 2],
    "caller killed: Restore: state at last": ["CUDA_SUCCESS", 1],
    "caller killed: Lock: state at last": ["CUDA_SUCCESS", 0],
    "caller killed: Lock: the next GetState waits for the kernel": True,
    "caller killed: Checkpoint: memory": "intact",
    "target killed: answer": "CUDA_ERROR_OPERATING_SYSTEM",
    "target killed: GPU memory came back": True,
    "long kernel: Lock, 500 ms": "CUDA_ERROR_NOT_READY",
    "long kernel: state_after_limit": 0,
    "round trips: descriptors of the target grow after the first trip": False,
    "kinds of memory: managed: uvm_mappings": 2,
    "kinds of memory: managed: Checkpoint": [
        *("CUDA_ERROR_NOT_SUPPORTED", "then state 1", "stages nothing"),
    ],
    "kinds of memory: ipc importer: brought back": {
        "state": 2,
        "Restore": "CUDA_ERROR_OPERATING_SYSTEM",
        "Unlock": "CUDA_ERROR_ILLEGAL_STATE",
    },
}


@pytest.mark.parametrize("name", EXPECTED)
def test_what_was_seen_is_in_the_record(name: str, real: Record) -> None:
    assert facts(real)[name] == EXPECTED[name]


def lose_a_checkpoint(record: Record) -> None:
    record["caller killed"]["Checkpoint"]["states"][-1]["seen"][1] = 1


def bring_back_otherwise(record: Record) -> None:
    del record["caller killed"]["Restore"]["brought_back"]["Unlock"]


def spoil_memory(record: Record) -> None:
    record["caller killed"]["Restore"]["memory"] = "wrong at 0x7f0000000000"


def keep_a_dead_callers_lock(record: Record) -> None:
    record["caller killed"]["Lock"]["states"][-1]["seen"][1] = 1


def answer_while_the_kernel_runs(record: Record) -> None:
    record["caller killed"]["Lock"]["states"][0]["longest_seconds"] = 0.01


def answer_otherwise(record: Record) -> None:
    record["target killed"]["call"]["name"] = "CUDA_ERROR_UNKNOWN"


def keep_gpu_memory(record: Record) -> None:
    killed = record["target killed"]
    killed["gpu_bytes_after"] = killed["gpu_bytes_with_target"]


def stay_locked_after_the_limit(record: Record) -> None:
    record["long kernel"]["state_after_limit"] = 1


def lock_at_once(record: Record) -> None:
    record["long kernel"]["Lock"]["seconds"] = 0.001


def open_one_more_each_time(record: Record) -> None:
    record["round trips"]["trips"][-1]["descriptors"] += 1


def leave_a_thread_in_the_caller(record: Record) -> None:
    record["round trips"]["trips"][-1]["caller"]["threads"] += 1


def stop_half_way(record: Record) -> None:
    record["round trips"]["error"] = "TargetError: round trip 5, Lock: CUDA_ERROR_UNKNOWN"


def checkpoint_managed_memory(record: Record) -> None:
    record["kinds of memory"]["managed"]["Checkpoint"]["name"] = "CUDA_SUCCESS"


def map_uvm_once(record: Record) -> None:
    record["kinds of memory"]["managed"]["before"]["uvm_mappings"] = 1


def stage_nothing(record: Record) -> None:
    record["kinds of memory"]["pinned"]["Checkpoint"]["staged_bytes"] = 4096


def make_no_such_memory(record: Record) -> None:
    record["kinds of memory"]["registered"] = {"not_made": "the target ended with status 3"}


@pytest.mark.parametrize(
    "alter",
    [
        lose_a_checkpoint,
        bring_back_otherwise,
        spoil_memory,
        keep_a_dead_callers_lock,
        answer_while_the_kernel_runs,
        answer_otherwise,
        keep_gpu_memory,
        stay_locked_after_the_limit,
        lock_at_once,
        open_one_more_each_time,
        leave_a_thread_in_the_caller,
        stop_half_way,
        checkpoint_managed_memory,
        map_uvm_once,
        stage_nothing,
        make_no_such_memory,
    ],
)
def test_a_record_that_differs_is_told_apart(alter: Callable[[Record], None], real: Record) -> None:
    altered = copy.deepcopy(real)
    alter(altered)
    assert len(differences(altered, real)) >= 1
