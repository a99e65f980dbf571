# SPDX-License-Identifier: Apache-2.0
"""What the receiver of a stream says while the sender is busy, or has had enough of it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from gpustasis._core import ENVELOPE_NAME, DataKey, FreshKey
from gpustasis.criu.run import Run
from gpustasis.errors import CriuError, StreamError
from gpustasis.sealing.keys import KeyFile
from gpustasis.streaming.answers import Answers, Replies
from gpustasis.streaming.channel import Descriptor
from gpustasis.streaming.records import (
    ANSWER_MAGIC,
    STREAM_MAGIC,
    Contents,
    Decoder,
    Encoder,
    Header,
    Kind,
)
from gpustasis.streaming.sealed import Opening
from gpustasis.streaming.send import Sent, Target, send
from support.certificates import Pair
from support.job import TIMEOUT_S
from support.recipients import make_recipient
from support.streams import FILES, a_run, write_images

STALL_S = 6.0  # a machine that is busy does not stand still so long
LARGE = {"gpustasis-sealed.img": bytes(16 << 20)}  # more than a socket holds


@pytest.fixture
def job() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"]) as child:
        yield child
        child.kill()


@contextmanager
def pair_of_ends() -> Iterator[tuple[Descriptor, Answers, Descriptor]]:
    """The sender's out and answers, and the receiver's end."""
    near, far = socket.socketpair()
    with near, far:
        out = Descriptor(near.fileno(), "the sender", writing=True)
        back = Descriptor(near.fileno(), "the receiver", writing=False)
        end = Descriptor(far.fileno(), "the receiver's end", writing=True)
        with closing(out), closing(back), closing(end), closing(Answers(back, STALL_S)) as answers:
            yield out, answers, end


def test_a_receiver_that_never_stops_talking_holds_nobody_up(tmp_path: Path) -> None:
    """There is always more to read, as in a file."""
    encoder = Encoder(ANSWER_MAGIC, Header())
    said = tmp_path / "said"
    with said.open("wb") as file:
        file.write(encoder.header)
        file.writelines(encoder.text(Kind.STEP, {"count": count}) for count in range(200_000))
    with said.open("rb") as file:
        back = Descriptor(file.fileno(), "the receiver", writing=False)
        with closing(back), closing(Answers(back, STALL_S)) as answers:
            before, end = answers.last_progress(), time.monotonic() + TIMEOUT_S
            while answers.last_progress() == before:
                assert time.monotonic() < end
            answers.close()
            assert os.lseek(file.fileno(), 0, os.SEEK_CUR) < said.stat().st_size


class SlowKey:
    """A program that takes longer than a stream may stand still."""

    def __init__(self, pair: Pair) -> None:
        self._file = KeyFile(pair.key)

    def unwrap(self, envelope: bytes, place: str) -> DataKey:
        time.sleep(2 * STALL_S)
        return self._file.unwrap(envelope, place)


def receive_slowly(end: Descriptor, opening: Opening, replies: Replies, place: Path) -> None:
    """As receive() does, as far as files go."""
    replies.tell(Kind.HELLO, program="a test", sealed=True)
    decoder = Decoder(lambda space: end.fill(space, TIMEOUT_S, lambda: None), STREAM_MAGIC, "it")
    header, contents = decoder.header(), Contents("it")
    opening.begin(header.sealed)
    name = ""
    while contents.outcome is None:
        record = decoder.record()
        if record.kind is Kind.FILE:
            name = contents.file(record).name
            opening.require(name)
        elif record.kind is Kind.DATA:
            with (place / name).open("ab") as file:
                file.write(contents.data(record))
            if contents.complete:
                opening.took(place, name)
        elif record.kind is Kind.END:
            contents.end(record)
            replies.tell(Kind.READY, digest=record.digest.hex())
        else:
            contents.other(record, header)
    replies.tell(Kind.RESTORED, pid=5)


def send_sealed(
    job: subprocess.Popen[bytes], place: Path, *, talks: bool, me: Pair
) -> tuple[Sent, list[BaseException]]:
    """To a receiver whose key takes its time. talks: it says meanwhile that it is at work."""
    files = {ENVELOPE_NAME: FreshKey().key.wrap([me.certificate.read_bytes()])} | LARGE | FILES

    def dump(images: Path, words: Sequence[str]) -> Run:
        write_images(images, files)
        environ = os.environ | {"CRTOOLS_SCRIPT_ACTION": "post-dump"}
        asked = subprocess.run([words[1]], env=environ, check=False, timeout=TIMEOUT_S)
        if asked.returncode != 0:
            raise CriuError("criu 4.3 dump failed: the script said no")
        job.send_signal(signal.SIGKILL)
        return a_run(job.pid, images)

    failed: list[BaseException] = []
    (place / "in").mkdir()
    with pair_of_ends() as (out, answers, end):
        replies = Replies(end, TIMEOUT_S)
        opening = Opening(SlowKey(me), replies if talks else Replies(None, 1), "it")

        def work() -> None:
            try:
                receive_slowly(end, opening, replies, place / "in")
            except BaseException as exc:  # noqa: BLE001 - looked at below
                failed.append(exc)

        receiving = threading.Thread(target=work)
        receiving.start()
        try:
            target = Target(out=out, answers=answers, timeout_s=STALL_S)
            sent = send(dump, job.pid, target, is_sealed=True, place=place / "spool")
        finally:
            out.close()
            receiving.join()
    return sent, failed


def test_a_key_that_takes_longer_than_a_stream_may_stand_still(
    job: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    sent, failed = send_sealed(job, tmp_path, talks=True, me=make_recipient(tmp_path))
    assert failed == []
    assert sent.restored == {"pid": 5}
    assert job.wait(TIMEOUT_S) == -signal.SIGKILL


def test_a_receiver_that_says_nothing_meanwhile_stalls(
    job: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    stalls = f"takes nothing for {STALL_S:g} s: it stalls; the job runs on"
    with pytest.raises(StreamError, match=stalls):
        send_sealed(job, tmp_path, talks=False, me=make_recipient(tmp_path))
    assert job.poll() is None
