# SPDX-License-Identifier: Apache-2.0
"""The driver API beside checkpoints: memory, streams, events, modules and launches."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpustasis.emulator import Emulator, api_version_of
from support.faults import await_hit
from support.job import Job, ended

Call = Callable[..., tuple[int, int]]
PROGRAMS = Path(__file__).resolve().parent / "programs"


def test_the_api_is_as_documented(
    launch: Callable[..., Job],
    compile_cuda: Callable[..., Path],
    kernels: Path,
    lone: Callable[..., Emulator],
    emulator_environ: dict[str, str],
) -> None:
    one = lone(gpus=1, memory_bytes=256 << 20)
    environ = emulator_environ | {"GPUSTASIS_EMULATOR": str(one.path)}
    job = launch([compile_cuda(PROGRAMS / "api_exercise.c"), kernels], environ)
    assert job.wait() == 0, job.output()
    assert job.output().endswith("done\n")


def test_kernels_go_on_after_checkpoints(
    launch_cuda: Callable[..., Job], compile_cuda: Callable[..., Path], kernels: Path, caller: Call
) -> None:
    job = launch_cuda([compile_cuda(PROGRAMS / "kernel_rounds.c"), kernels])
    for cycle in range(1, 6):
        job.wait_for("ok", count=2 * cycle)
        assert caller("lock", job.pid)[0] == 0
        assert caller("checkpoint", job.pid)[0] == 0
        assert caller("restore", job.pid, "init")[0] == 0
        assert caller("unlock", job.pid)[0] == 0
    rounds = job.output().count("ok")
    job.wait_for("ok", count=rounds + 2)


def test_lock_waits_for_what_was_launched(
    launch_cuda: Callable[..., Job],
    compile_cuda: Callable[..., Path],
    kernels: Path,
    caller: Call,
    checkpoint_call: Path,
    emulator: Emulator,
    emulator_environ: dict[str, str],
) -> None:
    program = compile_cuda(PROGRAMS / "launch_one.c")
    with ended(subprocess.Popen(["/bin/sleep", "600"])) as end_of_kernel:
        job = launch_cuda([program, kernels, "while_there_is", str(end_of_kernel.pid)])
        job.wait_for("launched")
        assert caller("lock", job.pid, 100)[0] == 600
        assert caller("state", job.pid) == (0, 0)
        emulator.add_fault("lock", "delay", delay_ms=1)  # by which it is seen that it was asked
        argv = [str(checkpoint_call), "lock", str(job.pid), "30000"]
        with ended(subprocess.Popen(argv, env=emulator_environ, stdout=subprocess.PIPE)) as locking:
            await_hit(emulator)
            time.sleep(0.3)  # it has its answer by then, if there is one
            assert locking.poll() is None
            end_of_kernel.kill()
            end_of_kernel.wait()
            assert locking.communicate(timeout=60)[0] == b"0 0\n"
    assert caller("checkpoint", job.pid)[0] == 0
    assert caller("restore", job.pid, "init")[0] == 0
    assert caller("unlock", job.pid)[0] == 0
    job.wait_for("then 0")


def test_kernel_that_goes_astray_kills_the_context_only(
    launch_cuda: Callable[..., Job], compile_cuda: Callable[..., Path], kernels: Path, caller: Call
) -> None:
    job = launch_cuda([compile_cuda(PROGRAMS / "launch_one.c"), kernels, "crash", "0"])
    job.wait_for("then 700")  # CUDA_ERROR_ILLEGAL_ADDRESS, and it stays
    assert job.alive()
    assert caller("lock", job.pid)[0] == 0
    assert caller("checkpoint", job.pid)[0] == 700
    assert caller("state", job.pid) == (0, 1)
    assert caller("unlock", job.pid)[0] == 0


def test_memory_of_a_killed_process_is_free_at_once(
    launch_cuda: Callable[..., Job], compile_cuda: Callable[..., Path]
) -> None:
    program = compile_cuda(PROGRAMS / "plain_vectors.c")
    for _ in range(5):  # each takes 200 of 256 MiB
        job = launch_cuda([program, "100", "1000000", "5"])
        job.wait_for("pid ready")
        job.end()


def test_capacity_is_shared_by_processes(
    vectors: Callable[..., Job], launch_cuda: Callable[..., Job], compile_cuda: Callable[..., Path]
) -> None:
    vectors(70)
    second = launch_cuda([compile_cuda(PROGRAMS / "plain_vectors.c"), "70", "1", "5"])
    assert second.wait() == 1
    assert "2 (out of memory)" in second.output()


def test_without_a_daemon_there_is_no_device(
    launch: Callable[..., Job],
    compile_cuda: Callable[..., Path],
    emulator_environ: dict[str, str],
    tmp_path: Path,
) -> None:
    environ = emulator_environ | {"GPUSTASIS_EMULATOR": str(tmp_path / "nothing")}
    job = launch([compile_cuda(PROGRAMS / "plain_vectors.c"), "1", "1", "1"], environ)
    assert job.wait() == 1
    assert "cuInit(0): 100 (no CUDA-capable device is detected)" in job.output()
    assert f"no emulator of this version answers at {tmp_path / 'nothing'}" in job.output()


def test_a_question_that_breaks_off_is_asked_again(
    launch: Callable[..., Job],
    compile_cuda: Callable[..., Path],
    emulator_environ: dict[str, str],
    tmp_path: Path,
) -> None:
    """As of a task that was dumped in cuInit: what it asked on has nobody behind it."""
    real = Path(emulator_environ["GPUSTASIS_EMULATOR"])
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as deaf:
        deaf.bind(str(path))
        deaf.listen()
        environ = emulator_environ | {
            "GPUSTASIS_EMULATOR": str(path),
            "GPUSTASIS_EMULATOR_DEV": str(real.parent / "dev"),
        }
        job = launch([compile_cuda(PROGRAMS / "plain_vectors.c"), "1", "1", "1"], environ)
        deaf.settimeout(30)
        asked, _ = deaf.accept()
        (tmp_path / "next").symlink_to(real)
        (tmp_path / "next").rename(path)
        asked.close()
        assert job.wait() == 0, job.output()


def test_it_says_that_it_is_an_emulator(
    launch: Callable[..., Job], compile_cuda: Callable[..., Path], emulator_environ: dict[str, str]
) -> None:
    program = compile_cuda(PROGRAMS / "plain_vectors.c")
    loud = launch([program, "1", "1", "1"], emulator_environ)
    assert loud.wait() == 0
    notice = "gpustasis driver emulator: 2 emulated GPUs, no real GPU is used\n"
    assert loud.output().startswith(notice)
    quiet = launch([program, "1", "1", "1"], emulator_environ | {"GPUSTASIS_EMULATOR_QUIET": "1"})
    assert quiet.wait() == 0
    assert "emulat" not in quiet.output()


@pytest.mark.parametrize(
    ("driver", "version"), [("570.86.10", 12080), ("580.95.05", 13000), ("615.71.09", 13040)]
)
def test_driver_version_is_an_option(
    launch: Callable[..., Job],
    compile_cuda: Callable[..., Path],
    lone: Callable[..., Emulator],
    driver: str,
    version: int,
) -> None:
    one = lone(driver=driver)
    environ = os.environ | one.environment(api_version_of(driver))
    job = launch([compile_cuda(PROGRAMS / "entry_points.c")], environ)
    assert job.wait() == 0, job.output()
    newest = "there" if version >= 13040 else "missing"
    assert f"driver {version}\n" in job.output()
    assert f"nvml {driver}\n" in job.output()
    assert (
        f"cuCheckpointOperationComplete: dlsym {newest}, cuGetProcAddress {newest}\n"
        in job.output()
    )


@pytest.mark.parametrize(
    ("driver", "code"), [("570.86.10", 1), ("580.95.05", 1), ("610.43.02", 1), ("615.71.09", 3)]
)
def test_custom_storage_is_refused(
    launch: Callable[..., Job],
    compile_cuda: Callable[..., Path],
    checkpoint_call: Path,
    lone: Callable[..., Emulator],
    driver: str,
    code: int,
) -> None:
    """Where it does not exist its field is a reserved one; where it does, callers need cuInit."""
    one = lone(driver=driver, settings={"persistence": "1"})
    environ = os.environ | one.environment(api_version_of(driver))
    job = launch([compile_cuda(PROGRAMS / "plain_vectors.c"), "1", "1000000", "5"], environ)
    job.wait_for("round 1 ok")

    def call(*words: str) -> str:
        argv = [str(checkpoint_call), words[0], str(job.pid), *words[1:]]
        return subprocess.run(argv, env=environ, capture_output=True, text=True, check=True).stdout

    assert call("lock") == "0 0\n"
    assert call("custom", "checkpoint") == f"{code} 0\n"
    assert call("checkpoint") == "0 0\n"
    assert call("custom", "restore") == f"{code} 0\n"
    assert call("restore") == "0 0\n"


def test_pairs_came_with_13_0(
    launch: Callable[..., Job],
    compile_cuda: Callable[..., Path],
    checkpoint_call: Path,
    lone: Callable[..., Emulator],
) -> None:
    one = lone(driver="570.86.10", settings={"persistence": "1"})
    environ = os.environ | one.environment(12080)
    job = launch([compile_cuda(PROGRAMS / "plain_vectors.c"), "1", "1000000", "5"], environ)
    job.wait_for("round 1 ok")
    uuid = one.status()["gpus"][0]["uuid"].removeprefix("GPU-").replace("-", "")
    answers = []
    for words in (["lock"], ["checkpoint"], ["restore", uuid, uuid], ["restore"]):
        argv = [str(checkpoint_call), words[0], str(job.pid), *words[1:]]
        ended = subprocess.run(argv, env=environ, capture_output=True, text=True, check=True)
        answers.append(ended.stdout)
    assert answers == ["0 0\n", "0 0\n", "1 0\n", "0 0\n"]
