# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests of checkpoints just in time, with the newest CRIU.

environ     the environment of a supervisor, which names that CRIU
supervise   supervise(*words) -> Supervised: its store is tmp_path/"store"; ends with the test
slow_criu   slow_criu(dump_s, restore_s) -> that CRIU, which waits so long before it begins; a
            restore makes the file tmp_path/"restoring" first
unfinished  words for a criu whose dump has no end before it may not write any more
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpustasis.preemption.network import unlock
from support.criu_roots import criu_place, newest_criu
from support.supervised import Supervised

Supervise = Callable[..., Supervised]


@pytest.fixture
def environ() -> dict[str, str]:
    return {**os.environ, "GPUSTASIS_CRIU": criu_place(newest_criu())}


@pytest.fixture
def supervise(tmp_path: Path, environ: dict[str, str]) -> Iterator[Supervise]:
    begun: list[Supervised] = []

    def begin(*words: object) -> Supervised:
        begun.append(Supervised(tmp_path, "--store", "store", *words, environ=environ))
        return begun[-1]

    yield begin
    for each in begun:
        each.close()
    for images in (tmp_path / "store").glob("jit-*"):
        unlock(images)  # of a checkpoint that nobody will restore


@pytest.fixture
def unfinished(tmp_path: Path) -> list[str]:
    """Whoever breaks a dump off may be late, on a busy machine; this is the last that criu does
    before it ends the job, and it undoes all when this fails."""
    script, written = tmp_path / "unfinished", shlex.quote(str(tmp_path / "written"))
    script.write_text(
        "#!/bin/sh\n"
        '[ "$CRTOOLS_SCRIPT_ACTION" = post-dump ] || exit 0\n'
        f"for each in $(seq 600); do echo >> {written} || exit 1; sleep 0.05; done\n"
    )
    script.chmod(0o755)
    return ["--action-script", str(script)]


@pytest.fixture
def slow_criu(tmp_path: Path) -> Callable[[float, float], Path]:
    def make(dump_s: float, restore_s: float) -> Path:
        program = tmp_path / "slow-criu"
        words = shlex.join(newest_criu().command(dict(os.environ)))
        began = shlex.quote(str(tmp_path / "restoring"))
        program.write_text(
            "#!/bin/sh\n"
            f"case $1 in dump) sleep {dump_s} ;;\n"
            f"restore) touch {began}; sleep {restore_s} ;; esac\n"
            f'exec {words} "$@"\n'
        )
        program.chmod(0o755)
        return program

    return make
