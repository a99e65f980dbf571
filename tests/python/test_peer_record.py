# SPDX-License-Identifier: Apache-2.0
"""The note that a neighbour has a copy: what makes it one that cannot be read, and that a
checkpoint is whole with such a one."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from gpustasis.draining.drain import drain
from gpustasis.draining.waiting import _warn_once, peer_of, wait_for
from gpustasis.errors import PeerError
from gpustasis.image.arena import Tier
from gpustasis.image.peer_record import PEER_RECORD, PeerRecord, write_peer_record
from gpustasis.image.store import list_store, why_not_whole
from gpustasis.peers.copying import copy
from python.test_peer_hostile import lying
from support.local_checkpoints import make_local
from support.peers import Nodes


@pytest.fixture
def images(tmp_path: Path, arena: Path) -> Path:
    """Of a checkpoint in memory."""
    place = tmp_path / "store" / "one"
    place.parent.mkdir()
    make_local(place, arena)
    _warn_once.cache_clear()
    return place


@pytest.mark.parametrize("text", [b"", b"{}", b'{"version": 2}', b"{" + b" " * (16 << 10)], ids=len)
def test_one_that_cannot_be_read_takes_nothing_from_the_checkpoint(
    images: Path, text: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Jobs restore what is whole, and build on it."""
    (images / PEER_RECORD).write_bytes(text)
    (found,) = list_store(images.parent)
    assert (found.problem, found.peer) == ("", None)
    assert why_not_whole(images) == ""
    words = f"whether a neighbour has a copy of {images} cannot be told: {images / PEER_RECORD}"
    assert words in caplog.text


def test_one_that_cannot_be_read_is_waited_past(
    images: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A new copy may come, or a drain; and it is told once."""
    (images / PEER_RECORD).write_bytes(b"damaged")
    assert wait_for(images, Tier.LOCAL, None) is Tier.LOCAL
    assert peer_of(images) is None
    assert wait_for(images, Tier.DURABLE, 0.3, on_peer=True) is Tier.LOCAL
    assert caplog.text.count("whether a neighbour has a copy cannot be told") == 1
    draining = threading.Timer(0.2, drain, [images])
    draining.start()
    assert wait_for(images, Tier.DURABLE, 60.0, on_peer=True) is Tier.DURABLE
    draining.join()


def says(directory: str) -> Mapping[str, object]:
    return {"have": [], "directory": directory}


def test_a_directory_that_is_too_long_is_refused(nodes: Nodes, images: Path) -> None:
    """Before anything is sent: the note would be longer than what is read of it."""
    long = "/" + "d" * 4096
    with (
        lying(nodes, says(long)),
        pytest.raises(PeerError, match="names a directory of its copies with 4097 characters"),
    ):
        copy(images, nodes.sender)
    assert not (images / PEER_RECORD).exists()


def test_what_could_not_be_read_again_is_not_written(images: Path) -> None:
    """A character may take twelve."""
    record = PeerRecord(
        checkpoint="0" * 32,
        peer="host:1",
        node="n",
        key="k",
        directory="\N{PILE OF POO}" * 4096,
        time=1.0,
        bytes=1,
    )
    with pytest.raises(OSError, match=r"it would have [0-9]+ bytes, and no more than 16384"):
        write_peer_record(images, record)
    assert not (images / PEER_RECORD).exists()
