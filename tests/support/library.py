# SPDX-License-Identifier: Apache-2.0
"""A shared library for a job to load, which another one takes the place of later."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

CompileC = Callable[..., Path]


def library(compile_c: CompileC, place: Path, build_id: str) -> bytes:
    """A library with that build id ("none": without one) that holds the text "one"."""
    source = place / f"library-{build_id}.c"
    source.write_text('const char held[] = "one";\n')
    flags = ("-shared", "-fPIC", "-g0", f"-Wl,--build-id={build_id}")
    return compile_c(source, *flags).read_bytes().replace(source.name.encode(), b"library.c")


def changed(content: bytes) -> bytes:
    """The same with other content, of the same size."""
    other = content.replace(b"one\0", b"two\0")
    assert other != content
    return other


def replace(path: Path, content: bytes) -> None:
    """As a package manager does: the old file stays what it was for those who have it open."""
    new = path.with_suffix(".new")
    new.write_bytes(content)
    new.chmod(0o755)
    new.rename(path)
