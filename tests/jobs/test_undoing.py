# SPDX-License-Identifier: Apache-2.0
"""What a rank's keeper undoes, finishes and leaves alone of what an earlier one has left: with real
processes, states and stores, and without criu."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from gpustasis.criu.find import Criu
from gpustasis.errors import JobError, StoreError
from gpustasis.jobs import checkpointing, epochs, verified
from gpustasis.jobs.checkpointing import Checkpointing
from gpustasis.jobs.local import Local
from gpustasis.jobs.member import Outcome, Settings
from gpustasis.jobs.messages import Epoch, Phase
from gpustasis.jobs.network import Network, look
from gpustasis.jobs.place import place_of
from gpustasis.jobs.rank import Context, Options
from gpustasis.jobs.records import Keys, Plan, phase_text
from gpustasis.jobs.restoring import Restoring
from gpustasis.jobs.server import Server
from gpustasis.jobs.store import Put
from gpustasis.jobs.supervise import Supervisor
from gpustasis.jobs.work import Order
from gpustasis.streaming.tree import Tree
from gpustasis.task import read_task
from gpustasis.verifying import Check
from support.job_ranks import ANSWER_S, state_of, wait_for
from support.packet_filters import put_nft

KEYS = Keys("job")
SETTINGS = Settings(ttl_s=4, store_s=2)
NO_CRIU = Criu(program=Path("/none"), root=None, version=(4, 2), origin="test")


@pytest.fixture
def server(tmp_path: Path, journal: Path) -> Iterator[Server]:
    server = Server(tmp_path / "store", journal)
    yield server
    server.close()


@pytest.fixture
def context(server: Server, tmp_path: Path) -> Iterator[Context]:
    store = Local(tmp_path / "store", ANSWER_S)
    place = place_of("job", 0, tmp_path / "kept", tmp_path / "run")
    place.make()
    yield Context(place, 1, store, KEYS, Options(criu=NO_CRIU))
    store.close()


@contextmanager
def at_the_gate(context: Context, action: str = "post-dump") -> Iterator[subprocess.Popen[bytes]]:
    """The script that a criu would wait in."""
    context.gate.prepare(action)
    environ = {"CRTOOLS_SCRIPT_ACTION": action, "PATH": os.defpath}
    with subprocess.Popen([context.gate.script], env=environ) as script:
        try:
            wait_for(context.gate.is_held, "the gate")
            yield script
        finally:
            script.kill()


@pytest.fixture
def task() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as task:
        yield task
        task.kill()


def decided(context: Context, plan: Plan, phase: Phase) -> int:
    """An epoch that this rank was in, and in which it has not done yet what was decided."""
    number = epochs.begin(context.store, KEYS, plan)
    puts = {KEYS.phase(number): phase_text(plan, phase, "x"), KEYS.rank(0): str(number)}
    if phase is Phase.COMMITTED:
        puts[KEYS.record(number, 0)] = "record"
    context.store.write([], [Put(key, value) for key, value in puts.items()])
    return number


def supervisor_of(context: Context) -> Supervisor:
    return Supervisor(context, SETTINGS, lambda _: None)


def test_a_release_leaves_what_an_older_epoch_of_its_number_has_made(context: Context) -> None:
    images = context.place.images(7)
    images.mkdir()
    context.note(epoch=7, images=str(images))
    Checkpointing(context, Order(7, leave_running=True, restores=0)).release()
    assert images.is_dir()


def test_a_release_leaves_tasks_that_an_older_epoch_of_its_number_has_restored(
    context: Context, task: subprocess.Popen[bytes]
) -> None:
    context.note(pid=task.pid, epoch=7, images=str(context.place.images(2)))
    Restoring(context, Order(7, leave_running=True, restores=2)).release()
    assert task.poll() is None


def test_nothing_is_left_to_undo_of_an_epoch_that_is_over(context: Context) -> None:
    context.note(epoch=7, images="/none")
    supervisor_of(context)._after(Outcome(7, Epoch(Phase.ABORTED, 1), ""))
    assert (context.state.epoch, context.state.images) == (0, "")


def test_what_is_committed_is_not_removed_as_undone(context: Context) -> None:
    images = context.place.images(7)
    images.mkdir()
    context.note(epoch=7, images=str(images))
    Checkpointing(context, Order(7, leave_running=False, restores=0)).finish(leave_running=False)
    assert context.state.images == "" and images.is_dir()


def test_a_new_command_is_not_ended_by_what_was_decided_of_the_one_before(context: Context) -> None:
    number = decided(context, Plan(world=1, leave_running=False), Phase.COMMITTED)
    context.note(epoch=number, images=str(context.place.images(number)))
    supervisor = supervisor_of(context)
    pid = supervisor.start(["sleep", "1000"], os.environ)
    try:
        supervisor._keeper.take_part(lambda: True)
        assert read_task(pid).pid == pid
        assert epochs.standing(context.store, KEYS, number).settled == {0}
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_no_command_is_started_while_the_store_is_away_or_a_criu_waits(
    context: Context, tmp_path: Path
) -> None:
    supervisor = supervisor_of(context)
    with at_the_gate(context), pytest.raises(JobError, match="a criu still waits"):
        supervisor.start(["touch", str(tmp_path / "started")], os.environ)
    context.store = Local(tmp_path / "nowhere")
    with pytest.raises(StoreError):
        supervisor_of(context).start(["touch", str(tmp_path / "started")], os.environ)
    time.sleep(0.3)  # what was started would have run by then
    assert context.state.pid == 0 and not (tmp_path / "started").exists()


def pstree(pid: int) -> bytes:
    """CRIU's image of a tree that is this process alone (criu/images.py)."""
    number = bytes([0x80 | pid & 0x7F, 0x80 | pid >> 7 & 0x7F, 0x80 | pid >> 14 & 0x7F, pid >> 21])
    message = b"".join(bytes([field << 3]) + number for field in (1, 3, 4, 5))
    message += bytes([2 << 3, 0])
    return struct.pack("<III", 0x54564319, 0x50273030, len(message)) + message


