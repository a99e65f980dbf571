# SPDX-License-Identifier: Apache-2.0
"""Orders that nobody waits for, prunes that were killed, keepers that are asked to end, and threads
that are no driver's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpustasis.cli import job_order, job_run
from gpustasis.errors import JobError
from gpustasis.jobs import epochs, kept
from gpustasis.jobs.cuda import cuda_processes, unlock_cuda
from gpustasis.jobs.dumps import DumpRecord
from gpustasis.jobs.exchange import Settings
from gpustasis.jobs.lead import digest_of
from gpustasis.jobs.member import _Attendance
from gpustasis.jobs.messages import Epoch, Move, Phase, Rank
from gpustasis.jobs.network import Network
from gpustasis.jobs.pace import Pace
from gpustasis.jobs.rank import Context
from gpustasis.jobs.records import Keys, Plan, phase_text
from gpustasis.jobs.seat import Seat
from gpustasis.jobs.store import Put
from jobs.test_keeper import Tasks
from jobs.test_undoing import context, server, supervisor_of  # noqa: F401 - fixtures
from support.job_ranks import wait_for
from support.signals import signalled

KEYS = Keys("job")
SETTINGS = Settings()


@pytest.mark.parametrize("phase", [Phase.LOOK, Phase.DUMP])
def test_an_order_does_not_outlive_who_gave_it(
    phase: Phase,
    context: Context,  # noqa: F811
) -> None:
    plan = Plan(world=1, leave_running=True)
    number = epochs.begin(context.store, KEYS, plan)
    context.store.write([], [Put(KEYS.phase(number), phase_text(plan, phase))])
    with pytest.raises(KeyboardInterrupt), job_order._withdrawn(context.store, KEYS, number):
        raise KeyboardInterrupt
    left = epochs.phase(context.store, KEYS, number)[0]
    assert left.phase is (Phase.ABORTED if phase is Phase.LOOK else phase)
    assert left.note == ("whoever asked has gone" if phase is Phase.LOOK else "")


def whole(context: Context) -> Path:  # noqa: F811
    """A checkpoint that is committed; where its dump is."""
    plan = Plan(world=1, leave_running=True)
    number = epochs.begin(context.store, KEYS, plan)
    place = context.place.images(number)
    place.mkdir()
    for name in ("a.img", "inventory.img", "z.img"):
        (place / name).write_text(name)
    record = DumpRecord(
        id="0" * 32,
        parent="",
        directory=str(place),
        host=os.uname().nodename,
        bytes=1,
        digest="0" * 64,
        pid=1,
        dump_ms=1,
        addresses=(),
        network=Network(),
    ).to_text()
    text = phase_text(plan, Phase.COMMITTED, digest_of({0: record}))
    context.store.write([], [Put(KEYS.record(number, 0), record), Put(KEYS.phase(number), text)])
    return place


def test_a_prune_that_was_broken_off_is_done_by_the_next_one(
    context: Context,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second, third = (whole(context) for _ in range(3))
    (first / "inventory.img").unlink()  # it is no dump: somebody else has to say what it is
    unlink = Path.unlink

    def broken(path: Path, missing_ok: bool = False) -> None:
        unlink(path, missing_ok)
        if path.name == "z.img":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", broken)
        with pytest.raises(KeyboardInterrupt):
            kept.prune(context.store, KEYS, 1)
    assert [path.name for path in second.iterdir()] == ["inventory.img"]
    for _ in range(2):
        with pytest.raises(JobError, match="epoch 1, or is none"):
            kept.prune(context.store, KEYS, 1)
        assert not second.exists()
    assert third.is_dir()


def test_a_prune_keeps_the_newest_and_what_is_evidence(context: Context) -> None:  # noqa: F811
    first, second, third, evidence = (whole(context) for _ in range(4))
    store = context.store
    store.write([], [Put(KEYS.evidence(4), "1")])  # it counts for none of those that stay
    assert [one.epoch for one in kept.prune(store, KEYS, 2)] == [1]
    under_way = epochs.begin(store, KEYS, Plan(world=1, leave_running=True))
    with pytest.raises(JobError, match="epoch 5 is not decided; prune after it"):
        kept.prune(store, KEYS, 1)
    epochs.abort(store, KEYS, under_way, "no")
    with pytest.raises(JobError, match="keep at least 1"):
        kept.prune(store, KEYS, 0)
    places = (first, second, third, evidence)
    assert [place.is_dir() for place in places] == [False, True, True, True]


def test_a_keeper_that_waits_for_a_restore_ends_when_it_is_asked_to(
    context: Context,  # noqa: F811
) -> None:
    with signalled(signal.SIGTERM):
        ended = supervisor_of(context).run(restoring=True)
    assert ended.status == 128 + signal.SIGTERM


def test_a_command_that_has_ended_before_it_is_noted_has_its_status(
    context: Context,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spawn = os.posix_spawnp

    def spawn_and_wait(*words: Any, **named: Any) -> int:
        pid = spawn(*words, **named)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        return pid

    monkeypatch.setattr(os, "posix_spawnp", spawn_and_wait)
    supervisor = supervisor_of(context)
    supervisor.start(["sh", "-c", "exit 3"], os.environ)
    assert supervisor.run(restoring=False).status == 3


@pytest.fixture
def misleading(tmp_path: Path) -> Iterator[int]:
    """A process with a thread that is named as the driver's are, and leads to a file."""
    name = f"cuda{(3 << 22) | 3:011x}"
    text = f"import os; os.dup2(os.open({str(tmp_path)!r}, 0), 3); "
    text += f"open('/proc/self/comm', 'w').write('{name}'); input()"
    with subprocess.Popen([sys.executable, "-c", text], stdin=subprocess.PIPE) as process:
        comm = Path(f"/proc/{process.pid}/comm")
        wait_for(lambda: comm.read_text().startswith("cuda"), "comm")
        yield process.pid
        process.kill()


def test_the_driver_is_not_asked_about_a_process_that_would_mislead_it(misleading: int) -> None:
    with pytest.raises(JobError, match="the driver is not asked about it"):
        cuda_processes([misleading])
    assert "the driver is not asked about it" in unlock_cuda([misleading])[0]


def attendance_of(context: Context) -> _Attendance:  # noqa: F811
    number = epochs.begin(context.store, KEYS, Plan(world=1, leave_running=True))
    seat = Seat(context.store, KEYS, number, 0, "keeper")
    return _Attendance(seat, 1, Tasks(), SETTINGS, Pace(0, 1, 1000))


def test_a_store_that_is_asked_again_later_delays_no_deadline(
    context: Context,  # noqa: F811
) -> None:
    attendance = attendance_of(context)
    attendance._beaten = time.monotonic()
    attendance._again_at = time.monotonic() + 100
    assert attendance._pause() <= 1


def test_a_lead_that_aborts_asks_for_no_phase(context: Context) -> None:  # noqa: F811
    attendance = attendance_of(context)
    attendance._me = Rank(epoch=Epoch(Phase.LOOK, 2), aborting="no")
    attendance._lead_asks = Move(2, Phase.LOCK_CUDA)
    attendance._led()
    assert attendance._lead_asks is None


def test_the_writes_a_second_are_an_option() -> None:
    option = next(one for one in job_run.run.params if one.name == "writes")
    assert option.default == SETTINGS.writes_per_s
