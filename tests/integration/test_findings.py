# SPDX-License-Identifier: Apache-2.0
"""What is known to end badly for a job is looked for before the driver is asked for anything."""

from __future__ import annotations

import ctypes
import json
import os
import re

import pytest

from campaigns.rig import Rig
from gpustasis.emulator import RATES_OFF, Options
from support.memory_limit import memory_limit

MIB = 1 << 20
DRIVERS = {580: "580.178.01", 595: "595.84.01"}
PTRACE_SEIZE, PTRACE_INTERRUPT, PTRACE_DETACH, WALL = 0x4206, 0x4207, 17, 0x40000000


def driver(rig: Rig, branch: int, **settings: str) -> None:
    rig.emulator.stop()
    rig.emulator.start(
        Options(
            gpus=1,
            memory_bytes=512 * MIB,
            driver=DRIVERS[branch],
            settings=settings,
            rates=RATES_OFF,
        )
    )


CASES = [
    ("managed-memory", {"managed_memory": "1"}, 0, "/dev/nvidia-uvm"),
    ("nccl", {"nccl": "1"}, 0, "pt_nccl_watchdg"),
    ("ipc", {"cuda_ipc": "200"}, 1, "more than one CUDA process"),
]
IDS = [case[0] for case in CASES]


@pytest.mark.parametrize(("name", "settings", "children", "reason"), CASES, ids=IDS)
def test_what_595_destroys_is_refused_and_the_job_runs_on(
    own_rig: Rig, name: str, settings: dict[str, str], children: int, reason: str
) -> None:
    driver(own_rig, 595, **settings)
    with own_rig.job(mib=4, children=children) as job:
        threads = job.threads()
        images = own_rig.images()
        dumped = own_rig.dump(job, images)
        assert dumped.status != 0
        assert reason in dumped.log
        assert f'name "{name}" in risk' in dumped.log
        own_rig.settle(images)
        job.run_on()
        assert job.threads() == threads


@pytest.mark.parametrize(("name", "settings", "children", "reason"), CASES, ids=IDS)
def test_with_the_risk_named_the_driver_decides(
    own_rig: Rig, name: str, settings: dict[str, str], children: int, reason: str
) -> None:
    """It fails, and the job is lost: as others measured it."""
    driver(own_rig, 595, **settings)
    with own_rig.job(mib=4, children=children) as job:
        images = own_rig.images()
        dumped = own_rig.dump(job, images, config={"risk": [name]})
        assert dumped.status != 0
        assert "Warn (gpustasis): cuda_plugin: risk taken: " in dumped.log
        statistics = json.loads((images / "gpustasis-dump.json").read_text())
        assert any(name in risk and reason in risk for risk in statistics["risks"])
        own_rig.settle(images)
        assert job.wait() != 0


@pytest.mark.parametrize("setting", ["managed_memory", "nccl"])
def test_580_harms_neither_and_is_asked(own_rig: Rig, setting: str) -> None:
    driver(own_rig, 580, **{setting: "1"})
    with own_rig.job(mib=4) as job:
        dumped = own_rig.dump(job, own_rig.images(), "--leave-running")
        assert (dumped.status == 0) == (setting == "nccl"), dumped.errors
        job.run_on()


def test_several_cuda_processes_on_595_when_they_are_known_to_be_harmless(own_rig: Rig) -> None:
    driver(own_rig, 595)
    with own_rig.job(mib=4, children=1) as job:
        images = own_rig.images()
        dumped = own_rig.dump(job, images, config={"risk": ["ipc"]})
        assert dumped.status == 0, dumped.errors
        job.wait()
        restored = own_rig.restore(images)
        assert restored.status == 0, restored.errors
        job.run_on()


def test_a_restore_thread_that_a_debugger_holds_is_refused(own_rig: Rig) -> None:
    """As a stopped job: the driver would wait for it for ever, whatever the lock's timeout."""
    libc = ctypes.CDLL(None, use_errno=True)
    with own_rig.job(mib=4) as job:
        (thread,) = [
            tid
            for tid, found in job.threads().items()
            if re.fullmatch("cuda[0-9a-f]{11}", found.name)
        ]
        assert libc.ptrace(PTRACE_SEIZE, thread, 0, 0) == 0
        assert libc.ptrace(PTRACE_INTERRUPT, thread, 0, 0) == 0
        os.waitpid(thread, WALL)
        dumped = own_rig.dump(job, own_rig.images())
        assert libc.ptrace(PTRACE_DETACH, thread, 0, 0) == 0
        assert dumped.status != 0
        assert f"is stopped by process {os.getpid()}, which traces it" in dumped.log
        assert dumped.seconds < 10
        job.run_on()


def test_a_job_whose_cgroup_has_no_room_is_refused(own_rig: Rig) -> None:
    driver(own_rig, 580)
    with own_rig.job(mib=128) as job, memory_limit(job, 150 * MIB) as cgroup:
        dumped = own_rig.dump(job, own_rig.images())
        assert dumped.status != 0
        assert f"cgroup /{cgroup.name}/ has room for" in dumped.log
        job.run_on()


def test_with_that_risk_named_the_kernel_decides(own_rig: Rig) -> None:
    """The emulator's staging is charged to the job as the driver's is."""
    driver(own_rig, 580)
    with own_rig.job(mib=128) as job, memory_limit(job, 80 * MIB):
        images = own_rig.images()
        dumped = own_rig.dump(job, images, config={"risk": ["memory"]})
        assert dumped.status != 0
        assert job.wait() == -9


def test_room_enough_is_no_finding(own_rig: Rig) -> None:
    driver(own_rig, 580)
    with own_rig.job(mib=128) as job, memory_limit(job, 400 * MIB):
        dumped = own_rig.dump(job, own_rig.images(), "--leave-running")
        assert dumped.status == 0, dumped.errors
        job.run_on()
