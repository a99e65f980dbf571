# SPDX-License-Identifier: Apache-2.0
"""Four ranks that are real: CRIU, emulated GPUs, TCP between network namespaces, and etcd."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.etcd import EtcdCluster
from support.ring import WORLD, Network, Ring, ring_of, ring_state

PROGRAMS = Path(__file__).resolve().parent.parent / "programs"


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    network = Network()
    yield network
    network.close()


@pytest.fixture(scope="module")
def store(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    cluster = EtcdCluster(tmp_path_factory.mktemp("etcd"), host=network.host)
    try:
        cluster.wait()
        yield ["--store", cluster.endpoints[0]]
    finally:
        cluster.close()


@pytest.fixture
def ring(
    network: Network,
    store: list[str],
    compile_cuda: Callable[..., Path],
    emulator_environ: dict[str, str],
    tmp_path: Path,
) -> Iterator[Ring]:
    program = compile_cuda(PROGRAMS / "ring_rank.c")
    with ring_of(tmp_path, network, program, emulator_environ, store) as ring:
        ring.name = f"ring-{tmp_path.name}"
        yield ring


def test_a_job_is_checkpointed_killed_and_restored(ring: Ring) -> None:
    ring.steps = 1500
    ring.start_all()
    ring.wait(lambda: min(ring.steps_now()) > 100)

    left = ring.job("checkpoint", "--world", str(WORLD), "--leave-running")
    assert left.returncode == 0, left.stderr + ring.logs()
    ring.wait_for_progress()

    made = ring.job("checkpoint")
    assert made.returncode == 0, made.stderr + ring.logs()
    assert ring.ends() == [0] * WORLD
    assert ring.pids() == []
    assert ring.locked() == []

    ring.start_all("--restore", command=False)
    back = ring.job("restore")
    assert back.returncode == 0, back.stderr + ring.logs()
    assert ring.ends() == [0] * WORLD
    assert ring.locked() == []
    for rank in range(WORLD):
        assert ring.output(rank).splitlines()[-1] == f"done {ring_state(ring.steps)}", ring.logs()
