# SPDX-License-Identifier: Apache-2.0
"""A stream of a checkpoint, made by hand, and a receiver of one."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from pathlib import Path

from gpustasis.criu.run import Run
from gpustasis.streaming.answers import Replies
from gpustasis.streaming.channel import Descriptor
from gpustasis.streaming.records import (
    DATA_SIZE,
    STREAM_MAGIC,
    Contents,
    Decoder,
    Encoder,
    Entry,
    Header,
    Kind,
)

INVENTORY = struct.pack("<II", 0x58313116, 2) + b"\x08\x02"
PSTREE = struct.pack("<III", 0x54564319, 0x50273030, 10) + b"\x08\x05\x10\0\x18\x05\x20\x05\x28\x05"
FILES = {"pstree.img": PSTREE, "inventory.img": INVENTORY}


def stream_of(files: dict[str, bytes], outcome: Kind | None, **header: int) -> bytes:
    """These files, then that outcome; None: the stream ends without one."""
    encoder = Encoder(STREAM_MAGIC, Header(stream_id=bytes(range(16)), **header))  # type: ignore[arg-type]
    parts = [encoder.header]
    for name, content in files.items():
        parts.append(bytes(encoder.file(Entry(name=name, mode=0o600, size=len(content)))))
        pieces = (content[at : at + DATA_SIZE] for at in range(0, len(content), DATA_SIZE))
        parts += [bytes(encoder.record(Kind.DATA, piece)) for piece in pieces]
    parts.append(bytes(encoder.end(len(files), sum(map(len, files.values())))))
    if outcome is not None:
        parts.append(bytes(encoder.record(outcome)))
    return b"".join(parts)


def follow(
    source: Descriptor, at_end: Callable[[Replies, bytes], None], wait_s: float = 10.0
) -> tuple[Replies, Kind]:
    """Receive all of a stream, until its outcome. at_end: answers when all has come, and is given
    its hash."""
    replies = Replies(source, wait_s)
    replies.tell(Kind.HELLO, program="a test")
    decoder = Decoder(lambda space: source.fill(space, wait_s, lambda: None), STREAM_MAGIC, "it")
    header, contents = decoder.header(), Contents("it")
    while contents.outcome is None:
        record = decoder.record()
        if record.kind is Kind.FILE:
            contents.file(record)
        elif record.kind is Kind.DATA:
            contents.data(record)
        elif record.kind is Kind.END:
            contents.end(record)
            at_end(replies, record.digest)
        else:
            contents.other(record, header)
    return replies, contents.outcome


def write_images(images: Path, files: Mapping[str, bytes]) -> None:
    """As the plugin writes them: a file has its name when it is complete, and may be sent then."""
    part = images / ".part"
    for name, content in files.items():
        part.write_bytes(content)
        part.rename(images / name)


def a_run(pid: int, images: Path) -> Run:
    return Run(pid=pid, criu_version="4.3", log=images / "log", seconds=0.0, statistics=None)
