# SPDX-License-Identifier: Apache-2.0
"""Options that several commands share, and what they say of sizes."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import click

from gpustasis.image.prune import parse_duration
from gpustasis.intervals import Periodic
from gpustasis.text import mib, plural
from gpustasis.verifying import Check

if TYPE_CHECKING:
    from gpustasis.criu.statistics import Statistics

Decorated = TypeVar("Decorated", bound=Callable[..., object])


def checkpoint_argument(name: str) -> Callable[[Decorated], Decorated]:
    """A checkpoint: an image directory or an archive."""
    kind = click.Path(exists=True, path_type=Path)
    return click.argument(name, type=kind, metavar=name.upper())


def parent_option(function: Decorated) -> Decorated:
    """--parent, as often as needed; the parameter is `parents`."""
    return click.option(
        "--parent",
        "parents",
        multiple=True,
        metavar="DIR|ARCHIVE",
        type=click.Path(exists=True, path_type=Path),
        help="Of an archive: where an earlier checkpoint is that it is built on. Several times, "
        "for each archive of the chain; a directory is followed to its own parents, and a store "
        "stands for all its checkpoints.",
    )(function)


def threads_option(function: Decorated) -> Decorated:
    """--threads."""
    return click.option(
        "--threads",
        type=click.IntRange(0, 1024),
        default=0,
        show_default=True,
        help="Threads that read, check and write memory; 0: as many as the processors and the disk "
        "can use.",
    )(function)


class Size(click.ParamType[int]):
    """512M or 16GiB, in bytes."""

    name = "size"
    _UNITS: ClassVar = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+)\s*([KMGT]?)(?:i?B)?", str(value), re.IGNORECASE)
        if match is None:
            self.fail(f"{value!r} is not a size such as 512M or 16GiB", param, ctx)
        return int(match[1]) * self._UNITS[match[2].upper()]


class Duration(click.ParamType[timedelta]):
    """90s, 30m, 24h, 7d or 2w."""

    name = "duration"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> timedelta:
        try:
            return value if isinstance(value, timedelta) else parse_duration(str(value))
        except ValueError as exc:
            self.fail(str(exc), param, ctx)


class Interval(click.ParamType[timedelta | str]):
    """The same, or "auto"."""

    name = "interval"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> timedelta | str:
        return "auto" if value == "auto" else Duration().convert(value, param, ctx)


class Words(click.ParamType[tuple[str, ...]]):
    """A program and its arguments, with quotes as in a shell, which never sees them."""

    name = "command"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        try:
            words = tuple(shlex.split(str(value)))
        except ValueError as exc:
            self.fail(f"{value!r} cannot be taken apart: {exc}", param, ctx)
        if not words:
            self.fail("it names no program", param, ctx)
        return words


def verify_options(function: Decorated) -> Decorated:
    """What must succeed after a restore."""
    for option in reversed(
        (
            click.option(
                "--verify-after",
                type=Words(),
                metavar="COMMAND",
                help="Run COMMAND after a restore, without a shell; GPUSTASIS_ROOT_PID in its "
                "environment is the process that was restored. Until it has succeeded the job does "
                "not count as back, and if it fails the job is killed.",
            ),
            click.option(
                "--verify-timeout",
                type=click.FloatRange(0.0, min_open=True),
                default=60.0,
                show_default=True,
                metavar="S",
                help="Seconds after which the command of --verify-after has failed.",
            ),
            click.option(
                "--older-if-unverified",
                is_flag=True,
                help="If --verify-after fails, restore the next older checkpoint.  [default: end "
                "with status 24]",
            ),
        )
    ):
        function = option(function)
    return function


def interval_options(function: Decorated) -> Decorated:
    """Checkpoints by the clock."""
    for option in reversed(
        (
            click.option(
                "--interval",
                type=Interval(),
                metavar="TIME",
                help="Checkpoint the job by the clock, too, this long after the last checkpoint: "
                "90s, 30m, 12h; auto: computed from how long the job stands still for one, and "
                "--mtbf.",
            ),
            click.option(
                "--mtbf",
                type=Duration(),
                default="24h",
                show_default=True,
                metavar="TIME",
                help="For --interval auto: the mean time between failures of the job.",
            ),
        )
    ):
        function = option(function)
    return function


def chain_option(counted: str) -> Callable[[Decorated], Decorated]:
    """--max-chain; counted: what it is the greatest number of."""
    return click.option(
        "--max-chain",
        type=click.IntRange(0, 65535),
        default=8,
        show_default=True,
        metavar="N",
        help=f"{counted}; 0: each is full.",
    )


def periodic_of(interval: timedelta | str | None, mtbf: timedelta) -> Periodic | None:
    """Of interval_options."""
    if interval is None:
        return None
    told = interval.total_seconds() if isinstance(interval, timedelta) else None
    if told == 0 or not mtbf:
        raise click.UsageError("--interval and --mtbf are longer than 0")
    return Periodic(interval_s=told, mtbf_s=mtbf.total_seconds())


def check_of(words: tuple[str, ...] | None, seconds: float, *, older: bool) -> Check | None:
    """Of verify_options."""
    if words is None and older:
        raise click.UsageError("--older-if-unverified needs --verify-after")
    if words is not None and shutil.which(words[0]) is None:  # every restored job would be killed
        raise click.UsageError(f"--verify-after: there is no program {words[0]}")
    return None if words is None else Check(words=words, seconds=seconds)


def recipients_option(function: Decorated) -> Decorated:
    """--to, of a dump."""
    return click.option(
        "--to",
        "recipients",
        multiple=True,
        metavar="CERTIFICATE",
        type=click.Path(dir_okay=False, path_type=Path),
        help="Seal the checkpoint while it is made: an X.509 certificate in PEM, RSA or EC, whose "
        "private key opens it. Several times.",
    )(function)


def dump_options(function: Decorated) -> Decorated:
    """What is dumped, and how."""
    for option in reversed(
        (
            click.option(
                "--compress",
                type=click.Choice(["lz4", "none"]),
                help="How this plugin stores memory.  [default: as configured, else lz4]",
            ),
            click.option(
                "--cpu-memory",
                type=click.Choice(["criu", "ours", "auto"]),
                help="Who stores the processes' own memory: CRIU, or this plugin as it stores GPU "
                "memory; auto: the plugin, where there is much of it and this system allows it.  "
                "[default: as configured, else criu]",
            ),
            click.option(
                "--tier",
                type=click.Choice(["disk", "ram"]),
                help="ram: the memory that gpustasis stores goes into the arena first, and to the "
                "disk by `gpustasis drain`; CRIU's own images go to the image directory. An error "
                "for a stream (-o, `migrate`).  [default: as configured, else disk]",
            ),
            click.option(
                "--layout",
                type=click.Choice(["criu", "packed"]),
                help="packed: CRIU's images in one file, compressed and checked.  "
                "[default: as configured, else criu]",
            ),
            click.option(
                "--externalize",
                type=click.Choice(["on", "off"]),
                help="off: GPU memory goes into CRIU's own images, as with the stock plugin.  "
                "[default: as configured, else on]",
            ),
            click.option(
                "--ghost-limit",
                type=Size(),
                metavar="SIZE",
                help="The largest file without a name that is dumped with its content.  "
                "[default: CRIU's, 1 MiB]",
            ),
            click.option(
                "--skip-in-flight", is_flag=True, help="Leave out connections not accepted yet."
            ),
            click.option(
                "--link-remap", is_flag=True, help="Give files without a name one for the dump."
            ),
        )
    ):
        function = option(function)
    return function


def criu_options(function: Decorated) -> Decorated:
    """Options of dump and restore, most of them CRIU's own, and the arguments for criu after --."""
    extra = click.argument("extra", nargs=-1, type=click.UNPROCESSED, metavar="[-- CRIU-ARGS...]")
    return extra(criu_switches(function))


