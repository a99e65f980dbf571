# SPDX-License-Identifier: Apache-2.0
"""gpustasis.job.safe_point() and the keepers' side of it, without CRIU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest

from gpustasis import job
from gpustasis.errors import JobError
from gpustasis.jobs import epochs
from gpustasis.jobs.records import Keys, Plan
from gpustasis.jobs.safe_point import Council, Seat, let_go, stop_all
from gpustasis.jobs.store import Store
from support.job_ranks import wait_for

KEYS = Keys("job")


def seat_in(directory: Path) -> Seat:
    seat = Seat(directory / "seat")
    seat.make(anew=True)
    return seat


def program(text: str, seat: Path | str) -> subprocess.CompletedProcess[str]:
    """A program that has the seat, to its end."""
    environ = dict(os.environ) | {job.SEAT_VARIABLE: str(seat)}
    argv = [sys.executable, "-c", textwrap.dedent(text)]
    return subprocess.run(
        argv, env=environ, capture_output=True, text=True, check=False, timeout=120
    )


def test_without_a_keeper_nothing_is_called() -> None:
    def never() -> None:
        raise AssertionError("nobody has asked")

    assert job.SEAT_VARIABLE not in os.environ
    assert not any(job.safe_point(before=never, after=never) for _ in range(1000))


def test_the_loop_of_the_documentation(repository: Path, tmp_path: Path) -> None:
    """As it stands there, with a keeper that asks in its second step. What it calls is played."""
    (loop,) = re.findall(
        r"^```python\n(.*?)^```$",
        (repository / "docs/jobs.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    seat = seat_in(tmp_path)
    played = """
        from types import SimpleNamespace
        from gpustasis.jobs.safe_point import Seat
        from pathlib import Path
        steps, seat = 4, Seat(Path({seat!r}))
        dist = SimpleNamespace(
            destroy_process_group=lambda: (print("down"), seat.release()),
            init_process_group=lambda name: print("up", name),
        )
        def wrap_model_again():
            print("wrapped")
        def train(step):
            print("step", step)
            if step == 1:
                _, calls = seat.ask()
                seat.stop_at(calls + 1)
                seat.take_down()
    """
    text = textwrap.dedent(played.format(seat=str(seat.path))) + loop
    done = program(text, seat.path)
    assert done.stdout.split("\n")[:-1] == [
        *("step 0", "step 1", "down", "up nccl", "wrapped", "step 2", "step 3")
    ], done.stderr


def test_a_call_that_nobody_has_asked_for_makes_no_system_call(tmp_path: Path) -> None:
    """So its cost is that of some words of memory, however busy the machine: seccomp kills the
    program at whatever else than what ends it, or is memory for Python's own numbers."""
    seat = seat_in(tmp_path)
    done = program(
        """
        import ctypes, os, struct, time
        from gpustasis.job import safe_point
        safe_point()
        libc = ctypes.CDLL(None, use_errno=True)
        # BPF: load the number; 231 exit_group and 1 write are allowed, all others kill.
        steps = [(0x20, 0, 0, 0), (0x15, 1, 0, 231), (0x15, 0, 1, 1), (6, 0, 0, 0x7fff0000),
                 (6, 0, 0, 0x80000000)]
        code = b"".join(struct.pack("HBBI", *one) for one in steps)
        kept = ctypes.create_string_buffer(code)
        words = struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(kept))
        assert libc.prctl(38, 1, 0, 0, 0) == 0
        assert libc.prctl(22, 2, words, 0, 0) == 0
        for _ in range(100_000):
            safe_point(before=print, after=print)
        os.write(1, b"done")
        os._exit(0)
        """,
        seat.path,
    )
    assert (done.returncode, done.stdout) == (0, "done"), done.stderr
    assert seat.calls() == 100_001


def test_a_seat_that_cannot_be_used_is_told_at_the_first_call(tmp_path: Path) -> None:
    done = program("from gpustasis.job import safe_point; safe_point()", tmp_path / "none")
    assert f"safe_point: cannot use {tmp_path / 'none'}, which GPUSTASIS_SAFE_POINT" in done.stderr


