# SPDX-License-Identifier: Apache-2.0
"""A real etcd-server, alone or a cluster of several, with or without TLS and passwords."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpustasis.errors import StoreError
from gpustasis.jobs.etcd import Etcd
from gpustasis.jobs.etcd_words import Access
from support.certificates import Authority

START_S = 60


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    sockets = [socket.create_server((host, 0)) for _ in range(count)]
    ports = [listening.getsockname()[1] for listening in sockets]
    for listening in sockets:
        listening.close()
    return ports


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
    """count: servers, at addresses of `host`. authority: they speak TLS only, with certificates of
    its, and take only clients who have one. flags: more words for each."""

    def __init__(
        self,
        directory: Path,
        count: int = 1,
        authority: Authority | None = None,
        host: str = "127.0.0.1",
        flags: Sequence[str] = (),
    ) -> None:
        scheme = "http" if authority is None else "https"
        ports = free_ports(2 * count, host)
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
            argv = ["etcd", "--name", f"n{number}", "--data-dir", str(directory / f"n{number}")]
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


def etcdctl(endpoint: str, *words: str, flags: Sequence[str] = ()) -> str:
    return subprocess.run(
        ["etcdctl", "--endpoints", endpoint, *flags, *words],
        env={"ETCDCTL_API": "3", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
