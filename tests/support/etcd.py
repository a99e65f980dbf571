# SPDX-License-Identifier: Apache-2.0
"""A real etcd-server, alone or a cluster of several, with or without TLS and passwords."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from gpustasis.errors import StoreError
from gpustasis.jobs.etcd import Etcd
from gpustasis.jobs.etcd_words import Access
from support.certificates import Authority
from support.ports import hold_port, port_of

START_S = 60
MEMORY = Path("/dev/shm")
ROOM = 512 << 20  # bytes: a server has 123 MiB at once, most of them reserved


def place_of_data(directory: Path, count: int) -> Path:
    """A test is held up by no disk that is busy: a server that waits for one loses its elections. A
    campaign measures, with a disk."""
    is_test = "PYTEST_CURRENT_TEST" in os.environ
    has_room = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= count * ROOM
    return MEMORY if is_test and has_room else directory


@dataclass(slots=True)
class Server:
    """One etcd-server of a cluster."""

    url: str
    argv: list[str]
    log: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.argv, stdout=log, stderr=log)

    def kill(self) -> None:
        """At once, as a crash does."""
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None


class EtcdCluster:
    """count: servers, at addresses of `host`. directory: for their logs, and for their data where
    those are not in memory. authority: they speak TLS only, with certificates of its, and take only
    clients who have one. flags: more words for each."""

    def __init__(
        self,
        directory: Path,
        count: int = 1,
        authority: Authority | None = None,
        host: str = "127.0.0.1",
        flags: Sequence[str] = (),
    ) -> None:
        scheme = "http" if authority is None else "https"
        self._held = [hold_port(host) for _ in range(2 * count)]
        self._data = TemporaryDirectory(prefix="etcd-", dir=place_of_data(directory, count))
        ports = [port_of(held) for held in self._held]
        urls = [f"{scheme}://{host}:{port}" for port in ports[:count]]
        peers = [f"http://{host}:{port}" for port in ports[count:]]
        cluster = ",".join(f"n{number}={peer}" for number, peer in enumerate(peers))
        tls: list[str] = []
        if authority is not None:
            pair = authority.server(host)
            tls = ["--cert-file", str(pair.certificate), "--key-file", str(pair.key)]
            tls += ["--trusted-ca-file", str(authority.certificate), "--client-cert-auth"]
        self.servers = []
        for number, (url, peer) in enumerate(zip(urls, peers, strict=True)):
            argv = ["etcd", "--name", f"n{number}", "--data-dir", f"{self._data.name}/n{number}"]
            argv += ["--listen-client-urls", url, "--advertise-client-urls", url]
            argv += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
            argv += ["--initial-cluster", cluster, "--log-level", "error", *tls, *flags]
            self.servers.append(Server(url, argv, directory / f"n{number}.log"))
            self.servers[-1].start()

    @property
    def endpoints(self) -> tuple[str, ...]:
        return tuple(server.url for server in self.servers)

    def wait(self, access: Access | None = None) -> None:
        """Until it answers."""
        deadline = time.monotonic() + START_S
        while True:
            store = Etcd(access or Access(endpoints=self.endpoints))
            try:
                store.read("/gpustasis/any")
            except StoreError as exc:
                if time.monotonic() > deadline:
                    logs = [server.log.read_text()[-2000:] for server in self.servers]
                    raise AssertionError(f"etcd does not start: {exc}; {logs}") from exc
                time.sleep(0.1)
            else:
                return
            finally:
                store.close()

    def close(self) -> None:
        for server in self.servers:
            server.kill()
        for held in self._held:
            held.close()
        self._data.cleanup()


@contextmanager
def running(cluster: EtcdCluster) -> Iterator[EtcdCluster]:
    """Once it answers."""
    try:
        cluster.wait()
        yield cluster
    finally:
        cluster.close()


def etcdctl(endpoint: str, *words: str, flags: Sequence[str] = ()) -> str:
    return subprocess.run(
        ["etcdctl", "--command-timeout=60s", "--endpoints", endpoint, *flags, *words],
        env={"ETCDCTL_API": "3", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
