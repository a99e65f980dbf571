# SPDX-License-Identifier: Apache-2.0
"""gpu_memory = "direct" when something fails while the worker has the only copy of GPU memory."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from campaigns.rig import Programs, Rig, log_path, workers
from campaigns.steady_job import SteadyJob
from gpustasis._core import image_name
from gpustasis.criu.find import Criu
from gpustasis.criu.images import INVENTORY_NAME
from gpustasis.driver import ProcessState
from support.broken_dumps import break_off, hold_dump, recover
from support.direct_memory import (
    DIRECT,
    MIB,
    await_state,
    handed_over,
    lying_disk,
    slow_copies,
    slow_down,
    tasks,
    worker_of,
)
from support.driver_states import driver_of

TIMEOUT_S = 40.0
NEVER_DONE = 0.001  # GB/s: 64 MiB take 67 s, and whoever copies them dies before
RECORDS = Path("/run/gpustasis")


@pytest.fixture
def slow_rig(newest_criu: Criu, programs: Programs, tmp_path: Path) -> Iterator[Rig]:
    with slow_copies(newest_criu, programs, tmp_path) as rig:
        # It waits in the driver's gate before criu freezes it: a job that has made the last call of
        # a step, and not said so yet, would say it when it is let go.
        rig.emulator.set("lock_drain_ms", "200")
        yield rig


def errors(images: Path) -> str:
    return log_path(images, "dump").read_text(errors="replace")


def begun_in(images: Path) -> Path:
    """The record of a process that is being checkpointed into them. Tests that run beside this one
    may remove theirs meanwhile."""
    found = []
    for path in (RECORDS / "checkpointed").iterdir():
        with suppress(FileNotFoundError):
            if path.read_text().endswith(f"\n{images}"):
                found.append(path)
    (begun,) = found
    return begun


def test_criu_dies_and_the_worker_stores_all_and_brings_the_job_back(slow_rig: Rig) -> None:
    rig = slow_rig
    slow_down(rig, "d2h")
    with rig.job(mib=64) as job:
        with handed_over(rig, job) as (criu, images, _):
            criu.kill()
            criu.wait()
        rig.settle(images)
        job.run_on()
        assert "runs on" in (images / "gpustasis-undo.log").read_text()


def test_criu_dies_while_memory_is_on_its_way_back(slow_rig: Rig) -> None:
    rig = slow_rig
    slow_down(rig, "h2d")
    with rig.job(mib=64) as job:
        images = rig.images()
        criu = rig.start(rig.dump_words(job, images, ["--leave-running"]))
        await_state(rig, job.pid, ProcessState.RESTORING)
        criu.kill()
        criu.wait()
        rig.settle(images)
        job.run_on()


def test_the_worker_dies_and_what_it_held_is_lost_and_never_run_with(slow_rig: Rig) -> None:
    """The emulator's contract, which no documentation gives: the mapping goes with the caller."""
    rig = slow_rig
    slow_down(rig, "d2h", NEVER_DONE)
    with rig.job(mib=64) as job:
        with handed_over(rig, job) as (criu, images, worker):
            steps = job.steps()
            os.kill(worker, signal.SIGKILL)
            assert criu.wait(TIMEOUT_S) != 0
        assert "is lost" in errors(images)
        rig.settle(images)
        time.sleep(0.5)
        assert job.steps() == steps
        assert driver_of(rig.environ).get_state(job.pid) is ProcessState.CHECKPOINTED
        refused = subprocess.run(
            [sys.executable, "-m", "gpustasis", "recover", str(job.pid)],
            env=dict(rig.environ),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert refused.returncode != 0
        assert "the memory is lost: end the process" in " ".join(refused.stderr.split())


def test_both_die_when_the_image_is_complete_and_recover_hands_it_back(slow_rig: Rig) -> None:
    rig = slow_rig
    with rig.job(mib=64) as job:
        images = rig.images()
        break_off(rig, job, images)
        assert driver_of(rig.environ).get_state(job.pid) is ProcessState.CHECKPOINTED
        recover(rig, job.pid, "-D", images)
        job.run_on()


def call_driver(rig: Rig, call: str) -> None:
    """driver.CALL, in a process of its own."""
    code = f"from gpustasis.driver import Driver; driver = Driver(); driver.init(); driver.{call}"
    subprocess.run([sys.executable, "-c", code], env=dict(rig.environ), check=True, timeout=30)


def test_nobody_runs_a_process_whose_memory_was_being_put_back(slow_rig: Rig) -> None:
    """Whatever a driver makes of a process when the one that fills it dies: the emulator says
    FAILED, and another may say LOCKED. The record is put there as such a death would leave it."""
    rig = slow_rig
    with rig.job(mib=16) as job:
        images = rig.images()
        break_off(rig, job, images)
        begun = begun_in(images)
        record = begun.read_bytes()
        filling = RECORDS / "filling" / begun.name
        recover(rig, job.pid, "-D", images)  # which makes one of its own, and removes it
        assert filling.parent.is_dir()
        assert not filling.exists()
        job.run_on()
        call_driver(rig, f"lock({job.pid}, 5000)")
        filling.write_bytes(record)
        filling.chmod(0o600)
        refused = subprocess.run(
            [sys.executable, "-m", "gpustasis", "recover", str(job.pid), "-D", str(images)],
            env=dict(rig.environ),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert refused.returncode == 3
        assert "before all of it was there: its GPU memory is wrong" in " ".join(
            refused.stderr.split()
        )
        dumped = rig.dump(job, rig.images(), config=DIRECT)
        assert dumped.status != 0
        assert "is missing" in dumped.log
        filling.unlink()
        call_driver(rig, f"unlock({job.pid})")
        job.run_on()


def test_a_process_whose_memory_was_all_put_back_is_whole(slow_rig: Rig) -> None:
    """The one that fills it dies when all is there, or cannot remove the record."""
    rig = slow_rig
    with rig.job(mib=16) as job:
        images = rig.images()
        break_off(rig, job, images)
        begun = begun_in(images)
        lines = begun.read_text().split("\n")
        lines[2] = lines[2].removesuffix("0") + "1"
        recover(rig, job.pid, "-D", images)
        call_driver(rig, f"lock({job.pid}, 5000)")
        filling = RECORDS / "filling" / begun.name
        filling.write_text("\n".join(lines))
        filling.chmod(0o600)
        recover(rig, job.pid, "-D", images)
        job.run_on()
        again = rig.images()
        dumped = rig.dump(job, again, "--leave-running", config=DIRECT)
        assert dumped.status == 0, dumped.errors
        assert not filling.exists()
        job.run_on()


@pytest.mark.parametrize("after_s", [0, 0.25])
def test_the_worker_dies_when_the_image_is_complete_and_criu_brings_the_job_back(
    slow_rig: Rig, after_s: float
) -> None:
    """0: most likely before the worker could say that the image is complete; later, in the call
    that gives the memory up."""
    rig = slow_rig
    rig.emulator.add_fault("complete", "delay", delay_ms=5000)
    with rig.job(mib=16) as job:
        # Not by the state: 16 MiB are copied at once, and who asks meanwhile waits for `complete`.
        images = rig.images()
        criu, found = rig.start(rig.dump_words(job, images)), list[int]()
        while not (found and (images / image_name(job.pid)).exists()):
            assert criu.poll() is None, errors(images)
            found = found or workers(images)
            time.sleep(0.001)
        time.sleep(after_s)
        os.kill(found[0], signal.SIGKILL)
        assert criu.wait(TIMEOUT_S) != 0
        assert f"brought back pid {job.pid}" in errors(images)
        rig.settle(images)
        job.run_on()


def test_the_worker_dies_while_memory_is_on_its_way_back(slow_rig: Rig) -> None:
    """The checkpoint is whole: the job comes back out of it."""
    rig = slow_rig
    slow_down(rig, "h2d", NEVER_DONE)
    with rig.job(mib=64) as job:
        images = rig.images()
        criu = rig.start(rig.dump_words(job, images, ["--leave-running"]))
        await_state(rig, job.pid, ProcessState.RESTORING)
        os.kill(worker_of(images), signal.SIGKILL)
        steps = job.steps()
        assert criu.wait(TIMEOUT_S) == 0  # it has dumped all before
        assert "the driver has given the process up (state FAILED)" in errors(images)
        assert driver_of(rig.environ).get_state(job.pid) is ProcessState.FAILED
        rig.settle(images)
        time.sleep(0.5)
        assert job.steps() == steps
        job.end()
        slow_down(rig, "h2d", 1.0)
        done = rig.restore(images)
        assert done.status == 0, done.errors
        job.run_on()


@pytest.mark.parametrize(("io", "fails"), [("auto", "write"), ("buffered", "(write|sync .*)")])
def test_storage_fails_midway_and_the_memory_is_kept_in_memory(
    slow_rig: Rig, io: str, fails: str
) -> None:
    """What goes through the page cache may fail only when it is synced: the GPU still has it."""
    rig = slow_rig
    with (
        rig.job(mib=64) as job,
        lying_disk(rig.scratch / "disk", rig.scratch / "backing", 256 * MIB, 24 * MIB) as disk,
    ):
        images = disk / "images"
        images.mkdir(mode=0o700)
        dumped = rig.dump(
            job, images, "--leave-running", config=DIRECT | {"compress": "none", "io": io}
        )
        assert dumped.status != 0
        assert re.search(rf"\.img: {fails}: No space left on device", dumped.log), dumped.errors
        assert "stays on the GPU" not in dumped.log
        rig.settle(images)
        job.run_on()


def test_storage_and_memory_fail_and_it_stays_on_the_gpu_until_one_works(slow_rig: Rig) -> None:
    rig = slow_rig
    slow_down(rig, "d2h", 0.02)
    with rig.job(mib=64) as job:
        with handed_over(rig, job) as (criu, images, worker):
            steps = job.steps()
            # No file grows any more, nor does one in memory.
            before = resource.prlimit(worker, resource.RLIMIT_FSIZE, (MIB, resource.RLIM_INFINITY))
            assert criu.wait(TIMEOUT_S) != 0
        assert "stays on the GPU" in errors(images)
        assert driver_of(rig.environ).get_state(job.pid) is ProcessState.CHECKPOINTING
        assert job.steps() == steps
        slow_down(rig, "d2h", 1.0)
        resource.prlimit(worker, resource.RLIMIT_FSIZE, before)
        rig.settle(images)
        job.run_on()


def test_the_driver_refuses_and_the_job_runs_on(slow_rig: Rig) -> None:
    rig = slow_rig
    for operation, action in (("checkpoint", "error"), ("checkpoint", "oom")):
        with rig.job(mib=16) as job:
            rig.emulator.add_fault(operation, action)
            images = rig.images()
            dumped = rig.dump(job, images)
            assert rig.emulator.status()["faults"] == []  # it was met
            assert dumped.status != 0, dumped.log
            rig.settle(images)
            job.run_on()


@pytest.mark.parametrize("operation", ["checkpoint", "restore"])
def test_a_driver_that_hangs_in_a_call_does_not_hold_criu(slow_rig: Rig, operation: str) -> None:
    """Nothing is held by the worker yet, or the image has it: the call has its deadline."""
    rig = slow_rig
    with rig.job(mib=16) as job:
        rig.emulator.add_fault(operation, "hang")
        images = rig.images()
        begin = time.monotonic()
        config = DIRECT | {"driver_timeout_ms": 5000}
        dumped = rig.dump(job, images, "--leave-running", config=config)
        assert time.monotonic() - begin < 30
        assert "no answer from the driver within 5000 ms" in dumped.log
        assert rig.emulator.status()["faults"] == []  # it was met
        steps = job.steps()
        time.sleep(0.5)
        assert job.steps() == steps
        job.end()
        rig.settle(images)
        if operation == "checkpoint":
            assert dumped.status != 0
            assert not (images / INVENTORY_NAME).exists()
            return
        assert dumped.status == 0  # all was dumped before
        restored = rig.restore(images)
        assert restored.status == 0, restored.errors
        job.run_on()


def test_one_task_of_several_fails_and_all_run_on(slow_rig: Rig) -> None:
    rig = slow_rig
    with rig.job(mib=16, children=3) as job:
        rig.emulator.add_fault("checkpoint", "error")
        images = rig.images()
        dumped = rig.dump(job, images)
        assert rig.emulator.status()["faults"] == []  # it was met
        assert dumped.status != 0, dumped.log
        rig.settle(images)
        job.run_on()


def test_a_dump_that_takes_longer_than_a_call_may_is_not_ended_as_long_as_memory_moves(
    slow_rig: Rig,
) -> None:
    """driver_timeout_ms is 5 s: no call stands still so long on a machine that does other work."""
    rig = slow_rig
    config = DIRECT | {"driver_timeout_ms": 5000}
    with rig.job(mib=64) as job:
        slow_down(rig, "d2h", 0.01)
        images = rig.images()
        dumped = rig.dump(job, images, "--leave-running", config=config)
        assert dumped.status == 0, dumped.errors
        (task,) = tasks(images)
        assert task["phases_ms"]["write"] > 6000  # what is copied meanwhile is written at once
        assert "no answer from the driver" not in dumped.log
        rig.settle(images)
        job.run_on()


def test_host_memory_stays_below_a_ring_for_each_gpu(slow_rig: Rig) -> None:
    rig = slow_rig
    rig.emulator.set("direct_d2h_ms_per_gib", "0")
    rig.emulator.set("direct_h2d_ms_per_gib", "0")
    with rig.job(mib=192) as job:
        images, before = rig.images(), resident(job.pid)
        with looking_at(job, images) as seen:
            held = hold_dump(rig, job, images, "--leave-running")
            used = resident(worker_of(images), "VmHWM")  # who looks at times may see no ring
            assert held.go_on() == 0, errors(images)
        # A ring of 64 MiB, for one of the two GPUs that it can see.
        assert 64 * MIB < max(used, seen["worker"]) < 128 * MIB
        assert 0 < seen["job"] < before + 32 * MIB
        job.run_on()
        assert json.loads((images / "gpustasis-dump.json").read_text())["result"] == "ok"


@contextmanager
def looking_at(job: SteadyJob, images: Path) -> Iterator[dict[str, int]]:
    """The most that was resident of the job and of a worker meanwhile."""
    seen = {"job": 0, "worker": 0}
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.002):
            seen["job"] = max(seen["job"], resident(job.pid))
            for pid in workers(images):
                seen["worker"] = max(seen["worker"], resident(pid, "VmHWM"))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()


def resident(pid: int, field: str = "VmRSS") -> int:
    """Bytes; 0: it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(field)), 0)
