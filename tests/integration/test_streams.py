# SPDX-License-Identifier: Apache-2.0
"""Streams, with real CRIU: to a file, through a pipe, and to another machine; the long form of what
breaks is the campaign streams of make soak."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from random import Random

import pytest

from campaigns import large_streams, streams
from campaigns.rig import Rig
from campaigns.steady_job import SteadyJob
from campaigns.stream_faults import Fault
from campaigns.streams import JOB
from campaigns.tally import Tally
from support.elsewhere import Elsewhere
from support.json_output import check_document

SEED = 7
TRIES = 5
PLAIN = {"cuda": 0, "plain_children": 1, "mib": 4}
PROGRAM = [sys.executable, "-m", "gpustasis"]
# What ssh is to migrate: it is given the words of one command for a shell, at the end.
_SSH = """#!/bin/sh
for last; do :; done
[ "$BROKEN" ] && {{ echo "$BROKEN" >&2; exit 255; }}
exec {enter} sh -c "$last"
"""


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[Elsewhere]:
    with Elsewhere() as found:
        yield found


@pytest.fixture
def environ(newest_rig: Rig, tmp_path: Path, elsewhere: Elsewhere) -> dict[str, str]:
    """With a program ssh that leads elsewhere."""
    criu = newest_rig.criu
    enter = shlex.join(elsewhere.words(()))
    (tmp_path / "ssh").write_text(_SSH.format(enter=enter))
    (tmp_path / "ssh").chmod(0o755)
    found = dict(newest_rig.environ) | {"GPUSTASIS_CRIU": str(criu.root or criu.program)}
    return found | {"PATH": f"{tmp_path}:{Path(sys.executable).parent}:{found['PATH']}"}


def run(
    *words: object, environ: Mapping[str, str], job: SteadyJob | None = None, **options: int
) -> subprocess.CompletedProcess[str]:
    """A command to its end; a job that it ends is waited for meanwhile."""
    done = threading.Event()

    def reap() -> None:
        while job is not None and not done.wait(0.01):
            job.reap()

    thread = threading.Thread(target=reap)
    thread.start()
    try:
        return subprocess.run(
            [*PROGRAM, *map(str, words)],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            **options,  # type: ignore[call-overload]
        )
    finally:
        done.set()
        thread.join()


def test_a_stream_that_breaks_leaves_one_job(newest_rig: Rig) -> None:
    streams.run(newest_rig, Random(SEED), 9).require_clean()


def test_a_link_that_breaks_when_the_job_has_ended(newest_rig: Rig, elsewhere: Elsewhere) -> None:
    """Both ends keep the checkpoint, and name it."""
    tally = Tally()
    lost = streams.send(newest_rig, elsewhere, Fault("unreleased"))
    assert (lost.sender, lost.receiver) == (18, 18)
    assert {path.parent.name for path in lost.named} == {"spool", lost.place.name}
    streams.judge(newest_rig, elsewhere, Fault("unreleased"), lost, tally)
    tally.require_clean()
    assert tally.counts["ended, and a checkpoint is named"] == 1


@pytest.mark.parametrize(
    ("victim", "held"),
    [("sender", False), ("receiver", False), ("receiver", True), ("criu", True), ("criu", False)],
)
def test_one_that_dies_just_when_the_receiver_is_ready(
    newest_rig: Rig, elsewhere: Elsewhere, victim: str, held: bool
) -> None:
    """held: before the sender knows that it is. Otherwise the victim may have ended by itself."""
    tally = Tally()
    fault = Fault("kill", victim=victim, at_ready=True, held=held)
    for _ in range(1 if held else TRIES):
        found = streams.send(newest_rig, elsewhere, fault)
        streams.judge(newest_rig, elsewhere, fault, found, tally)
        if found.killed:
            break
    assert found.killed
    tally.require_clean()


def test_the_script_that_criu_asks_is_killed(rig: Rig, elsewhere: Elsewhere) -> None:
    """Which is no yes."""
    tally = Tally()
    fault = Fault("kill", victim="script", slow_s=0.003)
    found = streams.send(rig, elsewhere, fault)
    streams.judge(rig, elsewhere, fault, found, tally)
    tally.require_clean()
    assert found.killed
    assert tally.counts["runs on here"] == 1
    assert "post-dump exited with" in found.said


@pytest.mark.parametrize("options", [{}, {"mib": 8, "children": 1}], ids=["plain", "gpu"])
def test_to_another_machine(newest_rig: Rig, elsewhere: Elsewhere, options: dict[str, int]) -> None:
    tally = Tally()
    whole = streams.send(newest_rig, elsewhere, Fault(slow_s=0.002), **options)
    assert not list((whole.place / "spool").iterdir())
    streams.judge(newest_rig, elsewhere, Fault(), whole, tally)
    tally.require_clean()
    assert tally.counts["runs there"] == 1, whole.said


def test_to_a_file_and_back(newest_rig: Rig, environ: dict[str, str], tmp_path: Path) -> None:
    file, spool = tmp_path / "job.gps", tmp_path / "spool"
    with newest_rig.job(**PLAIN) as job:
        words = ("checkpoint", job.pid, "-o", file, "--spool", spool, "--json")
        done = run(*words, environ=environ)
        found = check_document(done.stdout, "checkpoint")
        assert (found["directory"], found["stream"]["spool"]) == (None, None)
        assert [path for path in tmp_path.iterdir() if ".part" in path.name] == []
        assert list(spool.iterdir()) == []
        job.wait()
        again = run("checkpoint", os.getpid(), "-o", file, environ=environ)
        assert (again.returncode, "is there already" in again.stderr) == (3, True)
        done = run("restore", "-i", file, "-D", tmp_path / "in", "--json", environ=environ)
        found = check_document(done.stdout, "restore")
        assert (found["pid"], found["directory"]) == (job.pid, str(tmp_path / "in"))
        job.run_on()
    nothing = run("verify", tmp_path / "in", environ=environ)
    assert "with nothing of gpustasis's to verify" in nothing.stdout


def test_memory_of_both_ends_does_not_grow_with_the_job(
    newest_rig: Rig, elsewhere: Elsewhere
) -> None:
    tally = large_streams.run(newest_rig, elsewhere, large_streams.SHORT_MIB)
    tally.require_clean()
    assert tally.counts["MiB sent"] > large_streams.MOST_MIB


def test_left_running_to_a_file(newest_rig: Rig, environ: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "job.gps"
    with newest_rig.job(**PLAIN) as job:
        done = run("checkpoint", job.pid, "-R", "-o", file, environ=environ)
        assert done.returncode == 0, done.stderr
        job.run_on()
        raw = file.read_bytes()
        with subprocess.Popen(["cat", file], stdout=subprocess.PIPE) as cat:
            assert cat.stdout is not None
            refused = subprocess.run(
                [*PROGRAM, "restore", "-i", "-", "-D", tmp_path / "in"],
                env=environ,
                stdin=cat.stdout,
                capture_output=True,
                text=True,
                check=False,
            )
        assert refused.returncode == 18, refused.stderr
        assert "left running" in refused.stderr
        plain = run("restore", "-i", file, "-D", tmp_path / "in", environ=environ)
        assert (plain.returncode, "--source-may-run" in plain.stderr) == (18, True)
        for command in ("inspect", "verify"):
            looked = run(command, file, environ=environ)
            assert "is a stream of `checkpoint -o`" in looked.stderr, looked.stderr
        words = ("restore", "--source-may-run", "-i", tmp_path / "cut")
        for size in (50, len(raw) - 1):
            (tmp_path / "cut").write_bytes(raw[:size])
            cut = run(*words, "-D", tmp_path / "in", environ=environ)
            assert cut.returncode == 18, cut.stderr
        (tmp_path / "cut").write_bytes(raw + b"x")
        cut = run(*words, "-D", tmp_path / "in", environ=environ)
        assert (cut.returncode, "follows the end" in cut.stderr) == (18, True)
        assert not list(tmp_path.glob("*in*"))
        job.end()
        done = run("restore", "-i", file, "--source-may-run", environ=environ)
        assert done.returncode == 0, done.stderr
        job.run_on()


def test_through_a_pipe_of_a_shell(
    newest_rig: Rig, environ: dict[str, str], tmp_path: Path
) -> None:
    with newest_rig.job(**PLAIN) as job:
        program = shlex.join(PROGRAM)
        pipe = f"{program} checkpoint {job.pid} -o - --spool spool | {program} restore -i - -D in"
        shell = subprocess.Popen(
            ["sh", "-c", pipe], cwd=tmp_path, env=environ, stderr=subprocess.PIPE, text=True
        )
        while shell.poll() is None:
            job.reap()
            time.sleep(0.01)
        _, said = shell.communicate()
        assert shell.returncode == 0, said
        job.run_on()
        (kept,) = (tmp_path / "spool").iterdir()  # nobody could say that it has arrived
        assert str(kept) in said
        assert (kept / "inventory.img").exists()


def test_migrate(
    newest_rig: Rig, environ: dict[str, str], elsewhere: Elsewhere, tmp_path: Path
) -> None:
    place = tmp_path / "a directory"
    with newest_rig.job(mib=8, children=1) as job:
        words = ("migrate", "--json", "--spool", tmp_path / "spool", job.pid, "gpu2")
        done = run(*words, "-D", place, "--threads", "1", environ=environ, job=job)
        assert done.returncode == 0, done.stderr
        found = check_document(done.stdout, "migrate")
        assert (found["host"], found["stream"]["restored"]["pid"]) == ("gpu2", job.pid)
        assert found["stream"]["restored"]["directory"] == str(place)
        assert found["stream"]["restored"]["statistics"]["processes"] == 2
        assert (place / "inventory.img").exists()
        assert len(elsewhere.jobs(JOB)) == 2
        job.run_on_elsewhere()
        elsewhere.end_jobs(JOB)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("gpu2", "--no-such"), "No such option"),
        (("gpu2", "-D", "/etc"), "no empty directory"),
        (("gpu2", "--criu", "/no/such"), "no criu"),
    ],
)
def test_what_cannot_be_there_is_said_before_anything_is_frozen(
    newest_rig: Rig, environ: dict[str, str], words: tuple[str, ...], why: str, tmp_path: Path
) -> None:
    with newest_rig.job(**PLAIN) as job:
        spool = tmp_path / "spool"
        done = run("migrate", "--spool", spool, job.pid, *words, environ=environ)
        assert done.returncode == 18, done.stderr
        assert why in done.stderr
        assert not spool.exists() or not list(spool.iterdir())
        job.run_on()


def test_ssh_that_cannot_connect(newest_rig: Rig, environ: dict[str, str]) -> None:
    with newest_rig.job(**PLAIN) as job:
        broken = environ | {"BROKEN": "gpu2: no route to host"}
        done = run("migrate", job.pid, "gpu2", environ=broken)
        assert (done.returncode, "no route to host" in done.stderr) == (18, True)
        assert "nothing was frozen: the job was not touched" in done.stderr
        done = run("migrate", job.pid, "-oProxyCommand=true", environ=environ)
        assert (done.returncode, "is no host" in done.stderr) == (2, True)
        job.run_on()


@pytest.fixture
def nobody(
    newest_rig: Rig, environ: dict[str, str], tmp_path: Path
) -> Iterator[Callable[..., int]]:
    """nobody(job, number, **options) -> exit status of a sender whose receiver reads nothing, and
    that is sent the signal once the tasks stand."""

    def send(job: SteadyJob, number: int, **options: object) -> int:
        stall = "5" if number == signal.SIGTSTP else "60"  # the signal comes before
        words = ["checkpoint", str(job.pid), "-o", "-", "--one-way", "--stall-timeout", stall]
        near, far = socket.socketpair()
        with near, far:
            sender = subprocess.Popen(
                [*PROGRAM, *words, "--spool", str(tmp_path / "spool")],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=near,
                process_group=0,  # not orphaned: there Ctrl-Z would stop nobody anyhow
                **options,  # type: ignore[call-overload]
            )
            deadline = time.monotonic() + 20
            while job.state() != "t":
                assert time.monotonic() < deadline
                time.sleep(0.005)
            time.sleep(0.5)
            os.killpg(sender.pid, number)
            return int(sender.wait(30))

    # A background job of a shell ignores it, and so would its children.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield send
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGTSTP])
def test_a_signal_while_the_tasks_stand(
    newest_rig: Rig, nobody: Callable[..., int], number: int, tmp_path: Path
) -> None:
    """Ctrl-Z stops nobody: the tasks would stand for as long."""
    with newest_rig.job(**PLAIN) as job:
        said = tmp_path / "said"
        with said.open("wb") as stderr:
            assert nobody(job, number, stderr=stderr) == 18
        reason = "it stalls" if number == signal.SIGTSTP else signal.Signals(number).name
        assert reason in said.read_text()
        assert "the job runs on: all 2 of its processes are alive" in said.read_text()
        job.run_on()
        assert list((tmp_path / "spool").iterdir()) == []


def full_pipe() -> tuple[int, int]:
    """Both ends; a write would wait for somebody to read."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(writing, bytes(4096))
    os.set_blocking(writing, True)
    return reading, writing


