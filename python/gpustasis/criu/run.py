# SPDX-License-Identifier: Apache-2.0
"""Run criu with our plugin: its argument lists, one run from start to end, and why it failed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from gpustasis import process
from gpustasis.criu import log
from gpustasis.criu.find import Criu, Version
from gpustasis.criu.images import PSTREE_NAME, read_pstree
from gpustasis.criu.own_options import own_option
from gpustasis.criu.plugin import (
    OVERRIDES,
    Setting,
    format_config,
    plugin_directory,
    read_config,
)
from gpustasis.criu.statistics import Stage, Statistics, failures, find_statistics, statistics_path
from gpustasis.errors import CheckpointError, CriuError, ImageError

PLUGIN_OPTION_VERSION = (4, 3)  # the first criu with --plugin-option


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """What dump and restore share.

    images: the image directory.
    work: directory for criu's statistics and relative names; None: images.
    log: criu's log file; pidfile: where a restore puts the pid of the root task.
    plugin_dir: holds cuda_plugin.so and nothing else.
    config: the plugin's configuration; None: it looks for one itself.
    shell_job: the tree's session leader is not part of it.
    options: criu's own, by their names without dashes: true for those that take no value.
    extra: further criu arguments, last.
    """

    images: Path
    log: Path
    plugin_dir: Path
    work: Path | None = None
    config: Path | None = None
    shell_job: bool = False
    options: Mapping[str, bool | int] = field(default_factory=dict)
    extra: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump(Common):
    """`criu dump` of the tree below pid. leave_running and leave_stopped exclude each other."""

    pid: int
    leave_running: bool = False
    leave_stopped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore(Common):
    """`criu restore`; detached: criu ends when the tree runs. leave_stopped: when it stands."""

    pidfile: Path
    detached: bool = True
    leave_stopped: bool = False


def dump_arguments(request: Dump, version: Version) -> list[str]:
    """Arguments after the program's name. Raises ValueError if the request contradicts itself."""
    if request.leave_running and request.leave_stopped:
        raise ValueError("a task cannot be left both running and stopped")
    arguments = ["dump", "--tree", str(request.pid)]
    if request.leave_running:
        arguments.append("--leave-running")
    if request.leave_stopped:
        arguments.append("--leave-stopped")
    return arguments + _common(request, version)


def restore_arguments(request: Restore, version: Version) -> list[str]:
    """Arguments after the program's name."""
    arguments = ["restore", "--pidfile", str(request.pidfile)]
    if request.detached:
        arguments.append("--restore-detached")
    if request.leave_stopped:
        arguments.append("--leave-stopped")
    return arguments + _common(request, version)


def plugin_environment(config: Path | None, version: Version) -> dict[str, str]:
    """What to add to criu's environment so that the plugin reads `config`."""
    if config is None or version >= PLUGIN_OPTION_VERSION:
        return {}
    return {"GPUSTASIS_CONFIG": str(config)}


def _common(request: Common, version: Version) -> list[str]:
    arguments = [
        "--images-dir",
        str(request.images),
        "--libdir",
        str(request.plugin_dir),
        "--log-file",
        str(request.log),
        "-v4",
    ]
    if request.work is not None:
        arguments += ["--work-dir", str(request.work)]
    if request.config is not None and version >= PLUGIN_OPTION_VERSION:
        arguments.append(f"--plugin-option=cuda_plugin.config={request.config}")
    if request.shell_job:
        arguments.append("--shell-job")
    for name, value in request.options.items():
        if value is not False:
            arguments += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return arguments + list(request.extra)


OnLine = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A dump or restore that succeeded.

    pid: the root task's, as this process sees it.
    criu_version: "4.3".
    log: criu's whole log.
    seconds: criu's run, from start to end.
    statistics: what the plugin says of it; None if the tree has no CUDA process.
    """

    pid: int
    criu_version: str
    log: Path
    seconds: float
    statistics: Statistics | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What dump and restore have in common beyond their images.

    plugin: keys of the plugin's configuration for this run; they win over every file and policy.
    work: as criu's --work-dir; None: the image directory. Holds the log in the end.
    shell_job: None: found out.
    options: of criu, as in Common.
    extra: further arguments for criu; none of own_option's.
    environ: criu's environment; None: this process's own.
    pass_fds: descriptors that criu has as well, under the same numbers.
    on_line: told each line of criu's log as it comes.
    watch: called with criu's pid, ten times a second or so. That criu ignores SIGXFSZ, so that who
        limits the size of its files (prlimit) has it fail, and undo what it did.
    """

    plugin: Mapping[str, Setting] | None = None
    work: Path | None = None
    shell_job: bool | None = None
    options: Mapping[str, bool | int] = field(default_factory=dict)
    extra: Sequence[str] = ()
    environ: Mapping[str, str] | None = None
    pass_fds: Sequence[int] = ()
    on_line: OnLine | None = None
    watch: Callable[[int], None] | None = None


