# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests that run containerd.

node     support.containerd_node.ContainerdNode, one for all tests here
shared   a directory that has the same path in the node and here
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.containerd_node import ContainerdNode
from support.engine_root import EngineRoot

PROGRAMS = Path(__file__).resolve().parent.parent / "programs"


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="session")
def job_program(compile_cuda: Callable[..., Path]) -> Path:
    return compile_cuda(PROGRAMS / "steady_job.c")


@pytest.fixture(scope="session")
def node(
    tmp_path_factory: pytest.TempPathFactory, shared: Path, job_program: Path
) -> Iterator[ContainerdNode]:
    place = tmp_path_factory.mktemp("node")
    with (
        EngineRoot(place, shared={str(shared): shared}) as root,
        ContainerdNode(root, job_program) as node,
    ):
        yield node