def restored(context: Context, number: int) -> tuple[Restoring, Path]:
    """A part that an earlier keeper has begun, and criu's file of what it has made."""
    images = context.place.images(2)
    images.mkdir()
    context.note(epoch=number, images=str(images))
    part = Restoring(context, Order(number, leave_running=True, restores=2, joined=True))
    return part, context.place.run / "pid"


def test_tasks_that_no_keeper_has_noted_are_ended_before_criu_is_told(
    context: Context, task: subprocess.Popen[bytes]
) -> None:
    part, pidfile = restored(context, 3)
    (part.images / "pstree.img").write_bytes(pstree(task.pid))
    pidfile.write_text(str(task.pid))
    with at_the_gate(context, "pre-resume") as script:
        part.release()
        assert script.wait(10) != 0
    assert task.wait(10) == -signal.SIGKILL


def test_a_later_process_of_the_number_is_left_alone(
    context: Context, task: subprocess.Popen[bytes]
) -> None:
    part, pidfile = restored(context, 3)
    (part.images / "pstree.img").write_bytes(pstree(task.pid))
    pidfile.write_text(str(task.pid))
    context.note(pid=task.pid)
    context.state = replace(context.state, start_time=context.state.start_time - 1)
    part.release()
    assert task.poll() is None
    assert not pidfile.exists()


def test_a_criu_of_whose_tasks_nothing_is_known_is_not_told(context: Context) -> None:
    part, _ = restored(context, 3)
    with at_the_gate(context, "pre-resume") as script:
        with pytest.raises(JobError, match="does not say what it has made"):
            part.release()
        assert script.poll() is None
        assert context.gate.is_held()


def test_an_earlier_keepers_criu_is_found_whatever_its_program_is_called(context: Context) -> None:
    part, _ = restored(context, 3)
    words = [str(part.images), "--action-script", "/none"]
    argv = ["sh", "-c", "read -r line", "criu-4.2", *words]
    with subprocess.Popen(argv, stdin=subprocess.PIPE) as criu:
        try:
            wait_for(part.criu.is_there, "criu")
        finally:
            criu.kill()
    assert not part.criu.is_there()


@pytest.mark.parametrize("which", ["kept", "run"])
def test_a_place_that_others_can_change_is_refused(which: str, tmp_path: Path) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    places = {name: tmp_path / name for name in ("kept", "run")} | {which: open_to_all}
    with pytest.raises(JobError, match="with mode 0777; whoever can change it"):
        place_of("job", 0, places["kept"], places["run"]).make()


def test_output_is_not_written_through_a_link(context: Context, tmp_path: Path) -> None:
    target = tmp_path / "target"
    context.place.log.symlink_to(target)
    with pytest.raises(JobError, match="cannot start"):
        supervisor_of(context).start(["true"], os.environ)
    assert not target.exists()


