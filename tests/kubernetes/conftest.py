# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests that need a Kubernetes node.

cluster  support.kubernetes_node.KubernetesNode, one for all tests here
shared   a directory that has the same path on the node and here
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpustasis.runtimes.kubelet import DIRECTORY
from support.kubernetes_node import KubernetesNode, node_root

PROGRAMS = Path(__file__).resolve().parent.parent / "programs"


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="session")
def cluster(
    tmp_path_factory: pytest.TempPathFactory,
    compile_cuda: Callable[..., Path],
    shared: Path,
    repository: Path,
) -> Iterator[KubernetesNode]:
    archives = tmp_path_factory.mktemp("kubelet-checkpoints")
    visible = {str(shared): shared, str(DIRECTORY): archives}
    place = tmp_path_factory.mktemp("node")
    secrets = tmp_path_factory.mktemp("secrets")
    program = compile_cuda(PROGRAMS / "steady_job.c")
    with (
        node_root(place, repository / "tests", visible) as root,
        KubernetesNode(root, program, secrets, repository / "tests") as cluster,
    ):
        yield cluster
