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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

from campaigns.rig import Rig, end_strays
from campaigns.steady_job import SteadyJob, process_state
from campaigns.tally import Tally
from support.elsewhere import Elsewhere
from support.job import children_named

JOB = "steady_job"
_SHAPE = {"cuda": 0, "plain_children": 1, "plain_threads": 2, "mib": 8}
_GPU = {"mib": 8, "children": 1}
_PIECE = 64 << 10
_RECORD_SIZE = 32  # bytes of a record without content
_TIMEOUT_S = 30.0
_STALL_S = 5.0  # of a stream that is to stall
_SETTLE_S = 20.0
_WAIT_S = 60.0
_NAMED = re.compile(r"gpustasis restore -D (\S+?)`")
_BROKEN = 18  # exit status: StreamError
_KILLED = ("sender", "receiver", "criu", "script")


@dataclass(slots=True)
class Fault:
    """What happens to a stream. kind: "none", "cut", "flip", "stall" after that many bytes of the
    stream (back: of the answers), "unreleased": cut before the record that releases the job, or
    "kill" of a process after that many seconds; at_ready: from when the receiver says that it is
    ready. slow_s: for each piece of the stream. held: the sender is told that only when
    the victim is dead."""

    kind: str = "none"
    after: int = 0
    back: bool = False
    victim: str = ""
    seconds: float = 0.0
    at_ready: bool = False
    slow_s: float = 0.0
    held: bool = False

    def __str__(self) -> str:
        if self.kind == "kill":
            begin = "ready" if self.at_ready else "the start"
            return f"{self.victim} killed {self.seconds * 1000:.0f} ms after {begin}"
        return f"{self.kind} after {self.after} bytes" + (" of the answers" if self.back else "")


@dataclass(slots=True)
class _Relay:
    """Passes bytes on between a sender's socket and a receiver's, and does what the fault says."""

    near: socket.socket
    far: socket.socket
    fault: Fault
    forward: int = 0
    backward: int = 0
    ready: threading.Event = field(default_factory=threading.Event)
    killed: threading.Event = field(default_factory=threading.Event)
    _stopped: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        for back in (False, True):
            thread = threading.Thread(target=self._pass, args=(back,), daemon=True)
            thread.start()
            self._threads.append(thread)

    def end(self) -> None:
        """Also of one that stands still."""
        self._stopped.set()
        for end in (self.near, self.far):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self.near.close()
        self.far.close()

    def _pass(self, back: bool) -> None:
        source, target = (self.far, self.near) if back else (self.near, self.far)
        fault = replace(self.fault) if self.fault.back == back else Fault()
        done = 0
        with suppress(OSError):
            while data := bytearray(source.recv(_PIECE)):
                if self.fault.slow_s and not back:
                    time.sleep(self.fault.slow_s)
                if back and b'"digest"' in data:  # it has said so, whatever becomes of that
                    self.ready.set()
                    if self.fault.held:
                        self.killed.wait(_WAIT_S)
                hit = fault.kind in ("cut", "flip", "stall") and done + len(data) > fault.after
                if hit and fault.kind == "flip":
                    data[max(0, fault.after - done)] ^= 0x10
                    fault = Fault()
                elif hit:
                    target.sendall(data[: max(0, fault.after - done)])
                    if fault.kind == "cut":
                        break
                    self._stopped.wait()
                    return
                if fault.kind == "unreleased" and _is_release(data):
                    fault.kind = "cut"
                    break
                target.sendall(data)
                done += len(data)
                if back:
                    self.backward = done
                else:
                    self.forward = done
        for end in (source, target) if fault.kind == "cut" else (target,):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR if fault.kind == "cut" else socket.SHUT_WR)


def _is_release(data: bytes) -> bool:
    """Whether a piece ends with the record that the job has ended: docs/format.md, "Streams"."""
    return len(data) >= _RECORD_SIZE and data[8 - _RECORD_SIZE :][:5] == b"\0\0\0\0\5"


@dataclass(slots=True)
class Outcome:
    """Of one stream. here, there: processes of the job that live. said: what both ends said on
    stderr; named: the complete checkpoints that they name. seconds: from start to end. peak_kib:
    the most memory that one of the two has had in use. was_ready: the receiver has said so."""

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
    peak_kib: int
    was_ready: bool


