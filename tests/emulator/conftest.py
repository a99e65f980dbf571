# SPDX-License-Identifier: Apache-2.0
"""Fixtures for the tests of the driver emulator.

kernels   the module of programs/kernels.cu
caller    caller(call, pid, *words) -> (CUresult, value): one call of the checkpoint API by a
process
          of its own
vectors   vectors(mib=8) -> Job: programs/plain_vectors.c, running
lone      an emulator of the test's own: lone(**options) -> Emulator, see gpustasis.emulator.Options
stock     criu without any plugin: stock(words) -> CompletedProcess

For custom storage, on an emulator of the test's own with driver 615:
gpus      the emulator: two GPUs of 256 MiB, copies as fast as memory
callers   callers(gpus=2) -> support.custom_storage.Caller
jobs      jobs(mib=8) -> Job: programs/plain_vectors.c, running; with pauses=True each round of it
          waits for SIGUSR1
two_gpus  programs/two_gpus.c, ready
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpustasis.criu.find import Criu
from gpustasis.emulator import RATES_OFF, Emulator, Options, library_directory
from support.custom_storage import DRIVER, MIB, Caller
from support.job import Job
from support.kernels import compile_kernels

PROGRAMS = Path(__file__).resolve().parent / "programs"
Call = Callable[..., tuple[int, int]]


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_kernels(PROGRAMS / "kernels.cu", tmp_path_factory.mktemp("module"))


@pytest.fixture
def checkpoint_call(compile_cuda: Callable[..., Path]) -> Path:
    return compile_cuda(PROGRAMS / "checkpoint_call.c")


@pytest.fixture
def caller(checkpoint_call: Path, emulator_environ: dict[str, str]) -> Call:
    def call(name: str, pid: int, *words: object, uid: int | None = None) -> tuple[int, int]:
        before = [] if uid is None else ["--uid", str(uid)]
        argv = [str(checkpoint_call), *before, name, str(pid), *map(str, words)]
        ended = subprocess.run(
            argv, env=emulator_environ, capture_output=True, text=True, check=False, timeout=60
        )
        assert ended.returncode == 0, ended.stderr
        code, value = ended.stdout.split()
        return int(code), int(value)

    return call


@pytest.fixture
def vectors(
    launch_cuda: Callable[..., Job], compile_cuda: Callable[..., Path]
) -> Callable[..., Job]:
    program = compile_cuda(PROGRAMS / "plain_vectors.c")

    def start(mib: int = 8) -> Job:
        job = launch_cuda([program, str(mib), "1000000", "5"])
        job.wait_for("round 1 ok")
        return job

    return start


@pytest.fixture
def lone(tmp_path: Path) -> Iterator[Callable[..., Emulator]]:
    started: list[Emulator] = []

    def start(**options: object) -> Emulator:
        one = Emulator(path=tmp_path / f"emulator-{len(started)}")
        one.start(Options(**options))  # type: ignore[arg-type]
        started.append(one)
        return one

    yield start
    for one in started:
        if one.is_running():
            one.stop()


@pytest.fixture
def stock(criu: Criu, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """stock("dump", ...): options end with what CRIU shall not take from this machine."""
    empty = tmp_path / "no-plugins"
    empty.mkdir()
    environ = {key: value for key, value in os.environ.items() if key != "LD_LIBRARY_PATH"}

    def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
        argv = [*criu.command(environ), *map(str, words), "--libdir", str(empty), "-v4"]
        return subprocess.run(
            argv, env=environ, capture_output=True, text=True, check=False, timeout=120
        )

    return run


@pytest.fixture
def gpus(lone: Callable[..., Emulator]) -> Emulator:
    """Two GPUs of 256 MiB and driver 615."""
    return lone(gpus=2, memory_bytes=256 * MIB, driver=DRIVER, rates=RATES_OFF)


@pytest.fixture
def environ_13_4(gpus: Emulator) -> dict[str, str]:
    return dict(os.environ) | gpus.environment(13040)


@pytest.fixture
def callers(
    compile_cuda: Callable[..., Path], environ_13_4: dict[str, str]
) -> Iterator[Callable[..., Caller]]:
    program = compile_cuda(PROGRAMS / "custom_storage.c", f"-L{library_directory(13040)}")
    started: list[Caller] = []

    def start(gpus: int = 2) -> Caller:
        started.append(Caller(program, environ_13_4, gpus))
        return started[-1]

    yield start
    for one in started:
        one.kill()
        for stream in (one.process.stdin, one.process.stdout):
            assert stream is not None
            stream.close()


@pytest.fixture
def jobs(
    launch: Callable[..., Job], compile_cuda: Callable[..., Path], environ_13_4: dict[str, str]
) -> Callable[..., Job]:
    program = compile_cuda(PROGRAMS / "plain_vectors.c")

    def start(mib: int = 8, *, pauses: bool = False) -> Job:
        pause_ms = 3_600_000 if pauses else 5
        job = launch([program, str(mib), "1000000", str(pause_ms)], environ=environ_13_4)
        job.wait_for("round 0 ok" if pauses else "round 1 ok")
        return job

    return start


@pytest.fixture
def two_gpus(
    launch: Callable[..., Job], compile_cuda: Callable[..., Path], environ_13_4: dict[str, str]
) -> Job:
    """8 MiB on the first GPU, 16 MiB on the second."""
    job = launch([compile_cuda(PROGRAMS / "two_gpus.c")], environ=environ_13_4)
    job.wait_for("ready")
    return job
