# SPDX-License-Identifier: Apache-2.0
"""One CRIU, the emulator and a place to work: what every campaign needs."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from campaigns.steady_job import SteadyJob
from gpustasis.criu import run
from gpustasis.criu.find import Criu
from gpustasis.criu.plugin import Setting, format_config, plugin_directory
from gpustasis.emulator import RATES_OFF, Emulator, Options, api_version_of
from gpustasis.recovery import GUARDIAN_COMM, WORKER_COMM
from gpustasis.task import find_users
from support.job import children_named, reap_workers
from support.pids import await_free

CRIU_TIMEOUT_S = 120.0
GPU_MEMORY = 256 << 20  # bytes of each emulated GPU
END_S = 10.0
SETTLE_S = 20.0  # a worker left behind has done its work by then
CONFIG_NAME = "config.toml"
_DISK_SIZE = 64 << 20


@dataclass(frozen=True, slots=True)
class Run:
    """A criu that has ended. log: its own log, "" if it wrote none; output: what it printed."""

    status: int
    log: str
    output: str
    seconds: float

    @property
    def errors(self) -> str:
        """The log's lines that matter, for a message."""
        lines = [
            line for line in self.log.splitlines() if "Error" in line or "cuda_plugin: " in line
        ]
        return "\n".join(lines[-12:]) or self.output[-600:]


class Jobs:
    """The job of a campaign: one at a time, a new one when the last was lost, ended at the end."""

    def __init__(self, start: Callable[[], SteadyJob]) -> None:
        self._start = start
        self._job: SteadyJob | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()
        end_strays()

    def get(self) -> SteadyJob:
        """The one that runs, started if there is none."""
        if self._job is None:
            self._job = self._start()
        return self._job

    def drop(self) -> None:
        """End it."""
        if self._job is not None:
            self._job.end()
        self._job = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """Compiled from tests/programs. job: steady_job; kernels: its module; killer: kill_at_syscall;
    marked: marked_job; tiny: tiny_job, linked statically."""

    job: Path
    kernels: Path
    killer: Path
    marked: Path
    tiny: Path


