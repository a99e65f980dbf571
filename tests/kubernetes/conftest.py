# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests that need a Kubernetes node.

cluster  support.kubernetes_node.KubernetesNode: one with containerd and one with CRI-O, each
         for all tests here
job_program  tests/programs' steady_job
new_cluster  starts another, for the length of a with statement
tidy     leaves no pod behind when a module has ended, whatever failed in it
with_crio  a mark: the test is one of clusters with CRI-O alone
shared   a directory that has the same path on the node and here
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadGroupScheduling

from gpustasis.runtimes.kubelet_archives import DIRECTORY
from support.containerd_node import ContainerdNode
from support.crio_node import CrioNode
from support.kubernetes_node import KubernetesNode, node_root

HERE = Path(__file__).resolve().parent
PROGRAMS = HERE.parent / "programs"
TIMEOUT_S = 900  # of a test that has none of its own; nodes start one after the other
_RUNTIME = re.compile(rf"\[(?:.*-)?({ContainerdNode.name}|{CrioNode.name})(?:-.*)?\]")


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="session")
def job_program(compile_cuda: Callable[..., Path]) -> Path:
    return compile_cuda(PROGRAMS / "steady_job.c")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "with_crio: of clusters with CRI-O alone")


class ByRuntime(LoadGroupScheduling):
    """The tests of a runtime in one process, found by their names, and the others of a file in one.
    Else each process would start a cluster of each: pytest-xdist 3.8 finds no mark of a group with
    pytest 9.2."""

    def _split_scope(self, nodeid: str) -> str:
        found = _RUNTIME.search(nodeid)
        return found[1] if found else nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByRuntime | None:
    return ByRuntime(config, log) if config.getoption("dist") == "loadgroup" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("timeout") is not None:
        return
    for item in items:  # of the whole run
        if HERE in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cluster" not in metafunc.fixturenames:
        return
    alone = metafunc.definition.get_closest_marker("with_crio") is not None
    every: list[type[ContainerdNode | CrioNode]] = [ContainerdNode, CrioNode]
    runtimes = every[1:] if alone else every
    # A cluster of each at once, and the tests of one after the other: ByRuntime.
    values = [pytest.param(one, id=one.name) for one in runtimes]
    metafunc.parametrize("cluster", values, indirect=True, scope="session")


Clusters = Callable[[type[ContainerdNode] | type[CrioNode]], AbstractContextManager[KubernetesNode]]


@pytest.fixture(scope="session")
def new_cluster(
    tmp_path_factory: pytest.TempPathFactory, job_program: Path, shared: Path, repository: Path
) -> Clusters:
    @contextmanager
    def start(runtime: type[ContainerdNode | CrioNode]) -> Iterator[KubernetesNode]:
        archives = tmp_path_factory.mktemp("kubelet-checkpoints")
        visible = {str(shared): shared, str(DIRECTORY): archives}
        place, secrets = tmp_path_factory.mktemp("node"), tmp_path_factory.mktemp("secrets")
        tests = repository / "tests"
        with (
            node_root(place, tests, visible) as root,
            KubernetesNode(root, job_program, secrets, tests, runtime) as cluster,
        ):
            yield cluster

    return start


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest, new_cluster: Clusters) -> Iterator[KubernetesNode]:
    with new_cluster(request.param) as started:
        yield started


@pytest.fixture(scope="module")
def tidy(cluster: KubernetesNode) -> Iterator[None]:
    yield
    cluster.delete_all_pods()
