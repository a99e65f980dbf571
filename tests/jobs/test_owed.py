# SPDX-License-Identifier: Apache-2.0
"""What a keeper still has to tell the neighbour: it is told, if need be by the next keeper."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpustasis.jobs.aftercare import Aftercare
from gpustasis.jobs.owed import OWED, Owed, What
from gpustasis.jobs.place import Place, place_of
from gpustasis.peers.copying import copy
from support.job_ranks import wait_for
from support.local_checkpoints import make_local
from support.peers import Nodes, make_nodes, serving, write_config

PEER, KEYS = "127.0.0.1:7411", [f"{digit * 32}-{16 * '0'}" for digit in "abc"]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    found = place_of("job", 0, tmp_path / "kept", tmp_path / "run")
    found.make()
    return found


@pytest.fixture
def nodes(tmp_path: Path, arena: Path, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    arena.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = make_nodes(tmp_path / "certificates", arena.parent / "peers")
    place = write_config(tmp_path / "peer.toml", made.sender)
    monkeypatch.setenv("GPUSTASIS_PEER_CONFIG", str(place))
    monkeypatch.setattr("gpustasis.jobs.aftercare._AGAIN_S", 0.2)
    return made


@pytest.fixture
def aftercare(place: Place) -> Iterator[Aftercare]:
    made = of(place)
    yield made
    made.close()


def of(place: Place) -> Aftercare:
    return Aftercare(place, is_open=lambda images: False, drained=lambda *facts: None)


def test_the_next_keeper_knows_what_was_sent_and_what_is_owed(place: Place) -> None:
    owed = Owed(place)
    assert owed.copy_of(place.images(1)) is None
    for number in (1, 2):
        place.images(number).mkdir()
    owed.sent(place.images(1), PEER, KEYS[0])
    owed.sent(place.images(2), PEER, KEYS[1])
    owed.add(What.FORGET, PEER, KEYS[2])
    later = Owed(place)
    assert later.copy_of(place.images(1)) == (PEER, KEYS[0])
    assert later.first() == (What.FORGET, PEER, KEYS[2])
    # What becomes of the copy takes the place of what is known of it.
    later.add(What.DROP_OLDER, PEER, KEYS[0])
    assert later.copy_of(place.images(1)) is None
    later.later((What.FORGET, PEER, KEYS[2]))
    assert later.first() == (What.DROP_OLDER, PEER, KEYS[0])
    later.done((What.DROP_OLDER, PEER, KEYS[0]))
    last = Owed(place)
    assert last.copy_of(place.images(2)) == (PEER, KEYS[1])
    assert last.first() == (What.FORGET, PEER, KEYS[2])
    # A later dump of that name is not what was sent.
    place.images(2).rmdir()
    last.done((What.FORGET, PEER, KEYS[2]))
    place.images(2).mkdir()
    assert Owed(place).copy_of(place.images(2)) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"sent": {"a": 5}, "errands": []}',
        '{"sent": {}, "errands": [["burn", 1, 2]]}',
    ],
)
def test_a_file_that_is_damaged_is_told_and_written_anew(
    place: Place, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    (place.directory / OWED).write_text(text)
    owed = Owed(place)
    assert "cannot be used" in caplog.text
    assert owed.first() is None
    owed.add(What.FORGET, PEER, KEYS[0])
    assert Owed(place).first() == (What.FORGET, PEER, KEYS[0])


def test_what_the_neighbour_was_not_told_it_is_told_later(
    place: Place, aftercare: Aftercare, nodes: Nodes, arena: Path
) -> None:
    make_local(place.images(1), arena)
    with serving(nodes.keeper):
        done = copy(place.images(1), nodes.sender, replaces=False)
    aftercare.forget(done.peer, done.key)  # nobody is there
    aftercare.wait()  # and that is waited for only until it was tried
    assert Owed(place).first() == (What.FORGET, done.peer, done.key)
    # Before the neighbour is there again: it may be told in that moment.
    assert [one.name for one in nodes.keeper.directory.glob(f"{done.key[:32]}-*")] == [done.key]
    with serving(nodes.keeper) as server:
        wait_for(lambda: server.copies.all() == [], "the copy to go")
    wait_for(lambda: Owed(place).first() is None, "the errand to be done")


def test_what_a_killed_keeper_has_not_told_the_next_one_tells(
    place: Place, nodes: Nodes, arena: Path
) -> None:
    keys = []
    with serving(nodes.keeper) as server:
        for number in (1, 2):
            stored = make_local(place.images(number), arena, (f"P{number}",))
            os.utime(stored / "gpustasis-manifest.img", (1000 + number, 1000 + number))
            keys.append(copy(place.images(number), nodes.sender, replaces=False).key)
        Owed(place).add(What.DROP_OLDER, str(nodes.sender.peer), keys[1])
        assert len(server.copies.all()) == 2
        next_one = of(place)
        next_one.wake()
        wait_for(lambda: [one.key for one in server.copies.all()] == keys[1:], "the older to go")
        next_one.close()


def test_it_is_told_where_nothing_is_in_memory_any_more(
    place: Place, aftercare: Aftercare, nodes: Nodes, tmp_path: Path, arena: Path
) -> None:
    """Somebody has drained it before: the keeper's thread has not begun."""
    keys = []
    with serving(nodes.keeper) as server:
        for number in (1, 2):
            images = tmp_path / "elsewhere" / f"epoch-{number}"
            images.parent.mkdir(exist_ok=True)
            stored = make_local(images, arena, (f"P{number}",))
            os.utime(stored / "gpustasis-manifest.img", (1000 + number, 1000 + number))
            keys.append(copy(images, nodes.sender, replaces=False).key)
        aftercare.committed(place.images(2), str(nodes.sender.peer), keys[1], is_base=False)
        aftercare.wake()
        assert aftercare.wait() == {}
        assert [one.key for one in server.copies.all()] == keys[1:]


def test_a_copy_that_is_gone_is_owed_no_longer(
    place: Place, aftercare: Aftercare, nodes: Nodes
) -> None:
    with serving(nodes.keeper):
        aftercare.forget(str(nodes.sender.peer), KEYS[0])
        assert aftercare.wait() == {}
    assert Owed(place).first() is None
