# SPDX-License-Identifier: Apache-2.0
"""The agent as the keeper of ranks in containers: for whom it is one, and for how long. In this
process, with a real store, and scripts as criu starts them; which containers run is said here."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from gpustasis import policy
from gpustasis.agent import containers, members, ranks
from gpustasis.agent.config import Config
from gpustasis.errors import AgentError, EngineError, JobError
from gpustasis.jobs import epochs
from gpustasis.jobs.member import Keeper
from gpustasis.jobs.messages import Phase
from gpustasis.jobs.network import Lock, Network
from gpustasis.jobs.place import State
from gpustasis.jobs.records import Plan
from gpustasis.jobs.server import Server
from gpustasis.jobs.store import Put
from gpustasis.jobs.visits import Visit
from gpustasis.task import boot_id, read_task
from support.job_ranks import namespace, tables
from support.packet_filters import put_nft
from support.rank_node import KEYS, POLL_S, TIMEOUT_S, A, B, Node, answer, wait_for


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    with TemporaryDirectory(prefix="ranks-") as name, ExitStack() as held:
        place = Path(name)
        held.callback(Server(place / "jobs.sock", place / "journal").close)
        made = Node(place, held)
        held.callback(made.store.close)
        monkeypatch.setattr(policy, "POLICY_DIRECTORY", str(made.policies))
        monkeypatch.setattr(members, "_RUN", place / "run")
        monkeypatch.setattr(containers, "running", lambda wanted: made.running & set(wanted))
        monkeypatch.setattr(ranks, "_RUNNING_S", POLL_S)
        monkeypatch.setattr(ranks, "_SCAN_S", POLL_S)
        monkeypatch.setattr(members, "_AGAIN_S", POLL_S)
        yield made


def test_a_keeper_is_there_for_as_long_as_its_container_runs(node: Node) -> None:
    """One that stayed would take part for a rank whose next container is on another host."""
    node.start()
    assert not node.has_keeper()
    node.add(A)
    wait_for(node.has_keeper)
    node.running.clear()  # its policy stays when it has ended by a checkpoint
    wait_for(lambda: not node.has_keeper())
    node.add(A)  # it is started again
    wait_for(node.has_keeper)
    node.end(A)
    wait_for(lambda: not node.has_keeper())


def test_a_container_that_has_ended_has_no_keeper(node: Node) -> None:
    node.add(A)
    node.running.clear()
    node.start()
    node.add(B)  # is looked at afterwards
    wait_for(node.has_keeper)
    node.end(B)
    wait_for(lambda: not node.has_keeper())


def test_what_an_agent_has_left_of_one_that_has_ended_is_done(node: Node) -> None:
    number = epochs.begin(node.store, KEYS, Plan(world=1, leave_running=False))
    epochs.abort(node.store, KEYS, number, "test")
    node.rank.make()
    node.rank.store(State(boot=boot_id().hex(), epoch=number))
    node.store.write([], [Put(KEYS.rank(0), str(number))])
    node.add(A)
    node.running.clear()
    node.start()
    wait_for(lambda: KEYS.settled(number, 0) in node.store.read(KEYS.settled(number, 0)).entries)
    wait_for(lambda: not node.has_keeper())


def test_it_is_tried_again_to_be_a_containers_keeper(node: Node) -> None:
    """The agent before this one had not ended yet, or its state could not be read."""
    node.rank.make()
    held = node.rank.only_keeper()
    node.add(A)
    started = node.start()
    wait_for(lambda: started._told)
    assert "has a keeper on this host" in str(started._told)
    os.close(held)
    wait_for(lambda: started._members)


def test_a_state_that_cannot_be_read_keeps_nobody_away(node: Node) -> None:
    node.rank.make()
    state = node.rank.run / "state.json"
    state.write_text("{")
    node.add(A)
    started = node.start()
    wait_for(lambda: "cannot be used" in str(started._told))
    state.unlink()
    wait_for(lambda: started._members)


def test_a_policy_that_cannot_be_read_is_read_again(node: Node) -> None:
    file = node.policies / f"{A}.toml"
    file.write_text("[")
    started = node.start()
    wait_for(lambda: "it is no policy file" in str(started._told))
    node.add(A)
    wait_for(lambda: started._members)


def test_the_next_container_may_say_another_world(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody but the one that asks looks who runs meanwhile: B does not run either."""
    monkeypatch.setattr(ranks, "_RUNNING_S", TIMEOUT_S)
    monkeypatch.setattr(members, "_END_S", TIMEOUT_S)
    node.add(A, world=3)
    started = node.start()
    wait_for(node.has_keeper)
    rank = policy.Rank("job", 0, 2)
    with pytest.raises(JobError, match="is one of 2 ranks, and another one of 3"):
        started._member(rank, B)
    node.running.clear()
    assert started._member(rank, B).known == {B}


