# SPDX-License-Identifier: Apache-2.0
"""The container of a stream: whatever is changed in it is refused."""

from __future__ import annotations

import io
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpustasis._core import hash128
from gpustasis.errors import StreamError, UnsupportedError
from gpustasis.streaming import answers as module
from gpustasis.streaming.answers import Answers, Replies
from gpustasis.streaming.channel import Descriptor
from gpustasis.streaming.records import (
    ANSWER_MAGIC,
    DATA_SIZE,
    HEADER_SIZE,
    STREAM_MAGIC,
    TEXT_SIZE,
    Contents,
    Decoder,
    Encoder,
    Entry,
    Header,
    Kind,
)
from support.job import TIMEOUT_S

FILES = {"core-1.img": b"one" * 40, "pages-1.img": bytes(300), "inventory.img": b""}
HEADER = Header(stream_id=bytes(range(16)), answered=True)


def records_of(files: dict[str, bytes] | None = None) -> list[bytes]:
    """A whole stream: its header and each record."""
    made = FILES if files is None else files
    encoder = Encoder(STREAM_MAGIC, HEADER)
    parts = [encoder.header]
    for name, content in made.items():
        parts.append(bytes(encoder.file(Entry(name=name, mode=0o600, size=len(content)))))
        for start in range(0, len(content), 64):
            piece = content[start : start + 64]
            encoder.space[: len(piece)] = piece
            parts.append(bytes(encoder.record(Kind.DATA, len(piece))))
    parts.append(bytes(encoder.record(Kind.PROGRESS)))
    parts.append(bytes(encoder.end(len(made), sum(map(len, made.values())))))
    parts.append(bytes(encoder.record(Kind.RELEASED)))
    return parts


def read(raw: bytes) -> dict[str, bytes]:
    """What is in a stream. Raises StreamError."""
    source = io.BytesIO(raw)

    def fill(space: memoryview) -> None:
        if source.readinto(space) < len(space):
            raise StreamError("it ends too early")

    decoder, contents = Decoder(fill, STREAM_MAGIC, "it"), Contents("it")
    header = decoder.header()
    found: dict[str, bytes] = {}
    name = ""
    while contents.outcome is None:
        record = decoder.record()
        if record.kind is Kind.FILE:
            name = contents.file(record).name
            found[name] = b""
        elif record.kind is Kind.DATA:
            data = bytes(contents.data(record))
            found[name] += data
        elif record.kind is Kind.END:
            contents.end(record)
        else:
            contents.other(record, header)
    if source.read():
        raise StreamError("something follows")
    return found


WHOLE = b"".join(records_of())


def test_a_whole_stream_is_read() -> None:
    assert read(WHOLE) == FILES


@given(place=st.integers(0, len(WHOLE) - 1), bit=st.integers(0, 7))
def test_every_changed_bit_is_found(place: int, bit: int) -> None:
    raw = bytearray(WHOLE)
    raw[place] ^= 1 << bit
    with pytest.raises(StreamError):
        read(bytes(raw))


@given(size=st.integers(0, len(WHOLE) - 1))
def test_every_cut_is_found(size: int) -> None:
    with pytest.raises(StreamError):
        read(WHOLE[:size])


@given(data=st.data())
def test_what_is_repeated_swapped_or_left_out_is_found(data: st.DataObject) -> None:
    parts = records_of()
    one = data.draw(st.integers(1, len(parts) - 1))
    other = data.draw(st.integers(1, len(parts) - 1).filter(lambda number: number != one))
    how = data.draw(st.sampled_from(["repeat", "swap", "drop", "put"]))
    if how == "swap":
        parts[one], parts[other] = parts[other], parts[one]
    elif how == "repeat":
        parts.insert(one, parts[one])
    elif how == "drop":
        del parts[one]
    else:
        parts[one] = parts[other]
    with pytest.raises(StreamError):
        read(b"".join(parts))


def test_nothing_follows_the_end() -> None:
    with pytest.raises(StreamError, match="follows"):
        read(WHOLE + b"\0")


@given(raw=st.binary(max_size=400))
def test_anything_else_is_refused(raw: bytes) -> None:
    with pytest.raises(StreamError):
        read(raw)


def test_the_same_records_of_another_stream_are_refused() -> None:
    other = Encoder(STREAM_MAGIC, Header(stream_id=bytes(16), answered=True))
    parts = records_of()
    with pytest.raises(StreamError, match="another hash"):
        read(b"".join([other.header, *parts[1:]]))


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", ".hidden", "a/b", "/etc/passwd", "a\0b", "a b", "-x", "é.img", "x" * 256],
)
def test_names_that_no_file_of_a_checkpoint_has(name: str) -> None:
    encoder = Encoder(STREAM_MAGIC, HEADER)
    with pytest.raises(StreamError, match="no name"):
        encoder.file(Entry(name=name, mode=0o600, size=0))
    content = (0o600).to_bytes(4, "little") + bytes(12) + name.encode()
    parts = [encoder.header, bytes(encoder.record(Kind.FILE, content))]
    with pytest.raises(StreamError, match=r"no name"):
        read(b"".join(parts))


