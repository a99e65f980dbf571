"""Fixtures for all tests. Those that need CRIU run once for every version found on this machine.

criu        one CRIU (cudackpt.criu.find.Criu); the test's id names it: criu-4.2.1
images      an empty directory for a checkpoint
launch      start a program in a session of its own; ends with the test
compile_c   compile a C program once for the whole run
emulator    a private driver emulator, one for the whole run
launch_cuda launch, on the emulator's GPUs
checkpoint, restore
            dump and restore a job with our plugin on the emulator; see support/checkpoint.py
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from cudackpt.criu.find import Criu, find_all
from support.job import Job

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
Launch = Callable[..., Job]


@functools.cache
def criu_versions() -> tuple[Criu, ...]:
    """The usable CRIUs of this machine, each version once, oldest first."""
    by_version: dict[tuple[int, ...], Criu] = {}
    for candidate in find_all():
        if candidate.usable:
            by_version.setdefault(candidate.version, candidate)
    return tuple(by_version[version] for version in sorted(by_version))


def pytest_configure(config: pytest.Config) -> None:
    # A restored job's parent, criu, ends at once; then the job is ours, so that its end is seen.
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise pytest.UsageError(f"cannot become a subreaper: {os.strerror(ctypes.get_errno())}")


def pytest_report_header(config: pytest.Config) -> list[str]:
    found = [f"{criu.version_text} ({criu.origin})" for criu in criu_versions()]
    return ["CRIU: " + (", ".join(found) or "none; tests that need it will fail: ci/test-root all")]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "criu" in metafunc.fixturenames:
        found = criu_versions()
        ids = [f"criu-{criu.version_text}" for criu in found]
        metafunc.parametrize("criu", found, ids=ids, scope="session")


@pytest.fixture(scope="session")
def repository() -> Path:
    return Path(__file__).resolve().parent.parent


@pytest.fixture
def images(tmp_path: Path) -> Path:
    directory = tmp_path / "images"
    directory.mkdir(mode=0o700)
    return directory


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """launch(argv, environ=None) -> Job; argv[0] is a path, environ the whole environment."""
    jobs: list[Job] = []

    def start(argv: list[str | Path], environ: Mapping[str, str] | None = None) -> Job:
        log = tmp_path / f"job-{len(jobs)}.log"
        jobs.append(Job(argv, log, os.environ if environ is None else environ))
        return jobs[-1]

    yield start
    for job in jobs:
        job.end()


@pytest.fixture(scope="session")
def cuda_include() -> Path:
    """The directory of cuda.h: CUDA_INCLUDE, as ci/test sets it, else the usual places."""
    named = os.environ.get("CUDA_INCLUDE")
    places = [Path(named)] if named else [Path("/usr/local/cuda/include"), Path("/usr/include")]
    for place in places:
        if (place / "cuda.h").exists():
            return place
    raise AssertionError(f"no cuda.h in {places}; run the tests with: make test")


@pytest.fixture(scope="session")
def compile_c(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """compile_c(source, *flags) -> the program, compiled once for the same source and flags."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler is not None, "no C compiler; run ci/setup"

    @functools.cache
    def compile_program(source: Path, *flags: str) -> Path:
        program = tmp_path_factory.mktemp("program") / source.stem
        argv = [compiler, "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-o", program, source, *flags]
        ended = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
        return program

    return compile_program