def test_a_keeper_that_just_ends_by_itself_is_waited_for(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It needs the lock under which it was told to stop."""
    monkeypatch.setattr(ranks, "_RUNNING_S", TIMEOUT_S)
    node.add(A, world=3)
    started = node.start()
    wait_for(lambda: started._members)
    (keeper,) = started._members.values()
    leaves, leave, stop = threading.Event(), keeper._leave, keeper.stop

    def say_and_leave(member: members.Member) -> bool:
        leaves.set()
        return leave(member)

    def stop_as_it_leaves() -> None:
        keeper.drop({A})
        assert leaves.wait(TIMEOUT_S)
        stop()

    monkeypatch.setattr(keeper, "_leave", say_and_leave)
    monkeypatch.setattr(keeper, "stop", stop_as_it_leaves)
    node.running.clear()
    assert started._member(policy.Rank("job", 0, 2), B).known == {B}
    assert keeper not in started._members.values()


def test_an_agent_that_ends_makes_no_keeper(node: Node) -> None:
    """Nobody would have it end."""
    started = node.start()
    started.close()
    node.add(A)
    with pytest.raises(AgentError, match="about to end"):
        started._member(policy.Rank("job", 0, 1), A)
    assert not node.has_keeper()


def test_two_containers_are_not_one_rank(node: Node) -> None:
    """One of them would be in the checkpoint of the job, and the other not."""
    node.add(A)
    node.add(B)
    started = node.start()
    wait_for(lambda: [one.known for one in started._members.values()] == [{A, B}])
    assert "a rank is one container" in answer(node.script("pre-dump", A))
    epochs.begin(node.store, KEYS, Plan(world=1, leave_running=True))
    wait_for(lambda: epochs.phase(node.store, KEYS, 1)[0].phase.is_final)
    assert "a rank is one container" in epochs.phase(node.store, KEYS, 1)[0].note


def test_a_script_whose_criu_has_ended_is_a_no(node: Node) -> None:
    """Its parent is whoever takes in orphans then: its end would be waited for."""
    node.add(A)
    node.start()
    assert answer(node.script("pre-dump", A, "1")).startswith("no criu has ended")


def test_a_script_is_answered_though_no_keeper_comes(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was touched yet: the container runs on, and its engine says why."""

    def broken(*_: object) -> None:
        raise JobError("what is stored cannot be")

    monkeypatch.setattr(Keeper, "take_part", broken)
    limits = {f"jobs_{name}": 0.1 for name in ("ttl", "away", "look_limit", "cuda_limit")}
    node.config = replace(node.config, jobs_network_limit=0.1, **limits)
    node.add(A)
    node.start()
    said = answer(node.script("pre-dump", A))
    assert said == "no job job, rank 0: its keeper has not come to epoch 1\n"
    wait_for(lambda: epochs.phase(node.store, KEYS, 1)[0].phase is Phase.ABORTED)


def test_an_engine_that_begins_when_the_epoch_is_over_is_too_late(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has asked for a checkpoint of the job was told that every rank runs on."""
    reached, go_on = threading.Event(), threading.Event()

    def slow(*_: object, **__: object) -> None:
        reached.set()
        go_on.wait(TIMEOUT_S)

    monkeypatch.setattr(containers, "dump_rank", slow)
    node.add(A)
    node.start()
    epochs.begin(node.store, KEYS, Plan(world=1, leave_running=False))
    assert reached.wait(TIMEOUT_S)
    epochs.abort(node.store, KEYS, 1, "it was given up")
    said = answer(node.script("pre-dump", A))
    assert said == "no the engine has begun too late: epoch 1 is aborted: it was given up\n"
    assert node.newest() == "1"
    go_on.set()


def test_a_container_whose_engine_was_asked_by_an_agent_that_was_killed_is_resumed(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines leave it paused when nobody waits for their answer any more."""
    resumed: list[str] = []

    def resume(container: str, _: Config) -> None:
        resumed.append(container)
        if len(resumed) == 1:
            raise EngineError("it does not answer yet")

    def slow(*_: object, **__: object) -> None:
        asks.append(file.read_text())
        raise EngineError("test")

    monkeypatch.setattr(containers, "resume_rank", resume)
    monkeypatch.setattr(containers, "dump_rank", slow)
    asks: list[str] = []
    node.rank.make()
    file = node.rank.run / "asks"
    file.write_text(A)
    node.add(A)
    node.start()
    wait_for(lambda: not file.exists())
    assert resumed == [A, A]
    epochs.begin(node.store, KEYS, Plan(world=1, leave_running=True))
    wait_for(lambda: epochs.phase(node.store, KEYS, 1)[0].phase.is_final)
    assert (asks, file.exists()) == ([A], False)


def test_an_epoch_that_cannot_begin_is_not_tried_for_ever(node: Node) -> None:
    """Somebody has pruned the checkpoint since it was found."""
    node.add(A)
    started = node.start()
    wait_for(lambda: started._members)
    (member,) = started._members.values()
    node.store.write([], [Put(KEYS.pruned(7), "1")])
    said: list[str] = []
    visit = Visit(
        action="post-restore",
        container=A,
        pid=os.getpid(),
        criu=os.getpid(),
        criu_start=1,
        images=Path("/none"),
        leaves_running=False,
    )

    def begin() -> None:
        try:
            member._epoch(visit, 7)
        except JobError as exc:
            said.append(str(exc))

    beginning = threading.Thread(target=begin, daemon=True)
    beginning.start()
    beginning.join(TIMEOUT_S)
    assert said


def test_whatever_goes_wrong_a_rank_has_a_keeper(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def broken(*_: object) -> None:
        calls.append(1)
        raise ValueError("of a library")

    monkeypatch.setattr(Keeper, "take_part", broken)
    node.add(A)
    node.start()
    wait_for(lambda: len(calls) > 1)


def test_what_was_left_locked_is_unlocked_in_its_containers_network(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_nft(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    unshare = shutil.which("unshare")
    assert unshare is not None
    with subprocess.Popen([unshare, "--net", "sleep", "1000"]) as task:
        try:
            wait_for(lambda: namespace(task.pid) != namespace(os.getpid()))
            lock = Lock("job", 0, task.pid)
            lock.take(Network(ports=frozenset({5})))
            assert "gpustasis_" in tables(task.pid)
            start_time = read_task(task.pid).start_time
            state = State(boot=boot_id().hex(), pid=task.pid, start_time=start_time, network=True)
            node.rank.make()
            node.rank.store(state)
            node.add(A)
            node.start()
            wait_for(lambda: not node.rank.load().network)
            assert "gpustasis_" not in tables(task.pid)
        finally:
            task.kill()