def dump(
    criu: Criu,
    pid: int,
    images: Path,
    settings: Settings | None = None,
    *,
    leave_running: bool = False,
    leave_stopped: bool = False,
) -> Run:
    """Dump the tree below `pid` into the existing directory `images`; the log is dump.log there.

    Ctrl-C does not stop it. Raises CriuError if criu or the plugin failed (the tree then runs on),
    UnsupportedError without the plugin, CheckpointError for a bad configuration.
    """
    use = _checked(settings)
    shell_job = _is_shell_job(pid) if use.shell_job is None else use.shell_job
    with _workspace(use, "dump", images) as space:
        request = Dump(
            pid=pid,
            images=images.absolute(),
            log=space.log,
            plugin_dir=plugin_directory(space.environ),
            work=use.work,
            shell_job=shell_job,
            options=use.options,
            extra=tuple(use.extra),
            leave_running=leave_running,
            leave_stopped=leave_stopped,
        )
        seconds = space.run(criu, dump_arguments(request, criu.version))
    return Run(
        pid=pid,
        criu_version=criu.version_text,
        log=space.kept_log,
        seconds=seconds,
        statistics=space.statistics,
    )


def restore(
    criu: Criu,
    images: Path,
    settings: Settings | None = None,
    *,
    detached: bool = True,
    leave_stopped: bool = False,
    pidfile: Path | None = None,
) -> Run:
    """Restore the tree in `images`; the log is restore.log there.

    detached: return when the tree runs; else when its root has ended. leave_stopped: it is left
    stopped in place of running. pidfile: a file, not there yet, that criu writes the root's pid
    to. Raises as dump; nothing of the tree runs on then.
    """
    use = _checked(settings)
    if pidfile is not None and pidfile.exists():
        raise CheckpointError(f"{pidfile} exists already; criu would fail to write the pid there")
    if not (images / PSTREE_NAME).exists():
        raise ImageError(
            f"{images} holds no checkpoint, or a dump that did not finish: it has no {PSTREE_NAME}"
        )
    root = read_pstree(images)[0]
    shell_job = root.sid != root.pid if use.shell_job is None else use.shell_job
    with _workspace(use, "restore", images) as space:
        written = space.directory / "pid" if pidfile is None else pidfile.absolute()
        request = Restore(
            images=images.absolute(),
            log=space.log,
            plugin_dir=plugin_directory(space.environ),
            work=use.work,
            shell_job=shell_job,
            options=use.options,
            extra=tuple(use.extra),
            pidfile=written,
            detached=detached,
            leave_stopped=leave_stopped,
        )
        arguments = restore_arguments(request, criu.version)
        # A job of a shell takes criu's terminal for its own, and its signals; a stream it must not.
        terminal = not detached or (shell_job and os.isatty(0))
        seconds = space.run(criu, arguments, terminal=terminal)
        pid = int(written.read_text())
    return Run(
        pid=pid,
        criu_version=criu.version_text,
        log=space.kept_log,
        seconds=seconds,
        statistics=space.statistics,
    )


def _checked(settings: Settings | None) -> Settings:
    use = settings or Settings()
    word = own_option(use.extra)
    if word is not None:
        raise CheckpointError(
            f"criu's option {word} is set by gpustasis itself and cannot follow --; where "
            "gpustasis has an option of that name, use that"
        )
    return use


def check(criu: Criu, environ: Mapping[str, str] | None = None) -> process.Finished:
    """`criu check`: what this kernel lacks for CRIU, in its output."""
    env = os.environ if environ is None else environ
    return process.run([*criu.command(env), "check"], env=env, timeout_s=60)


