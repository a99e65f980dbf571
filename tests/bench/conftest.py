# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests of the benchmark.

newest_criu  of the CRIUs that there are
course       what a run is made with, on the emulator; its files are in tmp_path
medium       a directory on a disk
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gpustasis.criu.find import Criu
from gpustasis_bench.bench.checkpointing import Checkpointing
from gpustasis_bench.bench.course import Course
from gpustasis_bench.bench.medium import Medium, filesystem_of
from gpustasis_bench.bench.programs import compile_program
from support import criu_roots


@pytest.fixture
def newest_criu() -> Criu:
    return criu_roots.newest_criu()


@pytest.fixture
def course(emulator_environ: dict[str, str], newest_criu: Criu, tmp_path: Path) -> Course:
    logs = tmp_path / "logs"
    logs.mkdir()
    return Course(
        checkpointing=Checkpointing(criu=newest_criu, environ=emulator_environ, logs=logs),
        program=compile_program("target", tmp_path),
        work=tmp_path,
        environ=emulator_environ,
        say=lambda line: None,
    )


@pytest.fixture
def medium(tmp_path: Path) -> Medium:
    folder = tmp_path / "medium"
    folder.mkdir()
    return Medium(name="disk", folder=folder, filesystem=filesystem_of(folder))