def criu_switches(function: Decorated) -> Decorated:
    """Those options."""
    for option in reversed(
        (
            click.option(
                "--criu",
                "criu_program",
                metavar="PATH",
                help="The criu program, or a root directory that holds one.",
            ),
            click.option(
                *("-j", "--shell-job/--no-shell-job"),
                default=None,
                help="The job belongs to a shell's session.  [default: found out]",
            ),
            click.option("--tcp-established", is_flag=True, help="Keep open TCP connections."),
            click.option("--tcp-close", is_flag=True, help="Restore TCP connections as closed."),
            click.option("-l", "--file-locks", is_flag=True, help="Keep file locks."),
            click.option(
                *("-W", "--work-dir"),
                type=click.Path(file_okay=False, exists=True, path_type=Path),
                help="Where criu puts its log and statistics.  [default: the image directory]",
            ),
            click.option(
                "--threads",
                type=click.IntRange(0, 1024),
                help="Threads that move memory; 0: as many as the processors and the disk can use.",
            ),
        )
    ):
        function = option(function)
    return function


def describe(statistics: Statistics | None) -> str:
    """What became of memory, in a clause for the end of a line."""
    if statistics is None:
        return "no CUDA process in it"
    own = [task for task in statistics.cpu_memory if not task.left_because]
    text = _describe_cuda(statistics)
    if own:
        plain, stored = (sum(getattr(t, n) for t in own) for n in ("plain_bytes", "file_bytes"))
        text += f", {mib(plain)} of CPU memory"
        if same := sum(task.same_bytes for task in own):
            text += f" ({mib(same)} of it in earlier checkpoints already)"
        text += f" stored in {mib(stored)}"
    return text


def _describe_cuda(statistics: Statistics) -> str:
    if not statistics.tasks:
        return "no CUDA process in it"
    count = len(statistics.tasks)
    text = f"{plural(count, 'CUDA process', 'es')}, {mib(statistics.staged_bytes)} of GPU memory"
    if statistics.same_bytes:
        text += f" ({mib(statistics.same_bytes)} of it in earlier checkpoints already)"
    if any(task.externalized for task in statistics.tasks):
        text += f" stored in {mib(statistics.file_bytes)}"
    return text + (" (emulator: no real GPU)" if statistics.emulated else "")
