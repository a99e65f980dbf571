# SPDX-License-Identifier: Apache-2.0
"""Fixtures for all tests. Those that need CRIU run once for every version found on this machine.
Those marked one_criu take long: they run with one of them, which the test's name chooses, unless
--every-criu is given.

criu            one CRIU (gpustasis.criu.find.Criu); the test's id names it: criu-4.2.1
images          an empty directory for a checkpoint
arena           the path of an arena (tier = "ram"), not there yet; in a tmpfs
launch          launch(argv, environ=None) -> Job: a program in a session of its own; ends with
                the test
compile_c       compile_c(source, *flags) -> Path: a C program, compiled once for the whole run
emulator        a private driver emulator (gpustasis.emulator.Emulator), one for the whole run: two
                GPUs of 256 MiB, driver 580, copies as fast as memory; its faults and settings are
                reset after each test
emulator_environ
                the environment in which programs and criu use that emulator; it names the
                preferred CRIU
compile_cuda    compile_cuda(source, *flags) -> Path: the same for a program of the CUDA driver API
launch_cuda     launch_cuda(argv) -> Job: launch, on the emulator's GPUs
gpu_generations launch_cuda of tests/programs/gpu_generations.c, once it is "ready":
                gpu_generations(mib=8, seed=1, zero_mib=4) -> Job
checkpointer    dump and restore jobs with `criu`, our plugin and the emulator:
                support.checkpoint.Checkpointer
gpustasis        gpustasis(*words) -> CompletedProcess: the command, in emulator_environ
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from gpustasis.criu.find import Criu
from gpustasis.emulator import RATES_OFF, Emulator, Options, api_version_of, library_directory
from support import hierarchies
from support.checkpoint import Checkpointer
from support.criu_roots import criu_place, criu_versions, preferred_criu
from support.driver_states import await_ends
from support.job import Job, reap_workers

EMULATED_DRIVER = "580.95.05"
EMULATED_MEMORY_SIZE = 256 << 20  # bytes of each GPU
PROGRAMS = Path(__file__).resolve().parent / "programs"
TESTS_OF_ENGINES = re.compile(r"\bcriu-|/(runtimes|containerd)/|/test_hierarchies\.py")
# An example takes as long as the machine is busy: what hangs is found by the limit of each test.
hypothesis.settings.register_profile("busy", deadline=None)
hypothesis.settings.load_profile("busy")
KEPT = pytest.StashKey[bool]()
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
Launch = Callable[..., Job]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-criu", action="store_true", help="tests marked one_criu too")


def pytest_configure(config: pytest.Config) -> None:
    # A restored job's parent, criu, ends at once; then the job is ours, so that its end is seen.
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise pytest.UsageError(f"cannot become a subreaper: {os.strerror(ctypes.get_errno())}")
    # A shell's background job ignores it, and so would all that tests start and interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # What whoever started us left open would be dumped with every job, and may not be dumpable.
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with contextlib.suppress(OSError):  # listdir's own, closed by now
                os.set_inheritable(int(name), False)
    if not hasattr(config, "workerinput"):  # that of xdist, whose reports come to us as well
        config.pluginmanager.register(FailuresAtOnce(config))


class FailuresAtOnce:
    """Tells of a failed test when it fails: a run that is broken off later has told of it."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.write_line(f"\nFAILED {report.nodeid} ({report.when})")
            terminal.write_line("\n".join(report.longreprtext.splitlines()[-25:]))


def pytest_collection_finish(session: pytest.Session) -> None:
    # Not in a worker of xdist: they begin to test after the process that made them was told what
    # they have collected, and end before it.
    if not hasattr(session.config, "workerinput") and not session.config.option.collectonly:
        keep_hierarchy(session.config, [item.nodeid for item in session.items])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: list[str]) -> None:
    keep_hierarchy(node.config, ids)


