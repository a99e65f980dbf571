# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests of jobs.

etcd         a real etcd-server, one for all tests of a file (support.etcd.EtcdCluster)
childless    for all: none of this process's children is taken for a keeper's, and ended
handled      for all: a keeper that has ended ignores signals from then on; this process does not
journal      the path of the journal of a Server in this process
new_store    new_store() -> another client of one store, etcd or the local one; tests run with both
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from gpustasis.jobs.ending import FORWARDED
from gpustasis.jobs.etcd import Etcd
from gpustasis.jobs.etcd_words import Access
from gpustasis.jobs.local import Local
from gpustasis.jobs.server import Server
from gpustasis.jobs.store import Store
from support.etcd import EtcdCluster, place_of_data, running
from support.job_ranks import ANSWER_S

_prefixes = count(1)


@pytest.fixture(autouse=True)
def childless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A keeper's children are its rank's; this process has others, emulators and engines."""
    monkeypatch.setattr("gpustasis.jobs.stopping.children", list)


@pytest.fixture(autouse=True)
def handled() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in FORWARDED}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with running(EtcdCluster(tmp_path_factory.mktemp("etcd"))) as cluster:
        yield cluster


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Path]:
    """In memory: every write is synced, and a disk that is busy would be waited for."""
    with TemporaryDirectory(prefix="journal-", dir=place_of_data(tmp_path, 1)) as directory:
        yield Path(directory) / "journal"


@pytest.fixture(params=["etcd", "local"])
def new_store(
    request: pytest.FixtureRequest, tmp_path: Path, journal: Path
) -> Iterator[Callable[[], Store]]:
    stores: list[Store] = []
    server = None
    if request.param == "local":
        server = Server(tmp_path / "store", journal)
    else:
        cluster = request.getfixturevalue("etcd")

    def new() -> Store:
        store: Store
        if server is not None:
            store = Local(tmp_path / "store", ANSWER_S)
        else:
            store = Etcd(Access(endpoints=cluster.endpoints))
        stores.append(store)
        return store

    yield new
    for store in stores:
        store.close()
    if server is not None:
        server.close()


@pytest.fixture
def top() -> str:
    """The beginning of the keys of this test."""
    return f"/gpustasis/test-{next(_prefixes)}/"
