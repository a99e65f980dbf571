# SPDX-License-Identifier: Apache-2.0
"""The store for one host: what its journal keeps, and whom its server serves."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from gpustasis.errors import StoreError
from gpustasis.jobs.local import Local
from gpustasis.jobs.server import Server
from gpustasis.jobs.store import LeaseGone, Put, Require, Unreachable, WatchLost
from gpustasis.jobs.tree import Tree
from support.job_ranks import ANSWER_S


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def kill(tree: Tree) -> None:
    """What the kernel does with its files."""
    tree._file.close()
    os.close(tree._lock)


def test_what_was_answered_outlasts_the_server(tmp_path: Path) -> None:
    clock = Clock()
    tree = Tree(tmp_path / "journal", clock)
    lease = tree.grant(10)
    revision = tree.write([], [Put("/a", "1"), Put("/b", "2", lease)]).revision
    kill(tree)
    again = Tree(tmp_path / "journal", clock)
    assert again.read(["/a", "/b"]) == tree.read(["/a", "/b"])
    assert again.write([Require("/a", revision)], [Put("/a", "3")]).revision == revision + 1
    clock.now = 9.9
    again.keep(lease)
    clock.now = 19.8
    assert "/b" in again.read(["/b"]).entries
    clock.now = 19.9
    with pytest.raises(LeaseGone):
        again.keep(lease)
    assert "/b" not in again.read(["/b"]).entries
    again.close()


def test_every_torn_end_of_a_journal_is_read(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "journal", Clock())
    for number in range(3):
        tree.write([], [Put("/a", str(number))])
    tree.close()
    whole = (tmp_path / "journal").read_bytes()
    head = whole.index(b"\n") + 1
    for size in range(head, len(whole) + 1):
        (tmp_path / "torn").write_bytes(whole[:size])
        torn = Tree(tmp_path / "torn", Clock())
        complete = whole[:size].count(b"\n") - 1
        found = torn.read(["/a"])
        assert [e.value for e in found.entries.values()] == [str(complete - 1)] * bool(complete)
        assert found.revision == 1 + complete
        torn.close()


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_journal_that_is_damaged_is_not_used(tmp_path: Path, at: int) -> None:
    tree = Tree(tmp_path / "journal", Clock())
    tree.write([], [Put("/a", "1")])
    tree.write([], [Put("/a", "2")])
    tree.close()
    lines = (tmp_path / "journal").read_bytes().splitlines(keepends=True)
    lines[at] = b"x" + lines[at][1:]
    (tmp_path / "journal").write_bytes(b"".join(lines))
    with pytest.raises(StoreError, match=f"line {at + 1}, is damaged"):
        Tree(tmp_path / "journal", Clock())


def test_a_full_disk_ends_the_changes_and_not_what_was_decided(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "journal", Clock())
    tree.write([], [Put("/a", "1")])
    tree._file.close()
    tree._file = open("/dev/full", "ab")  # noqa: SIM115
    with pytest.raises(StoreError, match="No space left"):
        tree.write([], [Put("/a", "2")])
    with pytest.raises(StoreError, match="takes no more changes"):
        tree.write([], [Put("/a", "3")])
    assert tree.read(["/a"]).entries["/a"].value == "1"
    with pytest.raises(OSError, match="No space left"):
        tree._file.close()
    os.close(tree._lock)
    again = Tree(tmp_path / "journal", Clock())
    assert again.read(["/a"]).entries["/a"].value == "1"
    again.close()


def test_two_servers_do_not_use_one_journal(tmp_path: Path) -> None:
    server = Server(tmp_path / "store", tmp_path / "journal")
    with pytest.raises(StoreError, match="in use by another server"):
        Server(tmp_path / "other", tmp_path / "journal")
    server.close()
    Server(tmp_path / "store", tmp_path / "journal").close()


def test_a_client_finds_the_next_server(tmp_path: Path) -> None:
    server = Server(tmp_path / "store", tmp_path / "journal")
    client = Local(tmp_path / "store", ANSWER_S)
    watch = client.watch("/a", client.write([], [Put("/a", "1")]).revision)
    server.close()
    with pytest.raises(WatchLost):
        watch.wait(5)
    with pytest.raises(Unreachable):
        client.read("/a")
    server = Server(tmp_path / "store", tmp_path / "journal")
    assert client.read("/a").entries["/a"].value == "1"
    client.close()
    server.close()


def test_a_change_of_servers_between_two_requests_is_not_noticed(tmp_path: Path) -> None:
    server = Server(tmp_path / "store", tmp_path / "journal")
    client = Local(tmp_path / "store", ANSWER_S)
    client.write([], [Put("/a", "1")])
    server.close()
    server = Server(tmp_path / "store", tmp_path / "journal")
    assert client.write([], [Put("/a", "2")]).applied
    client.close()
    server.close()


def test_another_user_is_not_served(tmp_path: Path) -> None:
    directory = Path(tempfile.mkdtemp(dir="/tmp"))
    directory.chmod(0o755)
    place = directory / "store"
    server = Server(place, tmp_path / "journal")
    place.chmod(0o777)  # the mode alone does not decide
    program = """
