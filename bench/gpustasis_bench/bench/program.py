"""The C programs of the benchmark, compiled when they are needed."""

from __future__ import annotations

import shutil
from pathlib import Path

from gpustasis import process
from gpustasis.errors import UnsupportedError
from gpustasis_bench.bench.errors import BenchError

_SOURCES = Path(__file__).resolve().parent
_FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-rdynamic")
_TIMEOUT_S = 60.0


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
        [compiler, *_FLAGS, "-o", str(program), str(source), "-ldl"], timeout_s=_TIMEOUT_S
    )
    if ended.status != 0:
        raise BenchError(f"{source} does not compile: {ended.output.strip()}")
    return program