def stream_of(say: Callable[[Encoder], list[bytes]]) -> bytes:
    encoder = Encoder(STREAM_MAGIC, HEADER)
    return encoder.header + b"".join(say(encoder))


def file_of(encoder: Encoder, name: str, size: int = 0, mode: int = 0o600) -> bytes:
    return bytes(encoder.file(Entry(name=name, mode=mode, size=size)))


@pytest.mark.parametrize(
    ("say", "why"),
    [
        (lambda e: [file_of(e, "a"), file_of(e, "a")], "comes twice"),
        (lambda e: [file_of(e, "a", 5), file_of(e, "b")], "comes where none may"),
        (lambda e: [file_of(e, "a", 1 << 60)], "more files or bytes"),
        (lambda e: [file_of(e, "a", mode=0o4755)], "has mode"),
        (lambda e: [bytes(e.record(Kind.DATA, b"x"))], "comes where none may"),
        (lambda e: [file_of(e, "a", 1), bytes(e.record(Kind.DATA, b"xy"))], "comes where none"),
        (lambda e: [file_of(e, "a", 1), bytes(e.record(Kind.DATA, b""))], "comes where none"),
        (lambda e: [bytes(e.record(Kind.RELEASED))], "comes where none may"),
        (lambda e: [bytes(e.end(1, 0))], "counts other files"),
        (lambda e: [bytes(e.end(0, 0)), bytes(e.record(Kind.LEFT_RUNNING))], "comes where none"),
        (lambda e: [bytes(e.record(Kind.READY))], "is none"),
        (lambda e: [bytes(e.record(Kind.PROGRESS, b"x"))], "comes where none may"),
    ],
)
def test_well_formed_records_that_may_not_come(
    say: Callable[[Encoder], list[bytes]], why: str
) -> None:
    with pytest.raises(StreamError, match=why):
        read(stream_of(say))


def test_lengths_are_checked_before_they_are_used() -> None:
    for kind, size in ((Kind.DATA, DATA_SIZE + 1), (Kind.FILE, TEXT_SIZE + 1), (0, 1 << 31)):
        prefix = bytes(8) + size.to_bytes(4, "little") + bytes([kind]) + bytes(3)
        with pytest.raises(StreamError, match=f"says that it has {size} bytes"):
            read(Encoder(STREAM_MAGIC, HEADER).header + prefix)


@pytest.mark.parametrize("change", [{"version": 2}, {"required_features": 1 << 40}])
def test_what_a_later_version_wrote_is_unsupported_and_not_damaged(
    change: dict[str, int],
) -> None:
    header = Header(**change)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="needs a later gpustasis"):
        read(header.pack(STREAM_MAGIC))


def test_unknown_optional_features_mean_nothing() -> None:
    raw = bytearray(WHOLE[: HEADER_SIZE - 16])
    raw[24] = 0xFF
    header = bytes(raw) + hash128(bytes(raw))
    with pytest.raises(StreamError, match="too early"):  # read, and nothing follows
        read(header)


def test_an_answer_is_no_stream() -> None:
    with pytest.raises(StreamError, match="begins otherwise"):
        read(Encoder(ANSWER_MAGIC, Header()).header)


def test_texts_that_are_too_long_are_cut() -> None:
    made = Encoder(ANSWER_MAGIC, Header()).text(Kind.FAILED, {"message": "x" * (1 << 20)})
    assert len(made) <= TEXT_SIZE + 32


