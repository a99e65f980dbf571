# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests that run container engines.

steady_job  the program of tests/programs/steady_job.c
engines     support.engine_root.EngineRoot, one for the whole run, with the test image, emulated
GPUs
            and our plugin in it; /mnt/shared is the directory `shared`
elsewhere   another one, with storage and an emulator of its own, that sees the same /mnt/shared
steady      steady(name, runtime, *words, **job) -> SteadyContainer in `engines`; ends with the test
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.engine_gpu import Steady, SteadyContainer, add_gpus
from support.engine_image import import_image
from support.engine_root import EngineRoot

PROGRAMS = Path(__file__).resolve().parent.parent / "programs"


@pytest.fixture(scope="session")
def steady_job(compile_cuda: Callable[..., Path]) -> Path:
    return compile_cuda(PROGRAMS / "steady_job.c")


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


def start(place: Path, shared: Path, steady_job: Path) -> EngineRoot:
    root = EngineRoot(place, shared={"/mnt/shared": shared})
    try:
        # One image for all: an import makes a new one each time, and a checkpoint names its own.
        if (shared / "image.tar").exists():
            root.run("podman", "load", "--input", "/mnt/shared/image.tar")
        else:
            name = import_image(root, [steady_job])
            root.run("podman", "save", "--output", "/mnt/shared/image.tar", name)
        add_gpus(root)
    except BaseException:
        root.close()
        raise
    return root


@pytest.fixture(scope="session")
def engines(
    tmp_path_factory: pytest.TempPathFactory, shared: Path, steady_job: Path
) -> Iterator[EngineRoot]:
    with start(tmp_path_factory.mktemp("engines"), shared, steady_job) as root:
        yield root


@pytest.fixture(scope="session")
def elsewhere(
    tmp_path_factory: pytest.TempPathFactory, shared: Path, steady_job: Path
) -> Iterator[EngineRoot]:
    with start(tmp_path_factory.mktemp("elsewhere"), shared, steady_job) as root:
        yield root


@pytest.fixture
def steady(engines: EngineRoot) -> Iterator[Steady]:
    made: list[SteadyContainer] = []

    def run(name: str, runtime: str, *words: str, **job: int | str) -> SteadyContainer:
        made.append(SteadyContainer(engines, name))
        return SteadyContainer.run(engines, name, runtime, *words, **job)

    yield run
    for container in made:
        container.remove()