@dataclass(frozen=True, slots=True)
class Rig:
    """environ: of jobs and of criu, with the emulator's variables. scratch: an empty directory of
    this rig's own."""

    criu: Criu
    emulator: Emulator
    environ: Mapping[str, str] = field(repr=False)
    programs: Programs
    scratch: Path
    _numbers: Iterator[int] = field(default_factory=itertools.count, repr=False)
    _started: list[subprocess.Popen[bytes]] = field(default_factory=list, repr=False)

    @contextmanager
    def job(self, **options: int | Path) -> Iterator[SteadyJob]:
        """A steady_job for the length of a with statement."""
        job = SteadyJob(
            self.programs.job, self.scratch / self._name("job"), self.environ, **options
        )
        try:
            yield job
        finally:
            job.end()

    def images(self) -> Path:
        """A new, empty directory."""
        directory = self.scratch / self._name("images")
        directory.mkdir(mode=0o700)
        return directory

    def copy(self, images: Path) -> Path:
        """A copy of a checkpoint, to be damaged or filled."""
        directory = self.scratch / self._name("images")
        shutil.copytree(images, directory)
        return directory

    def dump_words(
        self, job: SteadyJob, images: Path, extra: Sequence[str] = (), *, plugin: bool = True
    ) -> list[str]:
        """Argument list of a dump; its log goes beside `images`, so that a full directory does
        not lose it. plugin False: as without our plugin."""
        request = run.Dump(
            pid=job.pid,
            images=images,
            log=log_path(images, "dump"),
            plugin_dir=self._plugin_directory(plugin),
            extra=tuple(extra),
        )
        arguments = run.dump_arguments(request, self.criu.version)
        return [*self.criu.command(self.environ), *arguments]

    def restore_words(
        self, images: Path, extra: Sequence[str] = (), *, plugin: bool = True
    ) -> list[str]:
        """Argument list of a restore, as soon as the pids that it needs are free."""
        await_free(images)
        request = run.Restore(
            images=images,
            log=log_path(images, "restore"),
            plugin_dir=self._plugin_directory(plugin),
            extra=tuple(extra),
            pidfile=log_path(images, "pid"),
        )
        arguments = run.restore_arguments(request, self.criu.version)
        return [*self.criu.command(self.environ), *arguments]

    def environment(self, plugin: Mapping[str, Setting] | None = None) -> dict[str, str]:
        """criu's, with a configuration file of these keys if there are any."""
        environ = dict(self.environ)
        if plugin:
            path = self.scratch / self._name(CONFIG_NAME)
            path.write_text(format_config(plugin))
            environ["GPUSTASIS_CONFIG"] = str(path)
        return environ

    def dump(
        self,
        job: SteadyJob,
        images: Path,
        *extra: str,
        config: Mapping[str, Setting] | None = None,
        plugin: bool = True,
    ) -> Run:
        words = self.dump_words(job, images, extra, plugin=plugin)
        return self.run(words, images, "dump", config)

    def restore(
        self,
        images: Path,
        *extra: str,
        config: Mapping[str, Setting] | None = None,
        plugin: bool = True,
    ) -> Run:
        words = self.restore_words(images, extra, plugin=plugin)
        log_path(images, "pid").unlink(missing_ok=True)  # of an earlier one: criu would refuse
        return self.run(words, images, "restore", config)

    def run(
        self,
        words: Sequence[str],
        images: Path,
        stage: str,
        config: Mapping[str, Setting] | None = None,
    ) -> Run:
        """Run criu to its end. What it prints goes to a file: restored tasks may hold it open."""
        log = log_path(images, stage)
        log.unlink(missing_ok=True)
        printed = log_path(images, "output")
        begin = time.monotonic()
        with printed.open("wb") as output:
            ended = subprocess.run(
                words,
                env=self.environment(config),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                timeout=CRIU_TIMEOUT_S,
                check=False,
            )
        return Run(
            status=ended.returncode,
            log=log.read_text(errors="replace") if log.exists() else "",
            output=printed.read_text(errors="replace"),
            seconds=time.monotonic() - begin,
        )

    def start(
        self, words: Sequence[str], config: Mapping[str, Setting] | None = None
    ) -> subprocess.Popen[bytes]:
        """Run criu in the background, for a test that does something else meanwhile."""
        self._started[:] = [criu for criu in self._started if criu.poll() is None]
        self._started.append(
            subprocess.Popen(
                words,
                env=self.environment(config),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        )
        return self._started[-1]

    def close(self) -> None:
        """End every criu that start() has started and that a test which failed has left."""
        for criu in self._started:
            criu.kill()  # nothing, if it has ended
            criu.wait()
        self._started.clear()
        reap_workers()

    def settle(self, images: Path) -> None:
        """Wait until no worker of ours is left that has to do with `images`. Fails if one stays."""
        deadline = time.monotonic() + SETTLE_S
        while left := workers(images):
            if time.monotonic() > deadline:
                raise AssertionError(f"worker {left} is left behind")
            time.sleep(0.01)
        reap_workers()

    def _plugin_directory(self, plugin: bool) -> Path:
        if plugin:
            return plugin_directory(self.environ)
        empty = self.scratch / "no-plugin"
        empty.mkdir(exist_ok=True)
        return empty

    def _name(self, kind: str) -> str:
        return f"{next(self._numbers)}-{kind}"


def with_config(rig: Rig, config: Mapping[str, Setting]) -> Rig:
    """The same, and every criu that it starts without a configuration of its own has these keys."""
    return replace(rig, environ=rig.environment(config))


_IPC_IS_A_RISK = range(13010, 13030)  # API versions, as in findings.cpp


@contextmanager
def with_driver(rig: Rig, driver: str) -> Iterator[Rig]:
    """The same on an emulator of its own whose driver has that version."""
    api = api_version_of(driver)
    place = rig.scratch / f"driver-{driver}"
    place.mkdir()
    emulator = Emulator(path=place / "emulator" / "socket")
    emulator.start(Options(gpus=2, memory_bytes=GPU_MEMORY, driver=driver, rates=RATES_OFF))
    try:
        environ = dict(rig.environ) | emulator.environment(api)
        if api in _IPC_IS_A_RISK:
            config = place / CONFIG_NAME
            config.write_text('risk = ["ipc"]\n')  # the jobs share no memory
            environ["GPUSTASIS_CONFIG"] = str(config)
        yield replace(rig, emulator=emulator, environ=environ, scratch=place)
    finally:
        emulator.stop()


def workers(images: Path) -> list[int]:
    """Live workers and guardians of the plugin that hold `images` open."""
    return find_users(images, WORKER_COMM, GUARDIAN_COMM)


def lasting_workers(images: Path) -> list[int]:
    """Those that are there some moments later still: one with nothing left to do may outlive criu
    by the time that its end takes."""
    deadline = time.monotonic() + END_S
    while (found := workers(images)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def end_strays() -> None:
    """Kill what a killed criu has left of itself: it probes the kernel with children that wait for
    a signal of its. Not while another criu runs."""
    for pid in children_named("criu", "ld-linux-x86-64"):
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def log_path(images: Path, stage: str) -> Path:
    """Where criu's log of that stage goes: beside the image directory."""
    return images.with_name(f"{images.name}.{stage}" + ("" if stage == "pid" else ".log"))


def await_line(criu: subprocess.Popen[bytes], log: Path, words: str) -> None:
    """Until criu's log has them, or criu has failed before that."""
    deadline = time.monotonic() + 30
    while True:
        status = criu.poll()  # first: one that has ended writes no more
        if words in (log.read_text(errors="replace") if log.exists() else ""):
            return
        if status is not None:
            assert status != 0, f"criu has dumped, and {log} has no {words!r}"
            return
        assert time.monotonic() < deadline, f"no {words!r} in {log}"
        time.sleep(0.001)


def criu_errors(images: Path, stage: str) -> str:
    """What criu's log of that stage calls an error or a warning, and its last lines."""
    log = log_path(images, stage)
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    wrong = [line for line in lines if "Error (" in line or "Warn  (" in line]
    return "\n".join([*wrong[-20:], "…", *lines[-8:]])


@contextmanager
def small_disk(mount_point: Path, size: int) -> Iterator[Path]:
    """An empty directory of a disk with `size` bytes free, of ext4: chunks are written past the
    page cache there. What lies beside it, as logs do, is on another disk."""
    mount_point.mkdir(mode=0o700)
    device = mount_point.with_suffix(".img")
    with device.open("wb") as file:
        file.truncate(_DISK_SIZE)
    for words in (
        ["mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", device],
        ["mount", "-o", "loop", device, mount_point],
    ):
        subprocess.run(words, check=True, timeout=60)
    try:
        (mount_point / "lost+found").rmdir()
        mount_point.chmod(0o700)
        status = os.statvfs(mount_point)
        taken = status.f_bavail * status.f_frsize - size
        with (mount_point / "taken").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, taken)
            (mount_point / "taken").unlink()  # until it is closed
            yield mount_point
    finally:
        _unmount(mount_point)
        device.unlink()


@contextmanager
def small_filesystem(mount_point: Path, size: int, inodes: int) -> Iterator[Path]:
    """An empty file system of `size` bytes and `inodes` files (0: as many as you like)."""
    mount_point.mkdir(mode=0o700)
    options = f"size={size},nr_inodes={inodes},mode=0700"
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", mount_point], check=True, timeout=30
    )
    try:
        yield mount_point
    finally:
        _unmount(mount_point)


def _unmount(mount_point: Path) -> None:
    deadline = time.monotonic() + SETTLE_S
    while subprocess.run(["umount", mount_point], capture_output=True, check=False).returncode:
        assert time.monotonic() < deadline, f"{mount_point} stays busy"
        time.sleep(0.02)
    os.rmdir(mount_point)
