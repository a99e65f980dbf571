# SPDX-License-Identifier: Apache-2.0
"""One keeper is told to end, and all ranks are checkpointed; started again, they go on."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gpustasis.errors import CheckpointError, JobError
from gpustasis.jobs import epochs, preempting, verified
from gpustasis.jobs.exchange import Settings
from gpustasis.jobs.gate import Gate
from gpustasis.jobs.lead import digest_of
from gpustasis.jobs.messages import Phase
from gpustasis.jobs.place import place_of
from gpustasis.jobs.rank import Context, Options
from gpustasis.jobs.records import Keys, Plan, phase_text
from gpustasis.jobs.store import Put, Store
from gpustasis.jobs.supervise import Supervisor
from jobs.test_ranks import network, ring, store  # noqa: F401 - fixtures
from support.command import call
from support.criu_roots import newest_criu
from support.job_ranks import wait_for
from support.json_output import check_document
from support.ring import WORLD, Ring

CHECKPOINTED = 75
WORDS = ("--checkpoint-on-sigterm", "--checkpointed-status", CHECKPOINTED, "--restore-newest")


def start(ring: Ring, *words: object) -> None:  # noqa: F811
    ring.start_all(*map(str, WORDS + words))


def test_sigterm_at_one_rank_checkpoints_all_and_the_same_words_go_on(
    ring: Ring,  # noqa: F811
) -> None:
    start(ring)
    ring.wait(lambda: min(ring.steps_now()) > 50)
    ring.signal(2, signal.SIGTERM)
    assert ring.ends() == [CHECKPOINTED] * WORLD, ring.logs()
    assert "rank 2: the job is checkpointed: about " in ring.log(2)
    assert "assumed, for none of this job was measured" in ring.log(2)
    assert ring.pids() == [] and ring.locked() == []

    start(ring)
    ring.wait_for_progress()
    assert all("goes on from epoch 1" in ring.log(rank) for rank in range(WORLD))
    # At the same time: one checkpoint. The signals come to both before either is heard.
    for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGCONT):
        for rank in (3, 1):
            ring.signal(rank, number)
    assert ring.ends() == [CHECKPOINTED] * WORLD, ring.logs()
    assert "the slowest dump of epoch 1 took " in ring.log(1)

    # What cannot be done in time is not begun: that rank alone is told.
    start(ring, "--grace", 6, "--speed", "1K")
    ring.wait_for_progress()
    assert all("goes on from epoch 3" in ring.log(rank) for rank in range(WORLD))
    ring.signal(0, signal.SIGTERM)
    statuses = ring.ends()
    assert statuses[0] == 128 + signal.SIGTERM
    assert set(statuses) <= {128 + signal.SIGTERM, 1}  # its neighbours miss it
    assert "a checkpoint of the job would take about" in ring.log(0)

    start(ring)
    ring.wait_for_progress()
    ring.signal(3, signal.SIGTERM)
    assert ring.ends() == [CHECKPOINTED] * WORLD, ring.logs()


def test_preempt_has_all_ranks_checkpointed_by_any_process_of_one(
    ring: Ring,  # noqa: F811
) -> None:
    start(ring)
    for epoch, rank in ((1, 2), (3, 0)):  # one that was started, and one that was restored
        ring.wait_for_progress()
        keeper = ring.keepers[rank]
        assert keeper is not None
        done = call("preempt", ring.program_of(rank), "--json")
        assert done.exit_code == 0, done.output + ring.logs()
        said = check_document(done.stdout, "preempt")
        assert said["supervisor"] == keeper.pid
        assert said["checkpoint"] == f"{ring.directory}/kept/rank-{rank}/epoch-{epoch:08d}"
        assert said["because"] == f"epoch {epoch} of job {ring.name}"
        assert ring.ends() == [CHECKPOINTED] * WORLD, ring.logs()
        start(ring, *(() if epoch == 1 else ("--grace", 6, "--speed", "1K")))

    ring.wait_for_progress()
    keeper = ring.keepers[1]
    assert keeper is not None
    done = call("preempt", keeper.pid)
    assert done.exit_code == CheckpointError.exit_code, done.output
    assert "no checkpoint: a checkpoint of the job would take about" in done.output
    statuses = ring.ends()
    assert statuses[1] == 128 + signal.SIGTERM
    assert ring.job("list").stdout.count("committed") == 4  # two checkpoints, two restores


def test_preempt_leaves_a_keeper_alone_that_would_pass_the_signal_on(
    ring: Ring,  # noqa: F811
) -> None:
    ring.start_all()
    ring.wait(lambda: min(ring.steps_now()) > 50)
    done = call("preempt", ring.program_of(3))
    assert done.exit_code == CheckpointError.exit_code
    assert "was started without --checkpoint-on-sigterm" in done.output
    ring.wait_for_progress()


def states(ring: Ring) -> list[str]:  # noqa: F811
    """Of all epochs, oldest first."""
    shown = check_document(ring.job("list", "--json").stdout, "job list")
    return [one["state"] for one in shown["epochs"]]


def test_checkpoints_in_between_and_just_in_time(
    ring: Ring,  # noqa: F811
) -> None:
    words = ("--interval", "2s", "--keep-last", 1, "--max-chain", 0)
    start(ring, *words)
    ring.wait(lambda: "epoch 3: committed" in ring.log_whole(0))
    ring.wait_for_progress()
    # An epoch is told of before what is older goes.
    ring.wait(lambda: states(ring)[:2] == ["pruned", "pruned"])
    ring.wait(lambda: len(dumps(ring)) <= 2 * WORLD)
    ring.signal(1, signal.SIGTERM)
    assert ring.ends() == [CHECKPOINTED] * WORLD, ring.logs()
    made = len(states(ring))
    assert f"rank-2/epoch-{made:08d}" in dumps(ring)

    start(ring, *words)
    ring.wait(lambda: f"epoch {made + 2}: committed" in ring.log_whole(0))  # one more restores
    ring.wait_for_progress()
    ring.wait(Gate(ring.directory / "run" / ring.name / "2", Path("/none")).is_held)  # of the next
    ring.kill_host()
    said = [len(ring.log_whole(rank)) for rank in range(WORLD)]
    start(ring)
    ring.wait_for_progress()
    shown = check_document(ring.job("list", "--json").stdout, "job list")["epochs"]
    # What was under way when the keepers were killed is aborted, or was whole.
    newest = max(one["epoch"] for one in shown if one["whole"])
    assert newest >= made + 2
    for rank in range(WORLD):
        assert f"goes on from epoch {newest}" in ring.log_whole(rank)[said[rank] :]


def dumps(ring: Ring) -> list[str]:  # noqa: F811
    kept = ring.directory / "kept"
    return [str(path.relative_to(kept)) for path in sorted(kept.glob("rank-*/epoch-*"))]


def test_a_checkpoint_that_is_not_decided_in_time_is_aborted(
    ring: Ring,  # noqa: F811
) -> None:
    ring.ttl = 30  # a lease that is over would say something else of rank 3
    start(ring, "--grace", 15, "--reserve", 5, "--speed", "1T")
    ring.wait(lambda: min(ring.steps_now()) > 50)
    ring.signal(3, signal.SIGSTOP)  # its keeper never joins
    ring.signal(1, signal.SIGTERM)
    ring.wait(lambda: "no checkpoint, the tasks are told to end: epoch 1" in ring.log(1))
    ring.signal(3, signal.SIGCONT)
    statuses = ring.ends()
    assert statuses[1] == 128 + signal.SIGTERM
    assert set(statuses) <= {128 + signal.SIGTERM, 1}
    assert "epoch 1 was aborted: rank 1 was told to end" in ring.log(1)
    assert ring.pids() == [] and ring.locked() == []


@pytest.fixture
def contexts(new_store: Callable[[], Store], tmp_path: Path) -> list[Context]:
    found = []
    for rank in range(2):
        place = place_of("job", rank, tmp_path / "kept", tmp_path / "run")
        place.make()
        keys = Keys("job", top=f"/gpustasis/test-{tmp_path.name}")
        found.append(Context(place, 2, new_store(), keys, Options(criu=newest_criu())))
    return found


def put_whole(context: Context, world: int = 2) -> int:
    """A checkpoint, as far as its records are looked at."""
    store, keys = context.store, context.keys  # noqa: F811
    plan = Plan(world=world, leave_running=False)
    number = epochs.begin(store, keys, plan)
    records = {rank: f"{rank}" for rank in range(world)}
    puts = [Put(keys.record(number, rank), text) for rank, text in records.items()]
    text = phase_text(plan, Phase.COMMITTED, digest_of(records))
    store.write([], [*puts, Put(keys.phase(number), text)])
    return number


def test_what_a_start_goes_on_from(contexts: list[Context]) -> None:
    first, second = contexts
    said: list[str] = []
    preempting.note_ended(first, said.append)  # nothing to say: there is no checkpoint
    assert preempting.to_restore(first) == 0
    one = put_whole(first)
    aborted = epochs.begin(first.store, first.keys, Plan(world=2, leave_running=True))
    epochs.abort(first.store, first.keys, aborted, "why not")
    assert [preempting.to_restore(each) for each in contexts] == [one, one]
    preempting.note_ended(first, said.append)
    assert preempting.to_restore(second) == one  # the other one has failed
    preempting.note_ended(second, said.append)
    assert [preempting.to_restore(each) for each in contexts] == [0, 0]
    two = put_whole(second)
    assert [preempting.to_restore(each) for each in contexts] == [two, two]
    assert said == []
    put_whole(first, world=3)
    with pytest.raises(JobError, match="is a checkpoint of 3 ranks, and the job is started with 2"):
        preempting.to_restore(first)


def test_a_start_does_not_go_back_behind_a_run_that_has_ended_well(contexts: list[Context]) -> None:
    """The only later checkpoint takes keepers along; one from before that end is no choice."""
    first, second = contexts
    said: list[str] = []
    one = put_whole(first)
    for each in contexts:
        preempting.note_ended(each, said.append)
    two = put_whole(first)
    first.store.write([], [verified.put_mark(first.keys, two, verified.Mark("why", lost=2))])
    first.options = replace(first.options, older=True)
    assert said == [] and one < two
    assert preempting.to_restore(first) == preempting.to_restore(second) == two


def test_a_checkpoint_that_is_pruned_meanwhile_is_not_restored(contexts: list[Context]) -> None:
    first, _ = contexts
    one = put_whole(first)
    plan = Plan(world=2, leave_running=True, restores=one)
    first.store.write([], [Put(first.keys.pruned(one), "1")])
    with pytest.raises(JobError, match="somebody else has just begun"):
        epochs.begin(first.store, first.keys, plan)
    assert preempting.to_restore(first) == 0


def test_rank_0_begins_the_restore_when_all_ranks_wait(contexts: list[Context]) -> None:
    first, second = contexts
    one = put_whole(first)
    said: list[str] = []
    lead = preempting.Restart(first, one, said.append)
    lead.start()
    wait_for(lambda: bool(said), "what it waits for")
    lead.join(0.5)
    assert lead.is_alive() and said == ["rank 0: waits for ranks 1, to be restored"]
    other = preempting.Restart(second, one, said.append)
    other.start()
    for each in (other, lead):
        each.join(60)
        assert not each.is_alive()
    _, plan = epochs.phase(first.store, first.keys, one + 1)
    assert plan == Plan(world=2, leave_running=True, restores=one)

    epochs.abort(first.store, first.keys, one + 1, "rank 1 was killed")
    again = preempting.Restart(first, one, said.append)
    again.start()  # that rank 1 waited then says nothing now
    again.join(1)
    assert again.is_alive()
    again.stop.set()
    again.join(60)
    assert not again.is_alive()


def test_another_epoch_does_not_keep_a_start_from_its_restore(contexts: list[Context]) -> None:
    first, second = contexts
    one = put_whole(first)
    starts = [preempting.Restart(each, one, lambda _: None) for each in (first, second)]
    starts[1].start()
    key = first.keys.said_by("waiting", 1)
    wait_for(lambda: key in first.store.read(key).entries, "rank 1 waits")
    # As somebody asks for who does not know that nothing runs yet.
    other = epochs.begin(first.store, first.keys, Plan(world=2, leave_running=True))
    epochs.abort(first.store, first.keys, other, "rank 0 has no tasks")
    starts[0].start()
    for each in starts:
        each.join(60)
        assert not each.is_alive()
    _, plan = epochs.phase(first.store, first.keys, other + 1)
    assert plan == Plan(world=2, leave_running=True, restores=one)


@pytest.mark.parametrize("phase", [Phase.LOOK, Phase.DUMP])
def test_an_epoch_in_which_all_keepers_died_does_not_hold_up_a_start(
    contexts: list[Context], phase: Phase
) -> None:
    first, second = contexts
    one = put_whole(first)
    plan = Plan(world=2, leave_running=False)
    two = epochs.begin(first.store, first.keys, plan)
    puts = [Put(first.keys.phase(two), phase_text(plan, phase))]
    if phase is Phase.DUMP:  # rank 1 had joined it
        puts.append(Put(first.keys.rank(1), str(two)))
    first.store.write([], puts)
    said: list[str] = []
    if phase is Phase.DUMP:
        assert not Supervisor(second, Settings(), said.append).settle()
        assert said[0].startswith("job job, rank 1, epoch 2: aborted")
    assert preempting.to_restore(first, patience_s=0.5) == one
    assert epochs.phase(first.store, first.keys, two)[0].phase is Phase.ABORTED
