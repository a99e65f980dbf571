# SPDX-License-Identifier: Apache-2.0
"""Both ends of a stream without CRIU: what asks is run as CRIU would run it, on a job that sleeps.
tests/integration/test_streams.py has the real one."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from gpustasis.criu.run import Run, own_option
from gpustasis.errors import CheckpointError, CriuError, StreamError
from gpustasis.streaming import receive, spool
from gpustasis.streaming.answers import Answers, Replies
from gpustasis.streaming.channel import Descriptor
from gpustasis.streaming.dumping import Dump
from gpustasis.streaming.records import (
    STREAM_MAGIC,
    Contents,
    Decoder,
    Encoder,
    Entry,
    Header,
    Kind,
)
from gpustasis.streaming.send import Sent, Target, send

INVENTORY = struct.pack("<II", 0x58313116, 2) + b"\x08\x02"
PSTREE = struct.pack("<III", 0x54564319, 0x50273030, 10) + b"\x08\x05\x10\0\x18\x05\x20\x05\x28\x05"
FILES = {"pstree.img": PSTREE, "inventory.img": INVENTORY}


@pytest.fixture
def job() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"]) as child:
        yield child
        child.kill()


def a_run(pid: int, images: Path) -> Run:
    return Run(pid=pid, criu_version="4.3", log=images / "log", seconds=0.0, statistics=None)


def dumper(
    job: subprocess.Popen[bytes], *, more: dict[str, bytes] | None = None, kill: bool = True
) -> Dump:
    """A dump of `job`: asks, and ends it upon a yes, if `kill`; then it fails if it was to."""

    def dump(images: Path, words: Sequence[str]) -> Run:
        for name, content in (FILES | (more or {})).items():
            (images / name).write_bytes(content)
        environ = os.environ | {"CRTOOLS_SCRIPT_ACTION": "post-dump"}
        asked = subprocess.run([words[1]], env=environ, check=False, timeout=60)
        if asked.returncode != 0:
            raise CriuError("criu 4.3 dump failed: the script said no")
        if kill:
            job.send_signal(signal.SIGKILL)
        return a_run(job.pid, images)

    return dump


def read_all(fd: int, wait_s: float = 0.0) -> Callable[[], bytes]:
    """Read that to its end in a thread, that often waiting; -> its bytes."""
    found = bytearray()

    def work() -> None:
        while data := os.read(fd, 64 << 10):
            found.extend(data)
            time.sleep(wait_s)

    thread = threading.Thread(target=work)
    thread.start()

    def end() -> bytes:
        thread.join()
        os.close(fd)
        return bytes(found)

    return end


def send_one_way(job: subprocess.Popen[bytes], dump: Dump, place: Path, **options: float) -> Sent:
    reading, writing = os.pipe()
    with closing(Descriptor(writing, "the pipe", writing=True)) as out:
        os.close(writing)
        end = read_all(reading, options.pop("wait_s", 0.0))
        try:
            return send(dump, job.pid, Target(out=out, **options), place=place)  # type: ignore[arg-type]
        finally:
            out.close()
            end()


def test_a_reader_that_is_slow_does_not_stall(job: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """The script is told that somebody will still decide while one large file is written."""
    dump = dumper(job, more={"pages-1.img": bytes(6 << 20)})
    sent = send_one_way(job, dump, tmp_path, timeout_s=1.0, wait_s=0.04)
    assert sent.files == 3
    assert sent.spool is not None


def test_a_criu_that_fails_when_it_has_ended_the_job(
    job: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    inner = dumper(job)

    def dump(images: Path, words: Sequence[str]) -> Run:
        inner(images, words)
        raise CriuError("criu 4.3 dump failed (killed by signal 9)")

    sent = send_one_way(job, dump, tmp_path)
    assert sent.dump is None
    assert sent.spool is not None
    assert job.wait(5) == -signal.SIGKILL


def test_a_criu_that_ends_and_leaves_the_job(
    job: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As configured by a file of criu's own."""
    monkeypatch.setattr("gpustasis.streaming.dumping._ENDING_S", 1.0)
    with pytest.raises(StreamError, match="has not; the job runs on: all 1 of its"):
        send_one_way(job, dumper(job, kill=False), tmp_path)
    assert job.poll() is None
    assert list(tmp_path.iterdir()) == []