def test_two_processes_of_a_rank_cannot_both_call(tmp_path: Path) -> None:
    """A fork forgets the seat; a program that is started after another one may have it."""
    text = """
        import os
        from gpustasis.job import safe_point
        for _ in range(3):
            safe_point()
        if os.fork() == 0:
            safe_point()
        os.wait()
    """
    seat = seat_in(tmp_path)
    done = program(text, seat.path)
    assert done.returncode == 0
    assert "calls it already" in done.stderr
    assert seat.calls() == 3
    assert "calls it already" in program(text, seat.path).stderr


class Coupled:
    """Programs whose steps need all of them: none ends one before all have begun it. Each has its
    own end of its seat, as in a process of its own."""

    def __init__(self, directory: Path, world: int) -> None:
        self.seats = []
        self.done: list[list[str]] = [[] for _ in range(world)]
        self.is_over = False
        self.skips = -1  # a rank that calls no safe point any more
        self._barrier = threading.Barrier(world)
        self._threads = []
        for rank in range(world):
            place = directory / str(rank)
            place.mkdir()
            self.seats.append(seat_in(place))
            self._threads.append(threading.Thread(target=self._run, args=(rank,), daemon=True))
        for thread in self._threads:
            thread.start()
        wait_for(lambda: all(seat.has_caller() for seat in self.seats), "all call")

    def _run(self, rank: int) -> None:
        end = job._End(str(self.seats[rank].path))
        said = self.done[rank]
        for step in count(1):
            if rank != self.skips:
                end.call(lambda: said.append(f"down {step}"), lambda: said.append(f"up {step}"))  # noqa: B023
            time.sleep(0.0005 * (rank % 2))
            try:
                self._barrier.wait(60)
            except threading.BrokenBarrierError:
                return
            if self.is_over and rank == 0:
                self._barrier.abort()

    def go_on(self) -> None:
        """All take further steps."""
        before = [seat.calls() for seat in self.seats]
        wait_for(
            lambda: all(s.calls() > n + 2 for s, n in zip(self.seats, before, strict=True)), "steps"
        )

    def close(self) -> None:
        self.is_over = True
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()


def councils(new_store: Callable[[], Store], world: int, number: int) -> list[Council]:
    return [
        Council(new_store(), KEYS, number, (rank, world), has_stopped=False)
        for rank in range(world)
    ]


def stop_with(
    coupled: Coupled, all_councils: list[Council], pauses: list[float], limit_s: float = 60
) -> list[str]:
    """What each keeper says: "", or why not."""
    late = time.monotonic() + limit_s

    def require() -> None:
        if time.monotonic() > late:
            raise JobError("it takes too long")

    def keep(rank: int) -> str:
        time.sleep(pauses[rank])
        try:
            stop_all(coupled.seats[rank], all_councils[rank], f"rank {rank}", limit_s, require)
        except JobError as exc:
            return str(exc)
        return ""

    with ThreadPoolExecutor(len(pauses)) as pool:
        return list(pool.map(keep, range(len(pauses))))


def let_all_go(coupled: Coupled, store: Store, all_councils: list[Council], number: int) -> None:
    """The epoch is aborted."""
    epochs.abort(store, KEYS, number, "no")
    with ThreadPoolExecutor(len(all_councils)) as pool:
        for each in [
            pool.submit(let_go, seat, council, 60, lambda: True)
            for seat, council in zip(coupled.seats, all_councils, strict=True)
        ]:
            each.result()


@pytest.mark.parametrize("new_store", ["local"], indirect=True)
def test_no_program_is_asked_before_all_ranks_are_here(
    new_store: Callable[[], Store], tmp_path: Path
) -> None:
    store, seat = new_store(), seat_in(tmp_path)
    seat._write(job.PID, 1)  # it calls safe_point()
    number = epochs.begin(store, KEYS, Plan(world=2, leave_running=True))
    late = time.monotonic() + 0.5

    def require() -> None:
        if time.monotonic() > late:
            raise JobError("the other rank has said no")

    with pytest.raises(JobError, match="has said no"):
        stop_all(seat, councils(new_store, 2, number)[1], "rank 1", 60, require)
    assert not seat.is_asked()


