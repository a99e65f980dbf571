# SPDX-License-Identifier: Apache-2.0
"""Each part of a job fails in each phase, jobs that fail are restored, and what agreeing costs
without faults: with each store and each CRIU."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from campaigns import job_cost, job_faults, recovery
from campaigns.rig import Rig
from campaigns.tally import Tally
from gpustasis.emulator import library_directory
from soak.bench import Bench
from support.ring import Network
from support.ring_faults import planned
from support.ring_stores import AgentStore, EtcdStore, RingStore

EACH, EACH_OTHERS = 20, 3  # hits of each fault before, in and after the phases that lock
RECOVERED, RECOVERED_OTHERS = 20, 2  # of each fault
MEASURED = 20  # checkpoints
DUMPS_TCP = (4, 2)  # before, CRIU asks TCP for SO_PASSCRED, which Linux refuses from 6.16 on
_PROGRAM = Path(__file__).resolve().parent.parent / "programs" / "ring_rank.c"


def run(bench: Bench) -> Iterator[tuple[str, Tally]]:
    for name, place, is_main in _places(bench):
        each = EACH if is_main else EACH_OTHERS
        yield name, job_faults.run(place, bench.random(name), planned(each))


def recover(bench: Bench) -> Iterator[tuple[str, Tally]]:
    for name, place, is_main in _places(bench):
        each = RECOVERED if is_main else RECOVERED_OTHERS
        yield name, recovery.run(place, bench.random(f"recovery {name}"), recovery.planned(each))


def measure(bench: Bench) -> Iterator[tuple[str, Tally]]:
    for name, place, _ in _places(bench):
        yield name, job_cost.run(place, MEASURED, job_cost.BOUND_MS)


def _places(bench: Bench) -> Iterator[tuple[str, job_faults.Place, bool]]:
    """Each CRIU that can be used, the newest first, with etcd; then the newest with the store for
    one host."""
    network = Network()
    try:
        for rig in reversed(bench.rigs):
            if rig.criu.version >= DUMPS_TCP:
                name = f"criu {rig.criu.version_text}, etcd"
                yield name, _place(rig, network, _etcd(network)), rig is bench.newest
        rig = bench.newest
        yield f"criu {rig.criu.version_text}, agent", _place(rig, network, _agent(rig)), False
    finally:
        network.close()


def _etcd(network: Network) -> Callable[[Path], RingStore]:
    return lambda directory: EtcdStore(directory, network.host)


def _agent(rig: Rig) -> Callable[[Path], RingStore]:
    return lambda directory: AgentStore(directory, rig.environ, rig.criu)


def _place(rig: Rig, network: Network, make_store: Callable[[Path], RingStore]) -> job_faults.Place:
    return job_faults.Place(
        directory=rig.images(),
        network=network,
        program=_compiled(rig),
        environ=rig.environ,
        criu=str(rig.criu.root or rig.criu.program),
        make_store=make_store,
    )


def _compiled(rig: Rig) -> Path:
    program = rig.scratch / "ring_rank"
    library = library_directory(rig.emulator.status()["api_version"])
    cuda = [f"-isystem{os.environ['CUDA_INCLUDE']}", f"-L{library}", "-l:libcuda.so.1"]
    subprocess.run(["cc", "-O1", "-Wall", "-Wextra", "-o", program, _PROGRAM, *cuda], check=True)
    return program
