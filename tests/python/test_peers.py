# SPDX-License-Identifier: Apache-2.0
"""Copies of checkpoints in the memory of a neighbour, over real connections of this host."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gpustasis._core import PARENT_LINK, read_manifest
from gpustasis.cli import cli
from gpustasis.draining.drain import drain
from gpustasis.draining.waiting import peer_of
from gpustasis.errors import ImageError, LocalError, PeerError
from gpustasis.image.peer_record import PEER_RECORD
from gpustasis.image.store import list_store
from gpustasis.image.verification import verify_directory
from gpustasis.peers.config import Address, Config
from gpustasis.peers.copies import Copies
from gpustasis.peers.copying import copy, discard, discard_here, fetch, list_copies, require_peer
from gpustasis.peers.room import charge, charge_of
from support.chains import make_link, memory_of
from support.inventory import write_inventory
from support.job_ranks import wait_for
from support.json_output import check_document
from support.local_checkpoints import make_local
from support.peers import Nodes, free_port, serving, write_config

MIB = 1 << 20
START_S = 60.0  # of a service, on a busy machine


def test_a_local_checkpoint_is_in_memory_on_two_nodes(
    nodes: Nodes, keeper: Copies, tmp_path: Path, arena: Path
) -> None:
    images = tmp_path / "store" / "one"
    images.parent.mkdir()
    stored = make_local(images, arena)
    assert peer_of(images) is None
    told: list[tuple[int, int]] = []
    done = copy(images, nodes.sender, on_progress=lambda *count: told.append(count))
    assert told[-1] == (done.bytes, done.bytes)
    (kept,) = keeper.all()
    there = Path(done.peer_directory)
    assert there == keeper.directory / kept.key
    assert (kept.node, kept.store, kept.name) == ("sender", str(images.parent), "one")
    assert not verify_directory(there).problems
    for name in ("gpustasis-7.img", "gpustasis-manifest.img"):
        assert (there / name).read_bytes() == (stored / name).read_bytes()
    record = peer_of(images)
    assert record is not None
    assert (record.peer, record.node) == (str(nodes.sender.peer), "keeper")
    assert record.directory == str(there)
    (listed,) = [one for one in list_store(images.parent) if one.entry.name == "one"]
    assert listed.peer == record.peer
    again = copy(images, nodes.sender)
    assert (again.copies, again.bytes, again.key) == (0, 0, done.key)
    drain(images)
    assert peer_of(images) is None  # it is on the disk: nobody needs to know


def test_what_it_is_built_on_is_copied_too(
    nodes: Nodes, keeper: Copies, tmp_path: Path, arena: Path
) -> None:
    first = make_local(tmp_path / "first", arena)
    make_local(tmp_path / "second", arena, ("A", "b", "C"), parent=first)
    done = copy(tmp_path / "second", nodes.sender)
    assert done.copies == 2
    parent, child = keeper.all()
    assert child.parent == parent.key
    assert os.readlink(keeper.directory / child.key / PARENT_LINK) == f"../{parent.key}"
    assert not verify_directory(keeper.directory / child.key).problems
    assert child.bytes < parent.bytes + 4096  # only what has changed
    third = make_local(tmp_path / "third", arena, ("A", "D", "C"), parent=arena / child.checkpoint)
    assert copy(tmp_path / "third", nodes.sender).copies == 1
    assert len(keeper.all()) == 3
    assert third.is_dir()


def test_a_drained_parent_of_a_local_child_is_sent_as_the_child_needs_it(
    nodes: Nodes, keeper: Copies, tmp_path: Path, arena: Path
) -> None:
    first = make_local(tmp_path / "first", arena, ("a", "b", "c", "d"))
    copy(tmp_path / "first", nodes.sender)
    make_local(tmp_path / "second", arena, ("a", "b", "c", "E"), parent=first)
    drain(tmp_path / "first", compress=False)
    copied = copy(tmp_path / "second", nodes.sender)
    assert copied.copies == 1  # the copy of the first, from memory, is the right one
    assert not verify_directory(Path(copied.peer_directory)).problems
    durable = copy(tmp_path / "first", nodes.sender)
    assert durable.copies == 1  # other bytes, another copy
    assert durable.key[:32] == keeper.all()[0].key[:32]


@pytest.mark.parametrize("keep", [1, 2])
def test_the_newest_are_kept(nodes: Nodes, tmp_path: Path, arena: Path, keep: int) -> None:
    with serving(replace(nodes.keeper, keep=keep)) as server:
        other = tmp_path / "other"
        other.mkdir()
        make_local(other / "x", arena)
        copy(other / "x", nodes.sender)
        for number in range(4):
            stored = make_local(tmp_path / f"s{number}", arena, (f"P{number}", "b"))
            os.utime(stored / "gpustasis-manifest.img", (1000 + number, 1000 + number))
            copy(tmp_path / f"s{number}", nodes.sender)
        names = [one.name for one in server.copies.all()]
        assert names == ["x", *(f"s{number}" for number in range(4 - keep, 4))]
        assert not [name for name in os.listdir(server.copies.directory) if name[0] == "."]


def test_what_a_kept_one_is_built_on_stays(
    nodes: Nodes, keeper: Copies, tmp_path: Path, arena: Path
) -> None:
    at = make_local(tmp_path / "0", arena)
    for number in range(1, 4):
        at = make_local(tmp_path / str(number), arena, ("A", "b", f"P{number}"), parent=at)
        copy(tmp_path / str(number), nodes.sender)
    assert [one.name for one in keeper.all()] == ["0", "1", "2", "3"]
    make_local(tmp_path / "full", arena, ("N", "O"))
    copy(tmp_path / "full", nodes.sender)
    assert [one.name for one in keeper.all()] == ["full"]


def test_a_restore_from_a_copy_keeps_it(
    nodes: Nodes, keeper: Copies, tmp_path: Path, arena: Path
) -> None:
    from gpustasis.image.directory import share

    make_local(tmp_path / "1", arena)
    first = copy(tmp_path / "1", nodes.sender)
    with share(Path(first.peer_directory)):
        make_local(tmp_path / "2", arena, ("C",))
        copy(tmp_path / "2", nodes.sender)
        assert len(keeper.all()) == 2
        with pytest.raises(PeerError, match="is reading"):
            discard(Address("127.0.0.1", nodes.sender.peer.port), nodes.sender, first.key)  # type: ignore[union-attr]
    make_local(tmp_path / "3", arena, ("D",))
    copy(tmp_path / "3", nodes.sender)
    assert [one.name for one in keeper.all()] == ["3"]


def test_it_is_fetched_with_its_chain(
    nodes: Nodes, keeper: Copies, tmp_path: Path, arena: Path
) -> None:
    first = make_local(tmp_path / "first", arena)
    make_local(tmp_path / "second", arena, ("A", "b", "C"), parent=first)
    done = copy(tmp_path / "second", nodes.sender)
    third = nodes.another("third")
    assert third.peer is not None
    out = tmp_path / "new" / "back"
    out.parent.mkdir()
    places = fetch(third.peer, third, done.key, out)
    assert places == [out, out.parent / keeper.all()[0].key]
    assert not verify_directory(out).problems
    assert read_manifest(out).checkpoint_id.hex() == done.key[:32]
    with pytest.raises(Exception, match="is there already"):
        fetch(third.peer, third, done.key, out)
    assert fetch(third.peer, third, done.key, tmp_path / "new" / "twice")[1] == places[1]


def test_only_the_sender_gives_a_copy_up(
    nodes: Nodes, keeper: Copies, tmp_path: Path, arena: Path
) -> None:
    first = make_local(tmp_path / "1", arena)
    make_local(tmp_path / "2", arena, ("A", "C"), parent=first)
    done = copy(tmp_path / "2", nodes.sender)
    other = nodes.another("other")
    assert other.peer is not None
    with pytest.raises(PeerError, match="is of sender"):
        discard(other.peer, other, done.key)
    parent = keeper.all()[0]
    with pytest.raises(PeerError, match="is built on"):
        discard(other.peer, nodes.sender, parent.key)
    discard(other.peer, nodes.sender, done.key)
    discard(other.peer, nodes.sender, parent.key)
    assert keeper.all() == []
    with pytest.raises(PeerError, match="no copy"):
        discard(other.peer, nodes.sender, done.key)


def test_the_node_that_keeps_a_copy_gives_any_up(nodes: Nodes, tmp_path: Path, arena: Path) -> None:
    """Its sender may be gone for good."""
    make_local(tmp_path / "1", arena)
    with serving(replace(nodes.keeper, allow=frozenset({"sender"}))) as server:
        done = copy(tmp_path / "1", nodes.sender)
        # Who is not that node, and asks in its name, is refused.
        with pytest.raises(PeerError, match="is not this node"):
            discard_here(replace(nodes.sender, listen=nodes.keeper.listen), done.key)
        with pytest.raises(PeerError, match="no `listen`"):
            discard_here(nodes.sender, done.key)
        assert [one.key for one in server.copies.all()] == [done.key]
        config = write_config(tmp_path / "keeper.toml", nodes.keeper)
        given = ("--config", config)
        assert run("peer", "discard", done.key[:8], "--here", *given)["key"] == done.key
        assert server.copies.all() == []
        refused = run("peer", "discard", done.key, "--here", *given, status=PeerError.exit_code)
        assert "this node has no copy" in refused["error"]["message"]


def damage(stored: Path) -> None:
    path = stored / "gpustasis-7.img"
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def test_what_is_damaged_is_not_kept(
    nodes: Nodes, keeper: Copies, tmp_path: Path, arena: Path
) -> None:
    damage(make_local(tmp_path / "1", arena, ("A", "B", "C", "D")))
    with pytest.raises(PeerError, match="damaged"):
        copy(tmp_path / "1", nodes.sender)
    assert keeper.all() == []
    assert os.listdir(keeper.directory) == []
    assert not (tmp_path / "1" / PEER_RECORD).exists()


def test_a_copy_that_was_damaged_there_is_not_fetched(
    nodes: Nodes, keeper: Copies, tmp_path: Path, arena: Path
) -> None:
    make_local(tmp_path / "1", arena, ("A", "B", "C", "D"))
    done = copy(tmp_path / "1", nodes.sender)
    damage(Path(done.peer_directory))
    assert nodes.sender.peer is not None
    with pytest.raises(PeerError, match="damaged"):
        fetch(nodes.sender.peer, nodes.sender, done.key, tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("change", [{"limit": 4096}, {"reserve": 1 << 51}])
def test_no_room(nodes: Nodes, tmp_path: Path, arena: Path, change: dict[str, int]) -> None:
    make_local(tmp_path / "1", arena)
    with (
        serving(replace(nodes.keeper, **change)) as server,
        pytest.raises(PeerError, match=r"there is room for .* more"),
    ):
        copy(tmp_path / "1", nodes.sender)
    assert server.copies.all() == []


def test_copies_that_are_older_are_kept_until_the_new_one_is_whole(
    nodes: Nodes, tmp_path: Path, arena: Path
) -> None:
    stored = make_local(tmp_path / "1", arena)
    limit = charge_of(stored) + charge_of(tmp_path / "1") + charge(4096)
    with serving(replace(nodes.keeper, limit=limit)) as server:
        copy(tmp_path / "1", nodes.sender)
        make_local(tmp_path / "2", arena, ("C", "D", "E"))
        with pytest.raises(PeerError, match="there is room"):
            copy(tmp_path / "2", nodes.sender)
        assert [one.name for one in server.copies.all()] == ["1"]


def test_what_cannot_be_copied(nodes: Nodes, keeper: Copies, tmp_path: Path, arena: Path) -> None:
    make_local(tmp_path / "1", arena)
    (tmp_path / "1" / "parent").symlink_to("../0")
    with pytest.raises(PeerError, match="--prev-images-dir"):
        copy(tmp_path / "1", nodes.sender)
    (tmp_path / "1" / "parent").unlink()
    (tmp_path / "1" / "strange.img").symlink_to("/etc/passwd")
    with pytest.raises(PeerError, match="is no file"):
        copy(tmp_path / "1", nodes.sender)
    (tmp_path / "1" / "strange.img").unlink()
    (tmp_path / "1" / "inventory.img").unlink()
    with pytest.raises(ImageError, match="broken off"):
        copy(tmp_path / "1", nodes.sender)
    assert keeper.all() == []
    made = make_link(tmp_path / "durable", {7: memory_of(["A"])})
    write_inventory(tmp_path / "durable", "gpustasis")
    with pytest.raises(ImageError, match="of another checkpoint"):
        copy(tmp_path / "durable", nodes.sender)
    write_inventory(tmp_path / "durable", f"checkpoint-{made.checkpoint_id.hex()}")
    copy(tmp_path / "durable", nodes.sender)
    assert not (tmp_path / "durable" / PEER_RECORD).exists()


# Commands


def run(*words: object, status: int = 0) -> dict[str, Any]:
    result = CliRunner().invoke(cli, [*map(str, words), "--json"])
    assert (result.exit_code == 0) == (status == 0), result.output
    command = " ".join(map(str, words[: 2 if words[0] == "peer" else 1]))
    found = check_document(result.stdout, command)
    assert not status or found["error"]["code"] == status
    return found


def test_commands(
    nodes: Nodes, keeper: Copies, tmp_path: Path, arena: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_config(tmp_path / "peer.toml", nodes.sender)
    monkeypatch.setenv("GPUSTASIS_PEER_CONFIG", str(config))
    images = tmp_path / "store" / "one"
    images.parent.mkdir()
    make_local(images, arena)
    refused = run("wait", images, "--for", "peer", "--timeout", 0.1, status=LocalError.exit_code)
    assert "only in memory yet" in refused["error"]["message"]
    done = run("peer", "copy", images)
    assert done["copies"] == 1
    assert run("wait", images, "--for", "peer")["peer"] == str(nodes.sender.peer)
    assert run("wait", images, "--for", "local")["state"] == "local"
    run("wait", images, "--timeout", 0.1, status=LocalError.exit_code)
    (entry,) = run("list", images.parent)["entries"]
    assert (entry["state"], entry["peer"]) == ("local", str(nodes.sender.peer))
    (listed,) = run("peer", "list")["copies"]
    assert listed["key"] == done["key"]
    ours = write_config(tmp_path / "keeper.toml", nodes.keeper)
    assert run("peer", "list", "--here", "--config", ours)["copies"] == [listed]
    back = run("peer", "fetch", done["key"][:12], "-o", tmp_path / "back")
    assert back["directories"] == [str(tmp_path / "back")]
    # The neighbour lets go of it when it hears that all of it came.
    wait_for(lambda: not keeper._pinned[done["key"]], "the end of the fetch there")
    run("peer", "fetch", "0123", "-o", tmp_path / "none", status=PeerError.exit_code)
    run("drain", images)
    assert run("wait", images, "--for", "peer") == {
        "version": 1,
        "command": "wait",
        "directory": str(images),
        "state": "durable",
        "peer": None,
    }
    assert run("peer", "discard", done["key"][:12], "--at", nodes.sender.peer)["key"] == done["key"]
    assert run("peer", "list")["copies"] == []
    run("peer", "discard", done["key"], status=PeerError.exit_code)


def test_the_service(nodes: Nodes, tmp_path: Path, arena: Path) -> None:
    config = write_config(tmp_path / "keeper.toml", nodes.keeper)
    words = [sys.executable, "-m", "gpustasis", "peer", "serve", "--config", str(config)]
    with subprocess.Popen([*words, "--json"], stdout=subprocess.PIPE, text=True) as service:
        end = time.monotonic() + START_S
        while True:
            try:
                require_peer(nodes.sender)
                break
            except PeerError:
                assert time.monotonic() < end
                time.sleep(0.05)
        make_local(tmp_path / "1", arena)
        copy(tmp_path / "1", nodes.sender)
        assert nodes.sender.peer is not None
        assert len(list_copies(nodes.sender.peer, nodes.sender)) == 1
        service.send_signal(signal.SIGTERM)
        out, _ = service.communicate(timeout=START_S)
    assert service.returncode == 0
    assert check_document(out, "peer serve")["directory"] == str(nodes.keeper.directory)
    with serving(nodes.keeper) as server:  # the next one has what was kept
        assert len(server.copies.all()) == 1


def test_no_two_services_keep_copies_in_one_directory(nodes: Nodes, keeper: Copies) -> None:
    other: Config = replace(nodes.keeper, listen=Address("127.0.0.1", free_port()))
    with pytest.raises(PeerError, match="another server"), serving(other):
        pass