def test_a_connection_that_came_after_the_lock_aborts(context: Context) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        part = Checkpointing(context, Order(1, leave_running=True, restores=0))
        part._tree = Tree(os.getpid())
        with pytest.raises(JobError, match=r"port .* was opened after the network was locked"):
            part._require_locked()
        part._network = look(part._tree.pids)
        part._require_locked()
        with (
            socket.create_connection(listening.getsockname()),
            pytest.raises(JobError, match=r"the connection of .* after the network"),
        ):
            part._require_locked()
        part._tree.close()


def test_ports_without_nft_are_refused_before_anything_is_locked(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpustasis.jobs.rank.find_nft", lambda: None)
    monkeypatch.setattr("gpustasis.jobs.network.find_nft", lambda: None)
    part = Checkpointing(context, Order(1, leave_running=True, restores=0))
    with pytest.raises(JobError, match="no nft"):
        part._require_known(Network(ports=frozenset([80])))
    with socket.create_server(("127.0.0.1", 0)):
        context.note(pid=os.getpid())
        with pytest.raises(JobError, match="no nft"):
            part.lock_network()
    assert not context.state.network


@pytest.fixture
def nft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_nft(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")


@pytest.mark.usefixtures("nft")
@pytest.mark.parametrize("images", ["", "epoch"])
def test_what_cannot_be_said_of_the_tasks_leaves_nothing_locked(
    images: str,
    context: Context,
    task: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def why_not_running(tree: Tree, place: Path) -> str:
        asked.append(place)
        raise OSError("no answer")

    monkeypatch.setattr(Tree, "why_not_running", why_not_running)
    context.note(pid=task.pid, epoch=1, images=images, cuda=True, network=True)
    part = Checkpointing(context, Order(1, leave_running=True, restores=0, joined=True))
    if images:
        with pytest.raises(JobError, match="no answer"):
            part.release()
    else:
        part.release()  # there was no criu: nobody is asked
    assert bool(asked) is bool(images)
    assert not context.state.network
    assert not context.state.cuda


@pytest.mark.usefixtures("nft")
def test_the_next_keeper_unlocks_what_was_left_locked(context: Context) -> None:
    context.note(network=True)
    assert supervisor_of(context).run(restoring=False).status is None
    assert not context.state.network


def test_tasks_that_run_although_they_are_committed_are_killed_at_once(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointing, "_ENDING_S", 60)  # so long others are waited for
    script = "for i in 1 2 3 4 5 6 7 8 9 10; do sleep 1000 & sleep 0.02; done; wait"
    with subprocess.Popen(["sh", "-c", script], start_new_session=True) as task:
        context.note(pid=task.pid, epoch=1)
        part = Checkpointing(context, Order(1, leave_running=False, restores=0, joined=True))
        part._tree = Tree(task.pid)
        begin = time.monotonic()
        time.sleep(0.1)  # others are made meanwhile
        part.finish(leave_running=False)
        assert time.monotonic() - begin < 30
        assert living(task.pid) == []


def living(group: int) -> list[int]:
    """Processes of a process group that are no zombies."""
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with suppress(OSError):
            if os.getpgid(pid) == group and state_of(pid) != "Z":
                found.append(pid)
    return found


@pytest.mark.parametrize("told_at", [0.0, 1.0])
@pytest.mark.parametrize(("life", "is_verified"), [(1, False), (1, True), (0, False)])
def test_tasks_that_have_ended_after_a_restore_have_failed_unless_their_status_tells(
    life: int,
    is_verified: bool,
    told_at: float,
    context: Context,
    task: subprocess.Popen[bytes],
) -> None:
    """That of a job which is recovered does; not where a command is to say that it is back. What a
    signal to the keeper has ended is not the checkpoint's."""
    check = Check(words=("true",), seconds=60) if is_verified else None
    context.options = replace(context.options, check=check)
    context.life = life
    context.note(pid=task.pid)
    task.kill()
    task.wait()
    context.told_at = told_at
    restoring = Restoring(context, Order(7, leave_running=True, restores=2))
    if life and not is_verified:
        restoring.finish(leave_running=True)
    else:
        with pytest.raises(JobError, match="its tasks have ended"):
            restoring.finish(leave_running=True)
    store, keys = context.store, context.keys
    assert bool(verified.verdict(store, keys, 7, 0)) == is_verified
    assert set(verified.marks(store, keys, [2])) == ({2} if is_verified and not told_at else set())
