# SPDX-License-Identifier: Apache-2.0
"""Each part of a job fails in each phase, with each store and each CRIU."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

from campaigns import job_faults
from campaigns.rig import Rig
from campaigns.tally import Tally
from gpustasis.emulator import library_directory
from soak.bench import Bench
from support.ring import Network
from support.ring_faults import planned
from support.ring_stores import AgentStore, EtcdStore, RingStore

EACH, EACH_OTHERS = 20, 3  # hits of each fault before, in and after the phases that lock
DUMPS_TCP = (4, 2)  # before, CRIU asks TCP for SO_PASSCRED, which Linux refuses from 6.16 on
_PROGRAM = Path(__file__).resolve().parent.parent / "programs" / "ring_rank.c"


def run(bench: Bench) -> Iterator[tuple[str, Tally]]:
    network = Network()
    try:
        for rig in reversed(bench.rigs):
            if rig.criu.version < DUMPS_TCP:
                continue
            each = EACH if rig is bench.newest else EACH_OTHERS
            name = f"criu {rig.criu.version_text}, etcd"
            yield name, _part(rig, network, _etcd(network), bench.random(name), each)
        rig = bench.newest
        name = f"criu {rig.criu.version_text}, agent"
        yield name, _part(rig, network, _agent(rig), bench.random(name), EACH_OTHERS)
    finally:
        network.close()


def _etcd(network: Network) -> Callable[[Path], RingStore]:
    return lambda directory: EtcdStore(directory, network.host)


def _agent(rig: Rig) -> Callable[[Path], RingStore]:
    return lambda directory: AgentStore(directory, rig.environ, rig.criu)


def _part(
    rig: Rig,
    network: Network,
    make_store: Callable[[Path], RingStore],
    random: Random,
    each: int,
) -> Tally:
    place = job_faults.Place(
        directory=rig.images(),
        network=network,
        program=_compiled(rig),
        environ=rig.environ,
        criu=str(rig.criu.root or rig.criu.program),
        make_store=make_store,
    )
    return job_faults.run(place, random, planned(each))


def _compiled(rig: Rig) -> Path:
    program = rig.scratch / "ring_rank"
    library = library_directory(rig.emulator.status()["api_version"])
    cuda = [f"-isystem{os.environ['CUDA_INCLUDE']}", f"-L{library}", "-l:libcuda.so.1"]
    subprocess.run(["cc", "-O1", "-Wall", "-Wextra", "-o", program, _PROGRAM, *cuda], check=True)
    return program
