# SPDX-License-Identifier: Apache-2.0
"""The C programs of the benchmark, compiled when they are needed; what the plugin's hooks cost."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpustasis import process
from gpustasis.criu.plugin import PLUGIN_NAME, Setting, format_config, plugin_directory
from gpustasis.errors import UnsupportedError
from gpustasis_bench.errors import BenchError

_SOURCES = Path(__file__).resolve().parent
_FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-rdynamic", "-pthread")
_COMPILE_S = 60.0
_HOOKS_S = 120.0


def compile_program(name: str, folder: Path) -> Path:
    """The program `name` of this package, compiled into `folder`; not anew if it is newer than its
    source. Raises UnsupportedError without a C compiler."""
    source = _SOURCES / f"{name}.c"
    program = (folder / name).absolute()
    if program.exists() and program.stat().st_mtime >= source.stat().st_mtime:
        return program
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise UnsupportedError(f"no C compiler, which {source.name} needs; install gcc")
    folder.mkdir(parents=True, exist_ok=True)
    ended = process.run(
        [compiler, *_FLAGS, "-o", str(program), str(source), "-ldl"], timeout_s=_COMPILE_S
    )
    if ended.status != 0:
        raise BenchError(f"{source} does not compile: {ended.output.strip()}")
    return program


@dataclass(frozen=True, slots=True, kw_only=True)
class HookCost:
    """Nanoseconds by hook, "pause" and "checkpoint", over `calls` calls of each, for a process with
    so many threads."""

    calls: int
    threads: int
    median_ns: dict[str, int]
    rare_ns: dict[str, int]  # 99th percentile

    @property
    def process_us(self) -> float:
        """Microseconds that a dump spends on one process without CUDA: both hooks."""
        return sum(self.median_ns.values()) / 1000


def measure_hooks(
    program: Path, environ: Mapping[str, str], calls: int, threads: int = 1
) -> HookCost:
    """program: hook_cost, of hook_cost.c. Raises BenchError if a hook answers what it must not."""
    plugin = plugin_directory(environ) / PLUGIN_NAME
    ended = process.run(
        [str(program), str(plugin), str(calls), str(threads)], env=environ, timeout_s=_HOOKS_S
    )
    if ended.status != 0:
        raise BenchError(f"{program.name} failed ({ended.ending}): {ended.output.strip()}")
    medians, rare = {}, {}
    for line in ended.output.splitlines():
        name, median, percentile = line.split()
        medians[name], rare[name] = int(median), int(percentile)
    return HookCost(calls=calls, threads=threads, median_ns=medians, rare_ns=rare)


def why_refused(
    program: Path, environ: Mapping[str, str], settings: Mapping[str, Setting], config: Path
) -> str | None:
    """Why the plugin would not take these settings, in half a sentence; None: it takes them.

    It is asked itself, as criu asks it at the start of a dump. program: hook_cost. config: a file
    that is written for that. Raises BenchError if the plugin fails for another reason.
    """
    config.write_text(format_config(settings), encoding="utf-8")
    try:
        measure_hooks(program, {**environ, "GPUSTASIS_CONFIG": str(config)}, 1)
    except BenchError as exc:
        if found := re.search(r'unknown key "([^"]*)"', str(exc)):
            return f"the plugin of this build has no setting {found[1]!r}"
        if found := re.search(rf"{re.escape(str(config))}: ([^\n]*: must be [^\n]*)", str(exc)):
            return f"the plugin of this build does not take {found[1]}"
        raise
    return None
