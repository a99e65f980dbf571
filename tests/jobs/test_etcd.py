# SPDX-License-Identifier: Apache-2.0
"""Clusters, certificates, passwords, and what is said when etcd is not there."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpustasis.errors import StoreError
from gpustasis.jobs.etcd import Etcd
from gpustasis.jobs.etcd_words import Access
from gpustasis.jobs.store import Put, Require, Unreachable, WatchLost
from support.certificates import Authority
from support.etcd import EtcdCluster, etcdctl, running

KEY = "/gpustasis/a"


@contextlib.contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """The address of a server that answers so, once."""

    def serve() -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread.join()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[EtcdCluster]:
    """It loses no leader to a machine that is busy for a second."""
    slow = ["--heartbeat-interval", "500", "--election-timeout", "5000"]
    with running(EtcdCluster(tmp_path, 3, flags=slow)) as cluster:
        yield cluster


@pytest.fixture
def single(tmp_path: Path) -> Iterator[EtcdCluster]:
    """Of one server."""
    with running(EtcdCluster(tmp_path)) as cluster:
        yield cluster


def test_a_lost_server_is_not_noticed(cluster: EtcdCluster) -> None:
    store = Etcd(Access(endpoints=cluster.endpoints, timeout_s=20))
    store.write([], [Put(KEY, "1")])
    cluster.servers[0].kill()
    deadline = time.monotonic() + 60
    values = {"1"}
    while True:  # a new leader may have to be elected first
        try:
            assert store.read(KEY).entries[KEY].value in values
            values.add("2")  # what is not answered may have been done
            assert store.write([], [Put(KEY, "2")]).applied
            break
        except Unreachable:
            assert time.monotonic() < deadline
    store.close()


def test_a_server_that_hangs_is_passed_over(cluster: EtcdCluster) -> None:
    store = Etcd(Access(endpoints=cluster.endpoints, timeout_s=20))
    store.write([], [Put(KEY, "1")])
    process = cluster.servers[0].process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    assert store.read(KEY).entries[KEY].value == "1"
    store.close()


@pytest.mark.parametrize("writes", [True, False])
def test_a_write_is_sent_once(writes: bool) -> None:
    requests: list[bytes] = []

    def serve(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            requests.append(connection.recv(65536))

    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    threads = [threading.Thread(target=serve, args=(server,), daemon=True) for server in servers]
    for thread in threads:
        thread.start()
    urls = tuple(f"http://127.0.0.1:{server.getsockname()[1]}" for server in servers)
    store = Etcd(Access(endpoints=urls))
    with pytest.raises(Unreachable):
        if writes:
            store.write([], [Put(KEY, "1")])
        else:
            store.read(KEY)
    assert len(requests) == (1 if writes else 2)
    for server in servers:
        if len(requests) == 1:  # let the other thread end
            with contextlib.suppress(OSError):
                socket.create_connection(server.getsockname(), timeout=1).close()
    for thread in threads:
        thread.join()
    for server in servers:
        server.close()
    store.close()


def test_a_minority_decides_nothing(cluster: EtcdCluster) -> None:
    calm = Etcd(Access(endpoints=cluster.endpoints, timeout_s=20))
    store = Etcd(Access(endpoints=cluster.endpoints, timeout_s=0.5))
    first = calm.write([], [Put(KEY, "1")])
    cluster.servers[1].kill()
    cluster.servers[2].kill()
    with pytest.raises(Unreachable):
        store.read(KEY)
    with pytest.raises(Unreachable):
        store.write([Require(KEY, first.revision)], [Put(KEY, "2")])
    cluster.servers[1].start()
    cluster.wait()
    assert calm.read(KEY).entries[KEY].value in {"1", "2"}  # it may have been done: nobody knows
    for one in (store, calm):
        one.close()


def test_a_watch_whose_server_dies_is_lost(single: EtcdCluster) -> None:
    store = Etcd(Access(endpoints=single.endpoints))
    watch = store.watch(KEY, store.read(KEY).revision)
    for server in single.servers:
        server.kill()
    with pytest.raises(WatchLost):
        watch.wait(20)
    with pytest.raises(WatchLost):
        watch.wait(0)
    store.close()


def test_what_was_compacted_is_not_passed_over(single: EtcdCluster) -> None:
    store = Etcd(Access(endpoints=single.endpoints))
    first = store.write([], [Put(KEY, "1")]).revision
    last = store.write([], [Put(KEY, "2")]).revision
    etcdctl(single.endpoints[0], "compact", str(last))
    with pytest.raises(WatchLost, match="compacted"):
        store.watch(KEY, first - 1).wait(20)
    store.close()


def test_what_is_compacted_while_it_is_read_is_read_anew(
    single: EtcdCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = (Etcd(Access(endpoints=single.endpoints)) for _ in range(2))
    names = [f"{KEY}/{number:04}" for number in range(1500)]
    for start in range(0, len(names), 100):
        store.write([], [Put(name, "1") for name in names[start : start + 100]])
    ask, answers = store._ask, 0

    def ask_and_compact(path: str, body: Mapping[str, Any], *, again: bool) -> dict[str, Any]:
        nonlocal answers
        answer = ask(path, body, again=again)
        answers += 1
        if answers == 1:  # of three: the second one is refused then
            last = other.write([], [Put(name, "2") for name in (names[0], names[-1])]).revision
            etcdctl(single.endpoints[0], "compact", str(last))
        return answer

    monkeypatch.setattr(store, "_ask", ask_and_compact)
    found = store.read(f"{KEY}/").entries
    assert sorted(found) == names
    assert [found[name].value for name in (names[0], names[1], names[-1])] == ["2", "1", "2"]
    assert answers == 3
    for each in (store, other):
        each.close()


def test_certificates_of_both_sides(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    cluster = EtcdCluster(tmp_path, authority=authority)
    pair = authority.client("rank")
    access = Access(
        endpoints=cluster.endpoints,
        ca=str(authority.certificate),
        certificate=str(pair.certificate),
        key=str(pair.key),
    )
    try:
        cluster.wait(access)
        store = Etcd(access)
        watch = store.watch(KEY, store.read(KEY).revision)
        store.write([], [Put(KEY, "1")])
        assert [change.key for change in watch.wait(20)] == [KEY]
        store.close()
        with pytest.raises(Unreachable, match="certificate verify failed"):
            Etcd(replace(access, ca=str(other.certificate))).read(KEY)
        with pytest.raises(Unreachable):
            Etcd(replace(access, certificate="", key="")).read(KEY)
        with pytest.raises(StoreError, match="cannot use the certificates"):
            Etcd(replace(access, key=str(other.client("rank").key)))
    finally:
        cluster.close()


def test_user_and_password(tmp_path: Path) -> None:
    cluster = EtcdCluster(tmp_path)
    try:
        cluster.wait()
        url = cluster.endpoints[0]
        etcdctl(url, "user", "add", "root:secret")
        etcdctl(url, "user", "add", "rank:word")
        etcdctl(url, "role", "add", "ranks")
        etcdctl(
            url, "role", "grant-permission", "ranks", "--prefix=true", "readwrite", "/gpustasis/"
        )
        etcdctl(url, "user", "grant-role", "rank", "ranks")
        etcdctl(url, "user", "grant-role", "root", "root")
        etcdctl(url, "auth", "enable")
        access = Access(endpoints=(url,), user="rank", password="word")
        store = Etcd(access)
        watch = store.watch("/gpustasis/", store.read(KEY).revision)
        lease = store.grant(60)
        store.write([], [Put(KEY, "1", lease)])
        store.keep(lease)
        assert [change.key for change in watch.wait(20)] == [KEY]
        with pytest.raises(StoreError, match="permission denied"):
            store.read("/elsewhere")
        cluster.servers[0].kill()  # its tokens are forgotten with it
        cluster.servers[0].start()
        cluster.wait(access)
        store.keep(lease)
        assert store.read(KEY).entries[KEY].value == "1"
        store.close()
        with pytest.raises(StoreError, match="authentication failed") as caught:
            Etcd(replace(access, password="wrong")).read(KEY)
        assert not isinstance(caught.value, Unreachable)
        assert "wrong" not in repr(replace(access, password="wrong"))
    finally:
        cluster.close()


@pytest.mark.parametrize("kind", ["simple", "jwt"])
def test_a_change_of_users_does_not_cut_off_those_that_stay(kind: str, tmp_path: Path) -> None:
    pair = Authority(tmp_path).client("tokens")
    public = ["openssl", "x509", "-in", str(pair.certificate), "-noout", "-pubkey"]
    (tmp_path / "public").write_bytes(
        subprocess.run(public, check=True, capture_output=True).stdout
    )
    keys = f"pub-key={tmp_path / 'public'},priv-key={pair.key},sign-method=ES256"
    words = {"simple": "simple", "jwt": f"jwt,{keys}"}
    cluster = EtcdCluster(tmp_path, flags=["--auth-token", words[kind]])
    try:
        cluster.wait()
        url = cluster.endpoints[0]
        etcdctl(url, "user", "add", "root:secret")
        etcdctl(url, "user", "grant-role", "root", "root")
        etcdctl(url, "auth", "enable")
        store = Etcd(Access(endpoints=(url,), user="root", password="secret"))
        store.write([], [Put(KEY, "1")])
        flags = ["--user", "root:secret"]
        etcdctl(url, "user", "add", "other:word", flags=flags)
        assert store.write([], [Put(KEY, "2")]).applied
        etcdctl(url, "user", "delete", "other", flags=flags)
        assert store.read(KEY).entries[KEY].value == "2"
        store.close()
    finally:
        cluster.close()


def test_nobody_there_is_said_with_its_address() -> None:
    with pytest.raises(Unreachable, match=r"http://127\.0\.0\.1:1: .*refused"):
        Etcd(Access(endpoints=("http://127.0.0.1:1",))).read(KEY)


def test_a_server_that_says_nothing_is_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        begin = time.monotonic()
        with pytest.raises(Unreachable, match="timed out"):
            Etcd(Access(endpoints=(url,), timeout_s=0.3)).read(KEY)
        assert time.monotonic() - begin < 10


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        ("502 Bad Gateway", b"<html>", Unreachable),
        ("404 Not Found", b'{"error":"Not Found","code":5}', StoreError),
        ("200 OK", b'{"error":{"grpc_code":14,"message":"no leader"}}', Unreachable),
        ("503 Unavailable", b'{"error":{"grpc_code":14,"message":"no leader"}}', Unreachable),
    ],
)
def test_an_error_is_what_it_is(status: str, body: bytes, kind: type[StoreError]) -> None:
    with answering(
        f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    ) as url:
        store = Etcd(Access(endpoints=(url,)))
        with pytest.raises(StoreError) as caught:
            store.read(KEY)
        assert caught.type is kind
        store.close()


@pytest.mark.parametrize(
    "body",
    [
        *(
            b"",
            b"[]",
            b"{",
            b'{"header": 5}',
            b'{"header":{"revision":"x"}}',
            b'{"responses":[{}]}',
        ),
        b'{"header":{"revision":"5"}}',  # it would be read as: there is no such entry
        b'{"header":{"revision":"5"},"responses":[{"response_range":{"more":true}}]}',
    ],
)
def test_an_answer_that_is_none_is_refused(body: bytes) -> None:
    with answering(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body) as url:
        store = Etcd(Access(endpoints=(url,)))
        with pytest.raises(StoreError):
            store.read(KEY)
        store.close()


@pytest.mark.parametrize(
    "url",
    ["127.0.0.1:2379", "ftp://a:1", "http://", "http://a:x", "http://a:1/path", "http://b:c@a:1"],
)
def test_an_endpoint_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(StoreError, match="endpoint"):
        Etcd(Access(endpoints=(url,)))
