# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests that dump and restore with real CRIU on the emulator.

rig         Rig of each CRIU, on the emulator of the whole run
newest_rig  Rig of the newest CRIU: for what the plugin does by itself, whatever the version
own_rig     the same on an emulator of the test's own, that it may stop and start differently
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from campaigns.rig import Programs, Rig
from gpustasis.criu.find import Criu
from gpustasis.emulator import RATES_OFF, Emulator, Options, api_version_of
from support.certificates import Pair
from support.criu_roots import newest_criu
from support.kernels import compile_kernels
from support.recipients import make_recipient

PROGRAMS = Path(__file__).resolve().parent.parent / "programs"
DRIVER = "580.95.05"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "newest_criu" in metafunc.fixturenames:
        newest = newest_criu()
        name = f"criu-{newest.version_text}"
        metafunc.parametrize("newest_criu", [newest], ids=[name], scope="session")


@pytest.fixture(scope="session")
def programs(
    compile_cuda: Callable[..., Path],
    compile_c: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Programs:
    kernels = compile_kernels(PROGRAMS / "steady_kernels.cu", tmp_path_factory.mktemp("kernels"))
    job, marked = (compile_cuda(PROGRAMS / f"{name}_job.c") for name in ("steady", "marked"))
    tiny = compile_c(PROGRAMS / "tiny_job.c", "-static")
    killer = compile_c(PROGRAMS / "kill_at_syscall.c")
    return Programs(job=job, kernels=kernels, killer=killer, marked=marked, tiny=tiny)


@pytest.fixture
def rig(
    criu: Criu,
    emulator: Emulator,
    emulator_environ: dict[str, str],
    programs: Programs,
    tmp_path: Path,
) -> Iterator[Rig]:
    rig = Rig(criu, emulator, emulator_environ, programs, tmp_path)
    yield rig
    rig.close()


@pytest.fixture
def newest_rig(
    newest_criu: Criu,
    emulator: Emulator,
    emulator_environ: dict[str, str],
    programs: Programs,
    tmp_path: Path,
) -> Iterator[Rig]:
    rig = Rig(newest_criu, emulator, emulator_environ, programs, tmp_path)
    yield rig
    rig.close()


@pytest.fixture
def own_rig(newest_criu: Criu, programs: Programs, tmp_path: Path) -> Iterator[Rig]:
    """Two GPUs of 64 MiB."""
    emulator = Emulator(path=tmp_path / "emulator" / "socket")
    emulator.start(Options(gpus=2, memory_bytes=64 << 20, driver=DRIVER, rates=RATES_OFF))
    environ = dict(os.environ) | emulator.environment(api_version_of(DRIVER))
    rig = Rig(newest_criu, emulator, environ, programs, tmp_path)
    yield rig
    rig.close()
    if emulator.is_running():
        emulator.stop()


@pytest.fixture(scope="session")
def shared_job(compile_c: Callable[..., Path]) -> Path:
    return compile_c(Path(__file__).resolve().parent.parent / "programs" / "shared_job.c")


@pytest.fixture(scope="session")
def memory_job(compile_c: Callable[..., Path]) -> Path:
    return compile_c(
        Path(__file__).resolve().parent.parent / "programs" / "memory_job.c", "-pthread"
    )


@pytest.fixture
def me(tmp_path: Path) -> Pair:
    return make_recipient(tmp_path)