@pytest.mark.parametrize("new_store", ["local"], indirect=True)
def test_a_program_that_has_stopped_waits_until_it_is_decided(
    new_store: Callable[[], Store], tmp_path: Path
) -> None:
    """Others may have heard that it has: then all take their connections down, or none."""
    store, seat = new_store(), seat_in(tmp_path)
    number = epochs.begin(store, KEYS, Plan(world=1, leave_running=True))
    (council,) = councils(new_store, 1, number)
    asked, _ = seat.ask()
    council.largest("stopped", 0, lambda: None)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(let_go, seat, council, 60, lambda: True)
        time.sleep(0.5)
        assert seat.is_asked()
        epochs.abort(store, KEYS, number, "no")
        wait_for(lambda: seat._words()[job.DOWN] == asked, "the word to take them down")
        assert seat.is_asked()
        seat._write(job.STANDS, asked)  # as the program does then
        done.result(60)
    assert not seat.is_asked()


@pytest.mark.parametrize("seen", ["late", "in time"])
@pytest.mark.parametrize("new_store", ["local"], indirect=True)
def test_of_an_abort_and_a_round_one_is_before_the_other(
    new_store: Callable[[], Store], monkeypatch: pytest.MonkeyPatch, seen: str
) -> None:
    """Else one rank would take its connections down after the others have learnt that nobody does.
    What they do about it once all have stopped is agreed on afterwards."""
    store = new_store()
    number = epochs.begin(store, KEYS, Plan(world=1, leave_running=True))
    (council,) = councils(new_store, 1, number)
    phase, before = epochs.phase, [epochs.phase(store, KEYS, number)]
    epochs.abort(store, KEYS, number, "no")
    if seen == "late":  # by the keeper, just before it says that its program has stopped
        monkeypatch.setattr(
            epochs, "phase", lambda *words: before.pop() if before else phase(*words)
        )
    with pytest.raises(JobError, match=f"epoch {number} is aborted already"):
        council.largest("stopped", 0, lambda: None)
    assert store.read(KEYS.round(number, "stopped")).entries == {}
    assert council.all_have_stopped() is False
    assert council.largest("down", 3, lambda: None) == 3


@pytest.mark.parametrize("new_store", ["local"], indirect=True)
def test_all_ranks_stop_in_the_same_call(new_store: Callable[[], Store], tmp_path: Path) -> None:
    """Whoever is asked first, and however much later the others are."""
    world, store = 4, new_store()
    coupled = Coupled(tmp_path, world)
    for turn in range(12):
        number = epochs.begin(store, KEYS, Plan(world=world, leave_running=True))
        pauses = [0.03 * ((rank + turn) % world) for rank in range(world)]
        asked = councils(new_store, world, number)
        assert stop_with(coupled, asked, pauses) == [""] * world
        downs = {said[-1] for said in coupled.done}
        assert len(downs) == 1, downs
        assert downs.pop().startswith("down ")
        let_all_go(coupled, store, asked, number)
        coupled.go_on()
    assert all(len(said) == 24 for said in coupled.done)
    coupled.close()


@pytest.mark.parametrize("new_store", ["local"], indirect=True)
def test_a_rank_that_is_not_there_leaves_all_as_they_were(
    new_store: Callable[[], Store], tmp_path: Path
) -> None:
    world, store = 3, new_store()
    coupled = Coupled(tmp_path, world)
    coupled.skips = 1
    begun = coupled.seats[0].calls()
    wait_for(lambda: coupled.seats[0].calls() > begun + 1, "rank 1's last call")
    number = epochs.begin(store, KEYS, Plan(world=world, leave_running=True))
    asked = councils(new_store, world, number)

    def is_over() -> None:  # as for a keeper
        if epochs.phase(store, KEYS, number)[0].phase.is_final:
            raise JobError("it is over")

    with ThreadPoolExecutor(world) as pool:
        kept = [
            pool.submit(
                stop_all, coupled.seats[rank], asked[rank], f"rank {rank}", limit_s, is_over
            )
            for rank, limit_s in enumerate((60.0, 1.0, 60.0))
        ]
        with pytest.raises(JobError, match="rank 1: its program has not come to call"):
            kept[1].result()
        epochs.abort(store, KEYS, number, "no")
        for one in (kept[0], kept[2]):
            with pytest.raises(JobError):
                one.result()
    let_all_go(coupled, store, asked, number)
    coupled.skips = -1
    coupled.go_on()
    assert coupled.done == [[]] * world
    coupled.close()
