# SPDX-License-Identifier: Apache-2.0
"""Streams that break off, stall, are damaged, and lose a process at either end: the job runs at one
end, or at none, and then its checkpoint is at the place that an error names. Never at both.

The sender is here, the receiver in namespaces of its own; between the two a relay does the damage.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

from campaigns import criu_code, losses
from campaigns.rig import Rig, end_strays
from campaigns.steady_job import SteadyJob, is_alive, process_state
from campaigns.stream_faults import WAIT_S, Fault, Relay
from campaigns.stream_memory import Watch
from campaigns.tally import Tally
from support.certificates import Pair
from support.elsewhere import Elsewhere
from support.job import children_named

JOB = "steady_job"
_SHAPE = {"cuda": 0, "plain_children": 1, "plain_threads": 2, "mib": 8}
_GPU = {"mib": 8, "children": 1}
_TIMEOUT_S = 30.0
_STALL_S = 5.0  # of a stream that is to stall
_SETTLE_S = 20.0
_NAMED = re.compile(r"gpustasis restore -D (\S+?)`")
_BROKEN = 18  # exit status: StreamError
_CRIU = ("criu", "ld-linux-x86-64")  # names of it, and of what it has not yet restored
_TRIES = 3  # of a victim, of which one has to hit it
_KILLED = ("sender", "receiver", "criu", "script")


@dataclass(slots=True)
class Outcome:
    """Of one stream. here, there: processes of the job that live. said: what both ends said on
    stderr; named: the complete checkpoints that they name. seconds: from start to end. was_ready:
    the receiver has said so. pair: whom it was sealed for; None: nobody. criu_stood: tasks in which
    CRIU's own code was seen when its criu was killed, and by what. killed: the victim of the fault
    was alive, and was killed."""

    job: SteadyJob
    place: Path
    sender: int
    receiver: int
    here: int
    there: int
    said: str
    named: list[Path]
    forward: int
    backward: int
    seconds: float
    was_ready: bool
    pair: Pair | None
    criu_stood: dict[int, str]
    killed: bool


def run(
    rig: Rig, random: Random, count: int, *, pair: Pair | None = None, **shape: int | Path
) -> Tally:
    """`count` streams, each with one fault: a third of them processes that are killed. shape: of
    the job. pair: whom they are sealed for; None: they are in the clear."""
    tally, tried = Tally(), Counter[str]()
    with Elsewhere() as elsewhere:
        whole = send(rig, elsewhere, Fault(), pair=pair, **shape)
        judge(rig, elsewhere, Fault(), whole, tally)
        assert tally.counts["runs there"] == 1, f"nothing is wrong, but {whole.said}"
        for index in range(count):
            fault = choose(random, index, whole)
            use = _GPU if index % 3 == 1 else shape
            outcome = send(rig, elsewhere, fault, pair=pair, **use)
            judge(rig, elsewhere, fault, outcome, tally)
            if fault.kind == "kill":
                tried[fault.victim] += 1
                tally.counts[f"killed {fault.victim}"] += outcome.killed
    for victim, times in tried.items():
        if times >= _TRIES and not tally.counts[f"killed {victim}"]:
            tally.failures.append(f"{victim}: to be killed {times} times, and never was")
    end_strays()
    return tally


def choose(random: Random, index: int, whole: Outcome) -> Fault:
    """A fault, spread over the stream and its answers, and over the time it takes."""
    if index % 3 == 2:
        victim = _KILLED[index // 3 % len(_KILLED)]
        if random.random() < 0.5:
            return Fault("kill", victim=victim, seconds=random.uniform(0, 0.15), at_ready=True)
        return Fault("kill", victim=victim, seconds=random.uniform(0.2, whole.seconds))
    kind = random.choice(["cut", "cut", "flip", "stall"])
    if index % 3 == 1:  # the end, where the two agree
        if random.random() < 0.5:
            return Fault(kind, after=random.randrange(whole.backward), back=True)
        return Fault(kind, after=whole.forward - 1 - random.randrange(200))
    return Fault(kind, after=random.randrange(whole.forward))


def send(
    rig: Rig,
    elsewhere: Elsewhere,
    fault: Fault,
    options: Sequence[str] = (),
    *,
    pair: Pair | None = None,
    opens: Sequence[str] | None = None,
    watch: Watch | None = None,
    wait_s: float = WAIT_S,
    **shape: int | Path,
) -> Outcome:
    """Start a job, send it, and see what runs when both ends have ended. opens: how the receiver
    opens what is sealed; None: with the key of the pair. watch: looks at their memory. wait_s: the
    longest that both ends may take."""
    place = rig.scratch / f"stream-{time.monotonic_ns()}"
    place.mkdir()
    environ = dict(rig.environ) | {"GPUSTASIS_CRIU": str(rig.criu.root or rig.criu.program)}
    program = [sys.executable, "-m", "gpustasis"]
    marked = [environ | side.environ for side in (watch.sender, watch.receiver)] if watch else []
    for_sender, for_receiver = marked or (environ, environ)
    common = ["--stall-timeout", str(_STALL_S if fault.kind == "stall" else _TIMEOUT_S)]
    job = SteadyJob(rig.programs.job, place / "job.log", environ, **(shape or _SHAPE))
    begin = time.monotonic()
    with (place / "receiver.log").open("wb") as errors:
        words = [*program, "restore", "-i", "-", "-D", str(place / "in"), *common]
        words += _key(pair) if opens is None else opens
        receiver, far = elsewhere.connect(words, for_receiver, errors)
    near, given = socket.socketpair()
    relay = Relay(near, far, fault)
    relay.start()
    words = ["checkpoint", str(job.pid), "-o", "-", "--spool", str(place / "spool")]
    words += [*common, *options]
    words += [] if pair is None else ["--to", str(pair.certificate)]
    with (place / "sender.log").open("wb") as errors:
        sender = subprocess.Popen(
            [*program, *words],
            env=for_sender,
            stdin=subprocess.DEVNULL,
            stdout=given.fileno(),
            stderr=errors,
            start_new_session=True,
        )
    given.close()
    criu_stood: dict[int, str] = {}
    pids = (job.pids, criu_stood)
    killer = threading.Thread(target=_kill, args=(fault, sender, receiver, relay, *pids))
    killer.start()
    deadline = time.monotonic() + wait_s
    while sender.poll() is None or receiver.poll() is None:
        assert time.monotonic() < deadline, f"{fault}: an end hangs: {_said(place)}"
        job.reap()
        if sender.poll() is not None and sender.returncode < 0:
            near.shutdown(socket.SHUT_RDWR)  # the relay has its other end, and would not tell
        time.sleep(0.01)
    killer.join()
    relay.end()
    seconds = time.monotonic() - begin
    _settle(job, elsewhere)
    said = _said(place)
    named = [Path(name) for name in _NAMED.findall(said)]
    return Outcome(
        job=job,
        place=place,
        sender=sender.returncode,
        receiver=receiver.returncode,
        here=len(job.alive_pids()),
        there=len(elsewhere.jobs(JOB)),
        said=said,
        named=[path for path in named if (path / "inventory.img").exists()],
        forward=relay.forward,
        backward=relay.backward,
        seconds=seconds,
        was_ready=relay.ready.is_set(),
        pair=pair,
        criu_stood=criu_stood,
        killed=relay.killed.is_set(),
    )


def _key(pair: Pair | None) -> list[str]:
    return [] if pair is None else ["--key", str(pair.key)]


def judge(rig: Rig, elsewhere: Elsewhere, fault: Fault, found: Outcome, tally: Tally) -> None:
    """Count what came of a stream, end what runs, and say what must not be."""
    processes = len(found.job.pids)
    tally.counts["trials"] += 1
    try:
        ran = (found.here, found.there)
        if ran == (processes, 0):
            tally.counts["runs on here"] += 1
            found.job.run_on()
            assert found.sender != 0, "the sender says that it was sent"
            if fault.kind not in {"kill", "unreleased"} and not found.was_ready:
                _require_nothing_left(found)
            # A receiver that was ready, and is told no more, keeps what it has; an end says it.
            left = (found.place / "in").exists()
            told = found.named or f"in {found.place / 'in'}: remove that" in found.said
            assert not left or told, "a directory is left at the receiver's, and not named"
        elif ran == (0, processes):
            tally.counts["runs there"] += 1
            found.job.run_on_elsewhere()
            assert "runs on" not in found.said, "it is said that the job runs on here"
            if fault.kind == "none":
                assert (found.sender, found.receiver) == (0, 0), "an end says that it failed"
        elif found.criu_stood and found.there == 0 and not found.was_ready:
            loss = losses.judge(found.job, found.criu_stood)
            assert not loss.lacks, loss.lacks
            tally.counts["LOST, CRIU's own code stood there"] += 1
        else:
            assert ran == (0, 0), "it runs twice, or in part"
            assert found.was_ready, "it was ended before the receiver was ready"
            tally.counts["ended, and a checkpoint is named"] += 1
            assert "runs on" not in found.said, "it is said that the job runs on"
            assert found.named, "no checkpoint is named"
            _restore(rig, elsewhere, found)
        told = {0, _BROKEN, -signal.SIGKILL}
        criu_failed = {12} if fault.victim in ("criu", "script") else set()
        assert found.sender in told | criu_failed, f"the sender ended with {found.sender}"
    except AssertionError as failure:
        tally.failures.append(
            f"{fault}: {failure}; {found.here} here, {found.there} there; {found.said}"
        )
    elsewhere.end_jobs(JOB)
    found.job.end()
    shutil.rmtree(found.place)


def _require_nothing_left(found: Outcome) -> None:
    assert (found.sender, found.receiver) == (_BROKEN, _BROKEN), "an end does not say that it broke"
    left = [*found.place.glob("in"), *found.place.glob(".in.part"), *found.place.glob("spool/*")]
    assert not left, f"something is left: {left}"


def _restore(rig: Rig, elsewhere: Elsewhere, found: Outcome) -> None:
    place = found.named[0]
    words = [sys.executable, "-m", "gpustasis", "restore", "-D", str(place), *_key(found.pair)]
    words += ["--criu", str(rig.criu.root or rig.criu.program)]
    ended = subprocess.run(
        elsewhere.words(words),
        env=dict(rig.environ),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert ended.returncode == 0, f"{place} cannot be restored: {ended.stderr}"
    assert len(elsewhere.jobs(JOB)) == len(found.job.pids)
    found.job.run_on_elsewhere()


def _said(place: Path) -> str:
    return "\n".join(
        f"{name}: {(place / name).read_text(errors='replace')}"
        for name in ("sender.log", "receiver.log")
    )


def _settle(job: SteadyJob, elsewhere: Elsewhere) -> None:
    """What was left to end, or to be let go of, by a process that was killed itself: the criu of a
    receiver goes on without it, and then the job runs there."""
    deadline = time.monotonic() + _SETTLE_S
    while time.monotonic() < deadline:
        job.reap()
        states = {process_state(pid) for pid in job.pids}
        left = children_named(*_CRIU)
        for pid in left:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        there = [pid for name in _CRIU for pid in elsewhere.jobs(name)]
        if left == [] and there == [] and not states & {"t", "Z"}:
            return
        time.sleep(0.02)


def _kill(
    fault: Fault,
    sender: subprocess.Popen[bytes],
    receiver: subprocess.Popen[bytes],
    relay: Relay,
    pids: tuple[int, ...],
    criu_stood: dict[int, str],
) -> None:
    """Do that at the moment that the fault names, if the victim is there."""
    if fault.kind != "kill":
        return
    end = time.monotonic() + WAIT_S
    while fault.at_ready and not relay.ready.wait(0.01) and sender.poll() is None:
        pass
    wait = time.monotonic() + fault.seconds
    while time.monotonic() < end and sender.poll() is None:
        victim = _find(fault.victim, sender, receiver)
        if victim is not None and time.monotonic() >= wait and is_alive(victim):
            with suppress(ProcessLookupError):
                if fault.victim == "criu":
                    os.kill(victim, signal.SIGSTOP)
                    _wait_until_stopped(victim)
                    criu_stood |= criu_code.proofs(pids)
                os.kill(victim, signal.SIGKILL)
                while fault.held and is_alive(victim) and time.monotonic() < end:
                    time.sleep(0.001)
                relay.killed.set()
                return
        time.sleep(0.001)


def _wait_until_stopped(pid: int) -> None:
    while process_state(pid) not in ("T", "t", "Z", ""):
        time.sleep(0.001)


def _find(
    name: str, sender: subprocess.Popen[bytes], receiver: subprocess.Popen[bytes]
) -> int | None:
    if name == "sender":
        return sender.pid
    if name == "receiver":
        return next(iter(_below(receiver.pid, lambda words: "restore" in words)), receiver.pid)
    if name == "criu":
        return next(iter(_below(sender.pid, lambda words: "--tree" in words)), None)
    return next(iter(_below(sender.pid, _asks)), None)


def _asks(words: Sequence[str]) -> bool:
    return any(word.endswith("/post_dump.py") for word in words)


def _below(pid: int, fits: Callable[[list[str]], object]) -> list[int]:
    """Of the processes below, those whose words fit."""
    found, todo = [], [pid]
    for parent in todo:
        with suppress(OSError):
            for thread in Path(f"/proc/{parent}/task").iterdir():
                todo += map(int, (thread / "children").read_text().split())
            words = Path(f"/proc/{parent}/cmdline").read_text(errors="replace").split("\0")[:-1]
            if parent != pid and fits(words):
                found.append(parent)
    return found
