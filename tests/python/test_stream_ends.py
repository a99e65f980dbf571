# SPDX-License-Identifier: Apache-2.0
"""The sender of a stream without CRIU: what asks is run as CRIU would run it, on a job that sleeps.
tests/integration/test_streams.py has the real one; test_stream_receiver.py the other end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from gpustasis._core import ImageInfo, Region, image_name, write_image
from gpustasis.criu.run import Run
from gpustasis.errors import CheckpointError, CriuError, StreamError
from gpustasis.runtimes.instance import wait
from gpustasis.streaming import spool
from gpustasis.streaming.answers import Answers, Replies
from gpustasis.streaming.channel import Descriptor
from gpustasis.streaming.dumping import Dump
from gpustasis.streaming.records import Kind
from gpustasis.streaming.send import Sent, Target, send
from gpustasis.task import boot_id, read_task
from support.job import TIMEOUT_S, ended
from support.streams import FILES, a_run, follow, write_images


@pytest.fixture
def job() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"]) as child:
        yield child
        child.kill()


def dumper(
    job: subprocess.Popen[bytes], *, more: dict[str, bytes] | None = None, kill: bool = True
) -> Dump:
    """A dump of `job`: asks, and ends it upon a yes, if `kill`; then it fails if it was to."""

    def dump(images: Path, words: Sequence[str]) -> Run:
        write_images(images, FILES | (more or {}))
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
    sent = send_one_way(job, dump, tmp_path, timeout_s=5.0, wait_s=0.08)
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
        send_one_way(job, dump, tmp_path, timeout_s=5.0)
    go_on.set()
    (kept,) = tmp_path.iterdir()
    assert (kept / "inventory.img").exists()


def child_of(job: subprocess.Popen[bytes], but: int = 0) -> int:
    """Once it has one; but: another than that."""
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children")
    deadline = time.monotonic() + TIMEOUT_S
    while not (found := [int(pid) for pid in children.read_text().split() if int(pid) != but]):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found[0]


def kill(pid: int) -> None:
    """Until it is dead, whether its parent has seen that or not."""
    process = os.pidfd_open(pid)
    try:
        os.kill(pid, signal.SIGKILL)
        assert wait(TIMEOUT_S, process)
    finally:
        os.close(process)


def test_processes_that_end_before_the_freeze_are_none_of_ours(tmp_path: Path) -> None:
    with ended(subprocess.Popen(["sh", "-c", "sleep 1000; sleep 1000"])) as job:
        first = child_of(job)

        def dump(images: Path, words: Sequence[str]) -> Run:
            kill(first)
            child_of(job, first)
            raise CriuError("criu 4.3 dump failed")

        with pytest.raises(CriuError, match=r"the job runs on: all 2 .* beside 1 process"):
            send_one_way(job, dump, tmp_path)
        kill(child_of(job, first))


def test_one_whose_memory_was_stored_is_missed_though_the_dump_failed(tmp_path: Path) -> None:
    """It may have ended for want of it."""
    with ended(subprocess.Popen(["sh", "-c", "sleep 1000 & exec sleep 1000"])) as job:
        child = read_task(child_of(job))

        def dump(images: Path, words: Sequence[str]) -> Run:
            regions = [Region(0x7F0000000000, 4096)]
            info = ImageInfo(
                pid=child.pid,
                checkpoint_id=bytes(range(16)),
                start_time=child.start_time,
                boot_id=boot_id(),
                regions=regions,
            )
            write_image(images / image_name(child.pid), info, [(0x7F0000000000, bytes(4096))])
            kill(child.pid)
            raise CriuError("criu 4.3 dump failed")

        with pytest.raises(CriuError) as caught:
            send_one_way(job, dump, tmp_path)
        wrong = f"process {child.pid} has ended in the dump; what was dumped: "
        assert f"it cannot be said that the job runs on: {wrong}" in str(caught.value)
        (kept,) = tmp_path.iterdir()
        assert str(kept) in str(caught.value) and (kept / image_name(child.pid)).exists()


def test_a_process_that_ends_when_it_may_run_on_is_none_of_ours(tmp_path: Path) -> None:
    """Nobody was told to end any. The dump is refused for it holds one process, and there are 2."""
    with ended(subprocess.Popen(["sh", "-c", "sleep 1000 & exec sleep 1000"])) as job:
        inner, child = dumper(job), child_of(job)

        def dump(images: Path, words: Sequence[str]) -> Run:
            try:
                return inner(images, words)
            finally:
                kill(child)

        with pytest.raises(StreamError, match=r"the job runs on: all 1 .* beside 1 process"):
            send_one_way(job, dump, tmp_path)
        assert list(tmp_path.iterdir()) == []


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
        tells, line = (state, frozen) if state != "cgroup.freeze" else ("cgroup.events", "frozen 1")
        deadline = time.monotonic() + TIMEOUT_S
        while line not in (group / tells).read_text().splitlines():  # not yet, while it is FREEZING
            assert time.monotonic() < deadline
            time.sleep(0.01)
        begin = time.monotonic()
        waiting = threading.Timer(2.0, (group / state).write_text, (thawed,))
        waiting.start()

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
        answer_on(source).tell(Kind.RESTORED, pid=5)


def answer_on(source: Descriptor) -> Replies:
    """Until the job has ended there."""

    def at_end(replies: Replies, digest: bytes) -> None:
        replies.tell(Kind.READY, digest=digest.hex(), directory="/there")

    return follow(source, at_end)[0]


def wait_for_restore(
    job: subprocess.Popen[bytes], place: Path, restore_timeout_s: float, number: int | None = None
) -> str:
    """What the sender says of a receiver that restores, and says so, for ever."""
    near, far = socket.socketpair()
    done = threading.Event()

    def restore_for_ever() -> None:
        with closing(Descriptor(far.fileno(), "it", writing=False)) as source:
            replies = answer_on(source)
            if number is not None:
                os.kill(os.getpid(), number)
            with replies.steps("restoring", lambda: int(time.monotonic() * 100)):
                done.wait(30)

    with near, far, closing(Descriptor(near.fileno(), "there", writing=True)) as out:
        thread = threading.Thread(target=restore_for_ever)
        thread.start()
        try:
            with (
                closing(Descriptor(near.fileno(), "there", writing=False)) as back,
                closing(Answers(back, 10)) as answers,
                pytest.raises(StreamError) as caught,
            ):
                target = Target(
                    out=out,
                    answers=answers,
                    timeout_s=10,
                    restore_timeout_s=restore_timeout_s,
                )
                send(dumper(job), job.pid, target, place=place)
        finally:
            done.set()
            thread.join()
    return str(caught.value)


def test_a_restore_that_does_not_end_is_not_waited_for_for_ever(
    job: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    said = wait_for_restore(job, tmp_path, 2.0)
    (kept,) = tmp_path.iterdir()
    assert said.startswith(
        "there is at work for 2 s, and has not come to an end; the job has ended"
    )
    assert f"`gpustasis restore -D {kept}`" in said
    assert "restore one of the two" in said


def test_a_signal_ends_the_wait_for_a_restore(job: subprocess.Popen[bytes], tmp_path: Path) -> None:
    said = wait_for_restore(job, tmp_path, 20.0, signal.SIGINT)
    assert said.startswith("stopped by SIGINT; the job has ended here. Its checkpoint is in ")
