"""Argument lists for criu. Nothing here looks at the machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gpustasis.criu.find import Version

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
    extra: further criu arguments, last.
    """

    images: Path
    log: Path
    plugin_dir: Path
    work: Path | None = None
    config: Path | None = None
    shell_job: bool = False
    extra: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump(Common):
    """`criu dump` of the tree below pid. leave_running and leave_stopped exclude each other."""

    pid: int
    leave_running: bool = False
    leave_stopped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore(Common):
    """`criu restore`; detached: criu ends when the tree runs."""

    pidfile: Path
    detached: bool = True


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
    return arguments + list(request.extra)