LONG: dict[str, object] = {
    "text": "ä" * TEXT_SIZE,
    "list": ["x"] * (TEXT_SIZE // 4),
    "deep": {"deep": "x" * TEXT_SIZE},
    "short": [1],
}


@settings(max_examples=20, deadline=None)
@given(st.dictionaries(st.integers(0, 3), st.sampled_from(sorted(LONG))), st.booleans())
def test_what_is_no_text_and_too_long_is_left_out(kinds: dict[int, str], with_name: bool) -> None:
    fields: dict[str, object] = {str(name): LONG[kind] for name, kind in kinds.items()} | {"pid": 5}
    if with_name:
        fields["n" * TEXT_SIZE] = 1
    record = bytes(Encoder(ANSWER_MAGIC, Header()).text(Kind.RESTORED, fields))
    content = json.loads(record[16:-16])
    assert len(record) <= TEXT_SIZE + 32
    assert content["pid"] == 5
    for name, value in content.items():
        assert value == fields[name] or (isinstance(value, str) and value in str(fields[name]))
    assert content.keys() >= {name for name, value in fields.items() if value == [1]}


# Descriptors


def no_check() -> None:
    pass


def test_a_pipe_that_nobody_reads_stalls() -> None:
    reading, writing = os.pipe()
    end = Descriptor(writing, "the pipe", writing=True)
    with pytest.raises(StreamError, match=r"takes nothing for 0\.3 s"):
        end.write(bytes(4 << 20), 0.3, no_check)
    os.close(reading)
    with pytest.raises(StreamError, match="broke off: Broken pipe"):
        end.write(b"x", 0.3, no_check)


def test_a_pipe_that_brings_nothing_stalls() -> None:
    reading, writing = os.pipe()
    end = Descriptor(reading, "the pipe", writing=False)
    with pytest.raises(StreamError, match=r"brings nothing for 0\.3 s"):
        end.fill(memoryview(bytearray(1)), 0.3, no_check)
    os.write(writing, b"abc")
    space = bytearray(3)
    end.fill(memoryview(space), 0.3, no_check)
    assert space == b"abc"
    os.close(writing)
    with pytest.raises(StreamError, match="ended before"):
        end.fill(memoryview(bytearray(1)), 0.3, no_check)
    os.close(reading)


def test_somebody_else_s_descriptor_stays_as_it_was() -> None:
    """The shell that has the same pipe does not expect it to be non-blocking."""
    reading, writing = os.pipe()
    end = Descriptor(writing, "the pipe", writing=True)
    assert os.get_blocking(writing)
    end.close()
    near, far = socket.socketpair()
    with near, far:
        with closing(Descriptor(near.fileno(), "the socket", writing=True)) as end:
            end.write(b"x", 1, no_check)
        assert os.get_blocking(near.fileno())
    os.close(reading)
    os.close(writing)


class Clock:
    """In place of the sender's: it goes on as the test says, however late a thread is."""

    def __init__(self) -> None:
        self.now = self.pace = 0.0  # pace: by which it goes on each time that it is looked at

    def monotonic(self) -> float:
        self.now += self.pace
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


@contextmanager
def two_ends() -> Iterator[tuple[Answers, Replies]]:
    near, far = socket.socketpair()
    with ExitStack() as opened:
        ends = []
        for end, place in ((near, "there"), (far, "here")):
            ends.append(Descriptor(end.fileno(), place, writing=end is far))
            opened.callback(ends[-1].close)
            end.close()
        answers = Answers(ends[0], 0.5)
        opened.callback(answers.close)
        yield answers, Replies(ends[1], 1.0)


def test_answers_come_in_order_and_show_progress(clock: Clock) -> None:
    with two_ends() as (answers, replies):
        replies.tell(Kind.HELLO, program="gpustasis 1")
        assert answers.hello(no_check) == "gpustasis 1"
        answers.check()

        def work() -> None:
            end = time.monotonic() + TIMEOUT_S
            for count in range(8):  # longer than the sender waits for one answer
                clock.now += 0.4
                replies.tell(Kind.STEP, phase="verifying", count=count)
                while answers.last_progress() < clock.now and time.monotonic() < end:
                    time.sleep(0.01)
            replies.tell(Kind.READY, digest="00")

        thread = threading.Thread(target=work)
        thread.start()
        assert answers.expect(Kind.READY, no_check) == {"digest": "00"}
        thread.join()
        assert clock.now > 3
        clock.pace = 0.01
        with pytest.raises(StreamError, match=r"shows no progress for 0\.5 s"):
            answers.expect(Kind.RESTORED, no_check)
        clock.pace = 0.0
        replies.tell(Kind.FAILED, message="no space")
        with pytest.raises(StreamError, match="there gave up: no space"):
            answers.expect(Kind.RESTORED, no_check)


def test_a_receiver_that_says_the_same_again_and_again_stalls(clock: Clock) -> None:
    with two_ends() as (answers, replies):
        replies.tell(Kind.HELLO)
        answers.hello(no_check)
        stop = threading.Event()

        def repeat() -> None:
            while not stop.wait(0.05):
                replies.tell(Kind.STEP, phase="syncing", count=1)

        thread = threading.Thread(target=repeat)
        thread.start()
        clock.pace = 0.01
        with pytest.raises(StreamError, match="it stalls"):
            answers.expect(Kind.READY, no_check)
        stop.set()
        thread.join()


def test_a_file_is_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "stream"
    with path.open("wb") as file:
        Descriptor(file.fileno(), "it", writing=True).write(WHOLE, 1, no_check)
    assert read(path.read_bytes()) == FILES
