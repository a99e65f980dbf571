# SPDX-License-Identifier: Apache-2.0
"""The stores that a ring of ranks agrees in, as processes that can be killed and started again:
etcd, or an agent's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from gpustasis.criu.find import Criu
from gpustasis.jobs.etcd import Etcd
from gpustasis.jobs.etcd_words import Access
from gpustasis.jobs.local import Local
from gpustasis.jobs.store import Store
from support.agent import Agent
from support.etcd import EtcdCluster
from support.job_ranks import ANSWER_S


class RingStore(Protocol):
    """words: that name it to `gpustasis job`. name: for a report."""

    name: str
    words: list[str]

    def client(self) -> Store: ...

    def kill(self) -> None: ...

    def start(self) -> None:
        """Again, and until it answers."""

    def close(self) -> None: ...


class EtcdStore:
    """A server, on an address of `host`."""

    name = "etcd"

    def __init__(self, directory: Path, host: str) -> None:
        directory.mkdir()
        self._cluster = EtcdCluster(directory, host=host)
        self._cluster.wait()
        self.words = ["--store", self._cluster.endpoints[0]]

    def client(self) -> Store:
        return Etcd(Access(endpoints=self._cluster.endpoints))

    def kill(self) -> None:
        self._cluster.servers[0].kill()

    def start(self) -> None:
        self._cluster.servers[0].start()
        self._cluster.wait()

    def close(self) -> None:
        self._cluster.close()


class AgentStore:
    """`gpustasis agent`, which serves the store for one host."""

    name = "agent"

    def __init__(self, directory: Path, environ: Mapping[str, str], criu: Criu) -> None:
        directory.mkdir(mode=0o700)
        self._agent = Agent(directory, environ, criu).start()
        self._socket = directory / "jobs.sock"
        self.words = ["--store", str(self._socket)]

    def client(self) -> Store:
        return Local(self._socket, ANSWER_S)

    def kill(self) -> None:
        assert self._agent.process is not None
        self._agent.process.kill()
        self._agent.process.wait()

    def start(self) -> None:
        self._agent.start()

    def close(self) -> None:
        self._agent.close()