def run(rig: Rig, random: Random, count: int, **shape: int | Path) -> Tally:
    """`count` streams, each with one fault: a third of them processes that are killed. shape: of
    the job."""
    tally = Tally()
    with Elsewhere() as elsewhere:
        whole = send(rig, elsewhere, Fault(), **shape)
        judge(rig, elsewhere, Fault(), whole, tally)
        assert tally.counts["runs there"] == 1, f"nothing is wrong, but {whole.said}"
        for index in range(count):
            fault = choose(random, index, whole)
            outcome = send(rig, elsewhere, fault, **(_GPU if index % 3 == 1 else shape))
            judge(rig, elsewhere, fault, outcome, tally)
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
    rig: Rig, elsewhere: Elsewhere, fault: Fault, options: Sequence[str] = (), **shape: int | Path
) -> Outcome:
    """Start a job, send it, and see what runs when both ends have ended."""
    place = rig.scratch / f"stream-{time.monotonic_ns()}"
    place.mkdir()
    environ = dict(rig.environ) | {"GPUSTASIS_CRIU": str(rig.criu.root or rig.criu.program)}
    program = [sys.executable, "-m", "gpustasis"]
    common = ["--stall-timeout", str(_STALL_S if fault.kind == "stall" else _TIMEOUT_S)]
    job = SteadyJob(rig.programs.job, place / "job.log", environ, **(shape or _SHAPE))
    begin = time.monotonic()
    with (place / "receiver.log").open("wb") as errors:
        words = [*program, "restore", "-i", "-", "-D", str(place / "in"), *common]
        receiver, far = elsewhere.connect(words, environ, errors)
    near, given = socket.socketpair()
    relay = _Relay(near, far, fault)
    relay.start()
    words = ["checkpoint", str(job.pid), "-o", "-", "--spool", str(place / "spool")]
    words += [*common, *options]
    with (place / "sender.log").open("wb") as errors:
        sender = subprocess.Popen(
            [*program, *words],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=given.fileno(),
            stderr=errors,
            start_new_session=True,
        )
    given.close()
    killer = threading.Thread(target=_kill, args=(fault, sender, receiver, relay))
    killer.start()
    peak_kib = 0
    deadline = time.monotonic() + _WAIT_S
    while sender.poll() is None or receiver.poll() is None:
        assert time.monotonic() < deadline, f"{fault}: an end hangs: {_said(place)}"
        job.reap()
        peak_kib = max(peak_kib, *map(_peak_kib, (sender.pid, _find("receiver", sender, receiver))))
        if sender.poll() is not None and sender.returncode < 0:
            near.shutdown(socket.SHUT_RDWR)  # the relay has its other end, and would not tell
        time.sleep(0.01)
    killer.join()
    relay.end()
    seconds = time.monotonic() - begin
    _settle(job)
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
        peak_kib=peak_kib,
        was_ready=relay.ready.is_set(),
    )


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
    words = [sys.executable, "-m", "gpustasis", "restore", "-D", str(place)]
    words += ["--criu", str(rig.criu.root or rig.criu.program)]
    ended = subprocess.run(
        elsewhere.words(words),
        env=dict(rig.environ),
        capture_output=True,
        text=True,
        timeout=_WAIT_S,
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


def _settle(job: SteadyJob) -> None:
    """What was left to end, or to be let go of, by a process that was killed itself."""
    deadline = time.monotonic() + _SETTLE_S
    while time.monotonic() < deadline:
        job.reap()
        states = {process_state(pid) for pid in job.pids}
        left = children_named("criu", "ld-linux-x86-64")
        for pid in left:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if left == [] and not states & {"t", "Z"}:
            return
        time.sleep(0.02)


def _kill(
    fault: Fault,
    sender: subprocess.Popen[bytes],
    receiver: subprocess.Popen[bytes],
    relay: _Relay,
) -> None:
    """Do that at the moment that the fault names, if the victim is there."""
    if fault.kind != "kill":
        return
    end = time.monotonic() + _WAIT_S
    while fault.at_ready and not relay.ready.wait(0.01) and sender.poll() is None:
        pass
    wait = time.monotonic() + fault.seconds
    while time.monotonic() < end and sender.poll() is None:
        victim = _find(fault.victim, sender, receiver)
        if victim is not None and time.monotonic() >= wait:
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
            time.sleep(0.2 if fault.held else 0)  # until it is gone
            relay.killed.set()
            return
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


def _peak_kib(pid: int | None) -> int:
    with suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        found = re.search(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE)
        return int(found[1]) if found else 0
    return 0


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
