# SPDX-License-Identifier: Apache-2.0
"""Write a checkpoint that is on the disk as one stream: into a file, or through a pipe to wherever
it is to be kept."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpustasis.criu.images import INVENTORY_NAME
from gpustasis.criu.images import PARENT_LINK as CRIU_PARENT_LINK
from gpustasis.errors import ImageError, StreamError
from gpustasis.image.arena import require_durable
from gpustasis.image.checkpoint import parent_directory, require_not_sealed
from gpustasis.image.directory import is_there, shared
from gpustasis.image.peer_record import PEER_RECORD
from gpustasis.streaming import sealed, spool
from gpustasis.streaming.records import STREAM_MAGIC, Encoder, Header, Kind
from gpustasis.streaming.send import Sent, Target, identity_of, is_sent, send_file
from gpustasis.streaming.signals import Signals


def require_sendable(images: Path) -> None:
    """Raise ImageError, SealError if no stream can hold the checkpoint in `images`."""
    require_not_sealed(images)
    if parent_directory(images) is not None or is_there(images / CRIU_PARENT_LINK):
        raise ImageError(
            f"{images} is built on an earlier checkpoint, which no stream holds: drain it, make a "
            f"copy that needs no other (`gpustasis flatten {images} -o DIR`), and send that"
        )


def _files_of(images: Path) -> list[Path]:
    """What is told of a copy at a neighbour is of this directory alone."""
    return [path for path in images.iterdir() if is_sent(path) and path.name != PEER_RECORD]


@contextmanager
def _errors(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise StreamError(f"{what}: {exc.strerror}") from exc


def send_finished(images: Path, target: Target) -> Sent:
    """Write all of the checkpoint in `images`; nobody answers. The stream says that its job may run
    on: `restore -i` asks for --source-may-run.

    Raises StreamError if it cannot be written, or the checkpoint changes meanwhile; ImageError if
    there is no whole one, LocalError if it is not drained. A file gets its name when it is synced.
    """
    begin = time.monotonic()
    sent = Sent(stream_id=secrets.token_bytes(16), images=images)
    encoder = Encoder(
        STREAM_MAGIC,
        Header(stream_id=sent.stream_id, answered=False, left_running=True, required_features=0),
    )
    with Signals() as signals, shared((images,)):
        require_durable(images, "send it as a stream")
        require_sendable(images)
        if not is_there(images / INVENTORY_NAME):
            raise ImageError(f"{images}: no {INVENTORY_NAME}: there is no checkpoint")
        unsynced = 0

        def write(data: memoryview | bytes) -> None:
            nonlocal unsynced
            signals.check()
            target.out.write(data, target.timeout_s, signals.check)
            unsynced += len(data)
            if target.out.regular and unsynced > spool.SYNC_EVERY:
                with _errors(f"cannot write {target.out.place}"):
                    os.fdatasync(target.out.fd)
                unsynced = 0

        write(encoder.header)
        found = {}
        with _errors(f"cannot read {images}"):
            paths = sealed.in_order(_files_of(images))
        for path in paths:
            sealed.require_fit(path.name, sealed=False)
            with _errors(f"cannot send {path}"):
                found[path] = identity_of(send_file(path, encoder, write, sent))
        for path, before in found.items():
            with _errors(f"cannot look at {path}"):
                now = identity_of(path.lstat())
            if now != before:
                raise StreamError(f"{path} was changed while it was sent")
        write(encoder.end(sent.files, sent.bytes))
        write(encoder.record(Kind.LEFT_RUNNING))
        if target.name_file is not None:
            with _errors(f"cannot write {target.out.place}"):
                os.fsync(target.out.fd)
                target.name_file()
        target.out.end_writing()
    sent.seconds = time.monotonic() - begin
    return sent
