# SPDX-License-Identifier: Apache-2.0
"""The receiver of a stream without CRIU: what it keeps, what it drops, and what it says of that."""

from __future__ import annotations

import socket
from contextlib import closing
from pathlib import Path

import pytest

from gpustasis._core import MANIFEST_NAME, image_name
from gpustasis.criu.run import Run
from gpustasis.errors import CheckpointError, CriuError, StreamError
from gpustasis.streaming import receive, spool
from gpustasis.streaming.answers import Replies
from gpustasis.streaming.channel import Descriptor
from gpustasis.streaming.records import ANSWER_MAGIC, Decoder, Kind, parse_text
from support.chains import checkpoint_id, make_link, memory_of
from support.streams import FILES, INVENTORY, PSTREE, a_run, stream_of


@pytest.fixture
def received(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(spool, "RECEIVED", tmp_path / "received")
    return tmp_path / "received"


def take(
    raw: bytes,
    at: Path,
    restore: receive.Restore,
    replies: Descriptor | None = None,
    **options: object,
) -> receive.Received:
    """Receive that from a file. replies: where the sender is answered."""
    path = at / "job.gps"
    path.write_bytes(raw)
    with path.open("rb") as file, closing(Descriptor(file.fileno(), "it", writing=False)) as stream:
        source = receive.Source(
            stream=stream,
            replies=Replies(replies, 5),
            program="a test",
            timeout_s=5,
            **options,  # type: ignore[arg-type]
        )
        return receive.receive(source, restore)


def restored(directory: Path) -> Run:
    assert (directory / "inventory.img").read_bytes() == INVENTORY
    return a_run(5, directory)


def fails(directory: Path) -> Run:
    raise CriuError("pid 5 is in use")


def test_a_file_that_could_not_be_restored_can_be_tried_again(
    received: Path, tmp_path: Path
) -> None:
    raw = stream_of(FILES, Kind.LEFT_RUNNING, left_running=True)
    with pytest.raises(CriuError) as failed:
        take(raw, tmp_path, fails, may_run=True)
    assert "has ended where" not in str(failed.value)
    assert list(received.iterdir()) == []
    with pytest.raises(CriuError, match=r"has ended where it came from, .*restore -D"):
        take(stream_of(FILES, Kind.RELEASED), tmp_path, fails, place=tmp_path / "in")
    assert (tmp_path / "in" / "inventory.img").exists()
    assert take(raw, tmp_path, restored, may_run=True).files == 2


def test_the_log_of_a_restore_that_failed_is_kept(
    received: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was received is gone, and the message names the log."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def fails_and_says(directory: Path) -> Run:
        (directory / "restore.log").write_text("pid 5 is in use\n")
        raise CriuError(f"criu 4.3 restore failed\n  full log: {directory / 'restore.log'}")

    with pytest.raises(CriuError) as failed:
        take(stream_of(FILES, Kind.RELEASED), tmp_path, fails_and_says)
    (kept,) = tmp_path.glob("gpustasis-*-restore.log")
    assert kept.read_text() == "pid 5 is in use\n"
    assert f"full log: {kept}; the checkpoint is still in it" in str(failed.value)
    assert list(received.iterdir()) == []


@pytest.mark.parametrize("kept", [True, False])
def test_the_sender_is_told_only_of_what_stays(
    received: Path, tmp_path: Path, *, kept: bool
) -> None:
    near, far = socket.socketpair()
    place = tmp_path / "in" if kept else None
    with near, far, closing(Descriptor(near.fileno(), "it", writing=True)) as back:
        take(stream_of(FILES, Kind.RELEASED), tmp_path, restored, replies=back, place=place)
        with closing(Descriptor(far.fileno(), "there", writing=False)) as source:
            decoder = Decoder(lambda space: source.fill(space, 5, lambda: None), ANSWER_MAGIC, "it")
            decoder.header()
            while (record := decoder.record()).kind is not Kind.RESTORED:
                pass
            said = parse_text(record, "it")
    log = "" if place is None else str(place / "log")
    assert (said["directory"], said["log"]) == (str(place or ""), log)


def test_what_cannot_be_restored_here_is_never_ready(received: Path, tmp_path: Path) -> None:
    def refuse(directory: Path) -> None:
        raise StreamError("no such GPU here")

    with pytest.raises(StreamError, match="no such GPU here"):
        take(stream_of(FILES, Kind.RELEASED), tmp_path, restored, require=refuse)
    assert list(received.iterdir()) == []


def test_nothing_is_taken_from_what_is_stored_here(received: Path, tmp_path: Path) -> None:
    """A stream that says that it is built on a checkpoint of this host, whose id somebody knows."""
    first, second = tmp_path / "first", tmp_path / "second"
    make_link(first, {5: memory_of(["A1"])})
    manifest = make_link(second, {5: memory_of(["A2"])}, parent=first)
    assert manifest.parent_id == checkpoint_id(first.name)
    names = ("pstree.img", MANIFEST_NAME, image_name(5), "inventory.img")
    (second / "pstree.img").write_bytes(PSTREE)
    files = {name: (second / name).read_bytes() for name in names}
    with pytest.raises(StreamError, match="is built on an earlier checkpoint"):
        take(stream_of(files, Kind.RELEASED), tmp_path, restored)
    assert list(received.iterdir()) == []
    make_link(whole := tmp_path / "whole", {5: memory_of(["A2"])})
    for name in (MANIFEST_NAME, image_name(5), "inventory.img"):
        files[name] = (whole / name).read_bytes()
    assert take(stream_of(files, Kind.RELEASED), tmp_path, a_run_there).files == 4


def a_run_there(directory: Path) -> Run:
    return a_run(5, directory)


def test_nothing_else_follows_where_the_outcome_is_missing(received: Path, tmp_path: Path) -> None:
    raw = stream_of(FILES, None)
    with pytest.raises(StreamError, match="does not say that the job has ended"):
        take(raw + b"junk" * 99, tmp_path, restored, may_run=True)
    with pytest.raises(StreamError, match="does not say that the job has ended"):
        take(raw, tmp_path, restored)
    assert take(raw, tmp_path, restored, may_run=True).files == 2


def test_a_process_tree_that_is_too_large(
    received: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert take(stream_of(FILES, Kind.RELEASED), tmp_path, restored).files == 2
    monkeypatch.setattr("gpustasis.criu.images._FILE_LIMIT", len(PSTREE) - 1)
    with pytest.raises(CheckpointError, match="is larger than the"):
        take(stream_of(FILES, Kind.RELEASED), tmp_path, restored)