import os, socket, sys
ours, theirs = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
ours.connect(sys.argv[1])
os.setgid(int(sys.argv[2]))
os.setuid(int(sys.argv[2]))
theirs.connect(sys.argv[1])
for end in (ours, theirs):
    try:
        end.sendall(b'{"do":"read","keys":["/a"]}\\n')
        print(end.recv(99))
    except OSError:
        print(b"")
"""
    try:
        said = subprocess.run(
            [sys.executable, "-c", program, str(place), "65534"],
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        server.close()
        shutil.rmtree(directory)
    assert said.stdout.splitlines() == [repr(b'{"revision":1,"entries":{}}\n'), "b''"], said.stderr


def test_what_is_no_request_is_refused(tmp_path: Path) -> None:
    server = Server(tmp_path / "store", tmp_path / "journal")
    client = Local(tmp_path / "store", ANSWER_S)
    for request in (
        {},
        {"do": "no"},
        {"do": "read"},
        {"do": "write", "requires": [1], "puts": []},
        {"do": "write", "requires": [], "puts": [["/a/", "", 0]]},
        {"do": "write", "requires": [], "puts": [["/a", "x" * (1 << 20) + "x", 0]]},
        {"do": "grant", "ttl": 0},
    ):
        with pytest.raises(StoreError, match="refused"):
            client._ask(request)
    client.close()
    server.close()


def test_a_watch_of_what_does_not_change_is_quiet(tmp_path: Path) -> None:
    server = Server(tmp_path / "store", tmp_path / "journal")
    client = Local(tmp_path / "store", ANSWER_S)
    after = client.write([], [Put("/a", "1")]).revision
    begin = time.monotonic()
    watch = client.watch("/quiet", after)
    client.write([], [Put("/a", "2")])
    heard = 0
    end = time.monotonic() + 1.2
    while time.monotonic() < end:
        heard += watch._line.hear(0.1) is not None
    assert heard <= 2 + 2 * (time.monotonic() - begin)  # twice a second, that it lives
    assert heard or watch._line.hear(60) is not None
    client.close()
    server.close()


def test_a_watch_does_not_look_at_all_that_ever_changed(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "journal", Clock())
    lease = tree.grant(60)
    for number in range(50_000):
        revision = tree.write([], [Put("/a", str(number), lease)]).revision
    begin = time.thread_time()
    for _ in range(1000):
        changes, until = tree.changes("/a", revision - 1)
        assert ([change.revision for change in changes], until) == ([revision], revision)
    assert time.thread_time() - begin < 0.5  # through all of it: more than 1.5 s
    tree.close()