def keep_hierarchy(config: pytest.Config, names: list[str]) -> None:
    """Until the end, if tests of engines or of CRIU are among these."""
    if KEPT in config.stash or not any(TESTS_OF_ENGINES.search(name) for name in names):
        return
    config.stash[KEPT] = True
    if hierarchies.is_needed():
        try:
            config.add_cleanup(hierarchies.KeptHierarchy().close)
        except OSError as error:
            raise pytest.UsageError(str(error)) from None


def pytest_report_header(config: pytest.Config) -> list[str]:
    found = [f"{criu.version_text} ({criu.origin})" for criu in criu_versions()]
    return ["CRIU: " + (", ".join(found) or "none; tests that need it will fail: ci/test-root all")]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "criu" in metafunc.fixturenames:
        found = criu_versions()
        is_long = metafunc.definition.get_closest_marker("one_criu") is not None
        if is_long and found and not metafunc.config.getoption("every_criu"):
            name = metafunc.definition.nodeid.encode()
            found = (found[zlib.crc32(name) % len(found)],)
        ids = [f"criu-{criu.version_text}" for criu in found]
        metafunc.parametrize("criu", found, ids=ids, scope="session")


@pytest.fixture(scope="session")
def repository() -> Path:
    return Path(__file__).resolve().parent.parent


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Path]:
    above = Path("/dev/shm") / f"gpustasis-{os.getpid()}-{tmp_path.parent.name}-{tmp_path.name}"
    yield above / "arena"
    shutil.rmtree(above, ignore_errors=True)


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


@pytest.fixture(scope="session")
def running_emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    """The daemon itself; tests use `emulator`, which cleans up after each of them."""
    daemon = Emulator(path=tmp_path_factory.mktemp("emulator") / "socket")
    daemon.start(
        Options(gpus=2, memory_bytes=EMULATED_MEMORY_SIZE, driver=EMULATED_DRIVER, rates=RATES_OFF)
    )
    yield daemon
    daemon.stop()


@pytest.fixture
def emulator(running_emulator: Emulator) -> Iterator[Emulator]:
    await_ends(running_emulator)  # of the tests before
    settings: dict[str, object] = running_emulator.status()["settings"]
    yield running_emulator
    reap_workers()
    running_emulator.clear_faults()
    for key, value in running_emulator.status()["settings"].items():
        if value != settings[key]:
            running_emulator.set(key, str(settings[key]))


@pytest.fixture
def emulator_environ(emulator: Emulator) -> dict[str, str]:
    named = {"GPUSTASIS_CRIU": criu_place(preferred_criu())}
    return dict(os.environ) | named | emulator.environment(api_version_of(EMULATED_DRIVER))


@pytest.fixture(scope="session")
def compile_cuda(compile_c: Callable[..., Path], cuda_include: Path) -> Callable[..., Path]:
    def compile_program(source: Path, *flags: str) -> Path:
        library = library_directory(api_version_of(EMULATED_DRIVER))
        use = (f"-isystem{cuda_include}", f"-L{library}", "-l:libcuda.so.1")
        return compile_c(source, *flags, *use)

    return compile_program


@pytest.fixture
def launch_cuda(launch: Launch, emulator_environ: dict[str, str]) -> Launch:
    return functools.partial(launch, environ=emulator_environ)


@pytest.fixture
def gpu_generations(launch_cuda: Launch, compile_cuda: Callable[..., Path]) -> Launch:
    program = compile_cuda(PROGRAMS / "gpu_generations.c")

    def start(mib: int = 8, seed: int = 1, zero_mib: int = 4) -> Job:
        job = launch_cuda([program, str(mib), str(seed), str(zero_mib)])
        job.wait_for("ready")
        return job

    return start


@pytest.fixture
def checkpointer(criu: Criu, emulator_environ: dict[str, str]) -> Checkpointer:
    return Checkpointer(criu, emulator_environ)


@pytest.fixture
def gpustasis(
    emulator_environ: dict[str, str],
) -> Callable[..., subprocess.CompletedProcess[str]]:
    def call(*words: str | Path) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "gpustasis", *map(str, words)]
        return subprocess.run(
            argv, env=emulator_environ, capture_output=True, text=True, check=False, timeout=120
        )

    return call