class _Workspace:
    """A private directory for one run: log, pidfile and configuration are written there, since the
    image directory may be full, read-only or on slow storage when they matter most."""

    def __init__(self, settings: Settings, stage: Stage, images: Path, directory: Path) -> None:
        self.environ = dict(os.environ if settings.environ is None else settings.environ)
        self.directory = directory
        self.log = directory / f"{stage}.log"
        self.kept_log = (settings.work or images).absolute() / f"{stage}.log"
        self._stage = stage
        self._images = images
        self._on_line = settings.on_line
        self._watch = settings.watch
        self.statistics: Statistics | None = None  # of a run that has ended
        self._pass_fds = settings.pass_fds
        if settings.plugin:
            # A file of these alone: whatever else there is, a container's policy among it, keeps
            # its place below them.
            overrides = directory / "overrides.toml"
            overrides.write_text(format_config(self._overrides(settings.plugin)), encoding="utf-8")
            self.environ[OVERRIDES] = str(overrides)

    def _overrides(self, told: Mapping[str, Setting]) -> dict[str, Setting]:
        named = self.environ.get(OVERRIDES)
        found = read_config(Path(named)) if named else {}
        if "parent" in told:  # the later answer to the same question
            found.pop("incremental", None)
        if "incremental" in told:
            found.pop("parent", None)
        return found | dict(told)

    def run(self, criu: Criu, arguments: list[str], *, terminal: bool = False) -> float:
        """Run criu; seconds it took. Raises CriuError."""
        tail = log.LogTail(self.log)
        started: list[int] = []

        def tell() -> None:
            for line in tail.poll():
                if self._on_line is not None:
                    self._on_line(line)

        def tick() -> None:
            tell()
            if self._watch is not None:
                self._watch(started[0])

        with suppress(OSError):  # of an earlier run; a read-only image directory keeps it
            statistics_path(self._images, self._stage).unlink(missing_ok=True)
        is_old = os.path.lexists(statistics_path(self._images, self._stage))
        argv = [*criu.command(self.environ), *arguments]
        try:
            ended = process.run(
                argv,
                env=self.environ,
                shielded=not terminal,
                terminal=terminal,
                pass_fds=self._pass_fds,
                ignore_signals=self._watch is not None,
                on_start=started.append,
                on_tick=tick,
            )
        except OSError as exc:
            raise CriuError(f"cannot run {argv[0]}: {exc.strerror}") from exc
        finally:
            self._keep_log()
        tell()
        text = self._read_log()
        self.statistics = None if is_old else find_statistics(self._images, self._stage)
        errors = failures(self.statistics, self._images, ended.status, log.plugin_errors(text))
        # A negative return of RESUME_DEVICES_LATE does not fail CRIU: our errors do it here.
        if ended.status != 0 or errors:
            raise CriuError(self._explain(criu, ended, errors, text))
        return ended.seconds

    def _explain(
        self, criu: Criu, ended: process.Finished, plugin_errors: list[str], text: str
    ) -> str:
        lines = [f"criu {criu.version_text} {self._stage} failed ({ended.ending})"]
        lines += [f"  plugin: {line}" for line in plugin_errors]
        lines += log.explained(log.criu_errors(text))
        if len(lines) == 1:  # not far enough for a log: what it said to the terminal, reason first
            said = [line for line in ended.output.splitlines() if line.strip()]
            lines += [f"  criu: {line}" for line in said[: log.ERRORS_SHOWN]]
        if self.log.exists():
            lines.append(f"  full log: {self.kept_log}")
        return "\n".join(lines)

    def _read_log(self) -> str:
        """Empty: this criu has made none; what an earlier one has left says nothing of it."""
        return self.log.read_text("utf-8", errors="replace") if self.log.exists() else ""

    def _keep_log(self) -> None:
        if not self.log.exists():
            return
        try:
            with suppress(FileNotFoundError):
                self.kept_log.unlink()  # a link is not followed
            with open(self.kept_log, "xb") as kept, self.log.open("rb") as log_file:
                shutil.copyfileobj(log_file, kept)
        except OSError:
            with suppress(OSError):
                self.kept_log.unlink()
            handle, name = tempfile.mkstemp(prefix="gpustasis-", suffix=f"-{self.log.name}")
            os.close(handle)
            self.kept_log = Path(shutil.copyfile(self.log, name))


@contextmanager
def _workspace(settings: Settings, stage: Stage, images: Path) -> Iterator[_Workspace]:
    with tempfile.TemporaryDirectory(prefix="gpustasis-") as name:
        yield _Workspace(settings, stage, images, Path(name))


def _is_shell_job(pid: int) -> bool:
    """Whether the session leader of `pid` is another task: one that will not be dumped."""
    try:
        return os.getsid(pid) != pid
    except ProcessLookupError as exc:
        raise CriuError(f"there is no process {pid}") from exc