def test_a_standard_error_that_is_closed_or_blocked(
    newest_rig: Rig, nobody: Callable[..., int]
) -> None:
    with newest_rig.job(**PLAIN) as job:
        assert nobody(job, signal.SIGINT, preexec_fn=lambda: os.close(2)) == 18
        job.run_on()
        reading, writing = full_pipe()
        waiting = threading.Timer(3, os.close, (reading,))  # it ends, and the sender's last word
        waiting.start()
        nobody(job, signal.SIGINT, stderr=writing)
        job.run_on()
        waiting.join()
        os.close(writing)


@pytest.mark.parametrize("silent", [True, False])
def test_a_receiver_whose_standard_error_is_blocked_holds_up_no_sender(
    newest_rig: Rig, elsewhere: Elsewhere, environ: dict[str, str], tmp_path: Path, silent: bool
) -> None:
    """One that has nothing to say before the job runs there, and one in which a library says
    something (the emulated driver, of a job with CUDA) and waits for ever: that is a stall."""
    timeout = ["--stall-timeout", "30" if silent else "5"]
    reading, writing = full_pipe()
    with newest_rig.job(**(PLAIN if silent else {"mib": 4})) as job:
        words = [*PROGRAM, "restore", "-i", "-", "-D", str(tmp_path / "in"), *timeout]
        with os.fdopen(writing, "wb") as stderr:
            receiver, link = elsewhere.connect(words, environ, stderr)
        begin = time.monotonic()
        with (
            link,
            subprocess.Popen(
                [*PROGRAM, "checkpoint", str(job.pid), "-o", "-", *timeout],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=link.fileno(),
                stderr=subprocess.PIPE,
                text=True,
            ) as sender,
        ):
            while sender.poll() is None:
                if time.monotonic() > begin + 60:
                    sender.kill()
                job.reap()
                time.sleep(0.01)
            assert sender.stderr is not None
            said = sender.stderr.read()
        assert silent or receiver.poll() is None, "the receiver had nothing to say"
        if silent:
            assert sender.returncode == 0, said
            job.run_on_elsewhere()
            elsewhere.end_jobs(JOB)
        else:
            assert sender.returncode == 18 and "shows no progress for 5 s: it stalls" in said
            job.run_on()
        with os.fdopen(reading, "rb") as unread:
            threading.Thread(target=unread.read, daemon=True).start()
            assert receiver.wait(30) == (0 if silent else 18)