def test_a_criu_that_hangs_when_it_may_end_the_job(
    job: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    inner, go_on = dumper(job, kill=False), threading.Event()

    def dump(images: Path, words: Sequence[str]) -> Run:
        inner(images, words)
        go_on.wait(60)
        return a_run(job.pid, images)

    with pytest.raises(StreamError, match=r"look what holds it up.*criu is still at work"):
        send_one_way(job, dump, tmp_path, timeout_s=1.0)
    go_on.set()
    (kept,) = tmp_path.iterdir()
    assert (kept / "inventory.img").exists()


def test_processes_that_end_before_the_freeze_are_none_of_ours(tmp_path: Path) -> None:
    with subprocess.Popen(["sh", "-c", "sleep 0.5; sleep 1000"]) as job:
        time.sleep(0.2)

        def dump(images: Path, words: Sequence[str]) -> Run:
            time.sleep(0.8)
            raise CriuError("criu 4.3 dump failed")

        with pytest.raises(CriuError, match=r"the job runs on: all 2 .* beside 1 process"):
            send_one_way(job, dump, tmp_path)
        subprocess.run(["pkill", "-9", "-P", str(job.pid)], check=False)
        job.kill()


def test_a_frozen_cgroup_runs_nothing(job: subprocess.Popen[bytes], tmp_path: Path) -> None:
    freezer, state, frozen, thawed = (
        Path("/sys/fs/cgroup/freezer"),
        "freezer.state",
        "FROZEN",
        "THAWED",
    )
    if not freezer.is_dir():
        freezer, state, frozen, thawed = freezer.parent, "cgroup.freeze", "1", "0"
    group = freezer / f"gps-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "cgroup.procs").write_text(str(job.pid))
        (group / state).write_text(frozen)
        waiting = threading.Timer(2.0, (group / state).write_text, (thawed,))
        waiting.start()
        begin = time.monotonic()

        def dump(images: Path, words: Sequence[str]) -> Run:
            raise CriuError("criu 4.3 dump failed")

        with pytest.raises(CriuError, match="the job runs on"):
            send_one_way(job, dump, tmp_path)
        assert time.monotonic() > begin + 1.5
    finally:
        waiting.join()
        (freezer / "cgroup.procs").write_text(str(job.pid))
        group.rmdir()


def test_a_temporary_directory_with_a_long_name(
    job: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / ("long and" * 12) / "deep"
    place.mkdir(parents=True)
    monkeypatch.setattr("tempfile.tempdir", str(place))
    assert send_one_way(job, dumper(job), tmp_path / "spool").files == 2


def test_a_spool_that_cannot_be_removed_hides_nothing(
    job: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def remove(directory: Path) -> None:
        raise CheckpointError(f"cannot remove {directory}")

    monkeypatch.setattr(spool, "remove", remove)
    near, far = socket.socketpair()
    with near, far, closing(Descriptor(near.fileno(), "there", writing=True)) as out:
        thread = threading.Thread(target=answer, args=(far,))
        thread.start()
        with (
            closing(Descriptor(near.fileno(), "there", writing=False)) as back,
            closing(Answers(back, 10)) as answers,
        ):
            target = Target(out=out, answers=answers, timeout_s=10)
            sent = send(dumper(job), job.pid, target, place=tmp_path)
        thread.join()
    assert sent.restored == {"pid": 5}
    assert sent.spool is not None


def answer(end: socket.socket) -> None:
    """A receiver that is content with everything."""
    with closing(Descriptor(end.fileno(), "it", writing=False)) as source:
        answer_on(source)


def answer_on(source: Descriptor) -> None:
    replies = Replies(source, 10)
    replies.tell(Kind.HELLO, program="a test")
    decoder = Decoder(lambda space: source.fill(space, 10, lambda: None), STREAM_MAGIC, "it")
    header, contents = decoder.header(), Contents("it")
    while contents.outcome is None:
        record = decoder.record()
        if record.kind is Kind.FILE:
            contents.file(record)
        elif record.kind is Kind.DATA:
            contents.data(record)
        elif record.kind is Kind.END:
            contents.end(record)
            replies.tell(Kind.READY, digest=record.digest.hex())
        else:
            contents.other(record, header)
    replies.tell(Kind.RESTORED, pid=5)


@pytest.mark.parametrize("word", ["--leave-running", "--leave-r", "-R", "-jR", "--page-server"])
def test_options_of_criu_that_are_not_for_a_stream(word: str) -> None:
    from gpustasis.cli.stream_checks import require_streamable

    with pytest.raises(CheckpointError, match="sent as a stream"):
        require_streamable([word])
    require_streamable(["--tcp-established", "-vR", "-lj", "--skip-mnt=/R"])
    assert own_option(["-js"]) == "-js"


# The receiver


def stream_of(files: dict[str, bytes], outcome: Kind | None, **header: bool) -> bytes:
    encoder = Encoder(STREAM_MAGIC, Header(stream_id=bytes(range(16)), **header))  # type: ignore[arg-type]
    parts = [encoder.header]
    for name, content in files.items():
        parts.append(bytes(encoder.file(Entry(name=name, mode=0o600, size=len(content)))))
        parts.append(bytes(encoder.record(Kind.DATA, content)))
    parts.append(bytes(encoder.end(len(files), sum(map(len, files.values())))))
    if outcome is not None:
        parts.append(bytes(encoder.record(outcome)))
    return b"".join(parts)


@pytest.fixture
def received(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(spool, "RECEIVED", tmp_path / "received")
    return tmp_path / "received"


def take(raw: bytes, at: Path, restore: receive.Restore, **options: object) -> receive.Received:
    """Receive that from a file."""
    path = at / "job.gps"
    path.write_bytes(raw)
    with path.open("rb") as file, closing(Descriptor(file.fileno(), "it", writing=False)) as stream:
        source = receive.Source(
            stream=stream,
            replies=Replies(None, 5),
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
        take(raw, tmp_path, fails)
    assert "has ended where" not in str(failed.value)
    assert list(received.iterdir()) == []
    with pytest.raises(CriuError, match=r"has ended where it came from, .*restore -D"):
        take(stream_of(FILES, Kind.RELEASED), tmp_path, fails, place=tmp_path / "in")
    assert (tmp_path / "in" / "inventory.img").exists()
    assert take(raw, tmp_path, restored).files == 2


def test_what_cannot_be_restored_here_is_never_ready(received: Path, tmp_path: Path) -> None:
    def refuse(directory: Path) -> None:
        raise StreamError("no such GPU here")

    with pytest.raises(StreamError, match="no such GPU here"):
        take(stream_of(FILES, Kind.RELEASED), tmp_path, restored, require=refuse)
    assert list(received.iterdir()) == []


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


def test_what_dead_receivers_leave(
    received: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (".aa.part", "bb", ".young.part"):
        (received / name).mkdir(parents=True)
        os.utime(received / name, (1, 1))
    os.utime(received / ".young.part")
    held = os.open(received / "bb", os.O_RDONLY)
    spool.sweep_received(received)
    assert {path.name for path in received.iterdir()} == {"bb", ".young.part"}
    assert f"restore -D {received / 'bb'}" in caplog.text
    os.close(held)
