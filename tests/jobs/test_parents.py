# SPDX-License-Identifier: Apache-2.0
"""Dumps in between that are built on earlier ones: which, what is kept for them, and that a job
comes back from them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gpustasis.draining.recycle import UNSYNCED
from gpustasis.emulator import Emulator
from gpustasis.errors import JobError, PeerError
from gpustasis.jobs import epochs, kept
from gpustasis.jobs.checkpointing import Checkpointing
from gpustasis.jobs.dumps import DumpRecord, content_of, seal_of, stamp_of
from gpustasis.jobs.lead import digest_of
from gpustasis.jobs.messages import Phase
from gpustasis.jobs.neighbour import CommitAt
from gpustasis.jobs.network import Network
from gpustasis.jobs.parents import find_parent, is_between
from gpustasis.jobs.place import place_of
from gpustasis.jobs.rank import Context, Options
from gpustasis.jobs.records import Keys, Plan, phase_text
from gpustasis.jobs.store import Put, Store
from gpustasis.jobs.work import Order
from jobs.test_ranks import network, ring, store  # noqa: F401 - fixtures
from support.criu_roots import newest_criu
from support.inventory import write_inventory
from support.json_output import check_document
from support.local_checkpoints import make_local
from support.ring import WORLD, Ring

SAME_BYTES = 1 << 19  # of GPU memory that a rank of the ring never changes


def ranks_of(ring: Ring, epoch: int) -> list[dict[str, Any]]:  # noqa: F811
    """Records of a whole checkpoint."""
    shown = ring.job("show", "--epoch", str(epoch), "--json")
    assert shown.returncode == 0, shown.stderr
    found: list[dict[str, Any]] = check_document(shown.stdout, "job show")["ranks"]
    return found


def whole(ring: Ring) -> list[int]:  # noqa: F811
    """Epochs that can be restored."""
    shown = check_document(ring.job("list", "--json").stdout, "job list")["epochs"]
    return [one["epoch"] for one in shown if one["whole"]]


def kill_between_epochs(ring: Ring) -> None:  # noqa: F811
    """Whoever has the clock stands while it is looked at, and begins none."""

    def ends() -> int:
        return len(re.findall(r"epoch [0-9]+: (?:committed|aborted)", ring.log_whole(0)))

    def is_settled() -> bool:
        # Not in the middle of an epoch: it would get on only between one look and the next.
        before = ends()
        ring.wait(lambda: ends() > before)
        time.sleep(0.3)  # what is older goes
        ring.signal(0, signal.SIGSTOP)
        shown = check_document(ring.job("list", "--json").stdout, "job list")["epochs"][-1]
        if shown["state"] in ("committed", "aborted") and shown["settled"] == WORLD:
            return True
        ring.signal(0, signal.SIGCONT)
        return False

    ring.wait(is_settled)
    ring.kill_host()


def test_a_killed_job_comes_back_from_a_dump_that_is_built_on_others(
    ring: Ring,  # noqa: F811
    emulator: Emulator,
) -> None:
    words = ("--restore-newest", "--interval", "2s")
    ring.start_all(*words, "--max-chain", "100")
    ring.wait(lambda: "epoch 3: committed" in ring.log_whole(0))
    # One that fails leaves what others are built on, and its rank builds the next on nothing.
    emulator.add_fault("checkpoint", "error", code=999, count=1)
    ring.wait(lambda: ": aborted" in ring.log_whole(0))
    aborted = int(re.findall(r"epoch ([0-9]+): aborted", ring.log_whole(0))[0])
    ring.wait(lambda: not list(ring.directory.glob(f"kept/rank-*/epoch-{aborted:08d}")))
    before = list(range(1, aborted))
    records = {epoch: ranks_of(ring, epoch) for epoch in before}
    assert [one["parent"] for one in records[1]] == [""] * WORLD
    for older, newer in pairwise(before):
        for one, next_one in zip(records[older], records[newer], strict=True):
            assert next_one["parent"] == one["id"] != ""
            assert next_one["bytes"] < records[1][0]["bytes"] - SAME_BYTES // 2
    ring.wait(lambda: f"epoch {aborted + 1}: committed" in ring.log_whole(0), timeout_s=120)
    ring.wait_for_progress()
    kill_between_epochs(ring)
    newest = whole(ring)[-1]
    after = ranks_of(ring, aborted + 1)
    (failed,) = (rank for rank, one in enumerate(after) if not one["parent"])
    other = (failed + 1) % WORLD
    assert after[other]["parent"] == records[aborted - 1][other]["id"]

    pruned = ring.job("prune", "--keep-last", "1")
    assert pruned.returncode == 0, pruned.stderr
    assert whole(ring) == [newest]
    assert not (ring.directory / f"kept/rank-{failed}/epoch-00000001").exists()
    (image,) = ring.directory.glob(f"kept/rank-{other}/epoch-00000001/gpustasis-[0-9]*.img")
    held = image.read_bytes()
    image.write_bytes(held[: len(held) // 2] + b"?" + held[len(held) // 2 + 1 :])
    verified = ring.job("verify")
    assert verified.returncode == JobError.exit_code
    assert f"rank {other}: " in verified.stdout, verified.stdout
    image.unlink()
    ring.start_restoring()
    refused = ring.job("restore")
    assert refused.returncode == JobError.exit_code
    assert f"/rank-{other}/" in refused.stderr
    assert " cannot be restored: gpustasis-" in refused.stderr  # before anything is made
    ring.end()
    image.write_bytes(held)
    verified = ring.job("verify")
    assert verified.returncode == 0, verified.stdout

    # Restored, it is built on what it was restored from; a chain that is too long has an end.
    words = (*words, "--keep-last", "1", "--max-chain", "1")
    ring.start_all(*words)
    ring.wait_for_progress()
    assert all(f"goes on from epoch {newest}" in ring.log_whole(rank) for rank in range(WORLD))
    ended = f"/epoch-{newest:08d} ends a chain"
    ring.wait(lambda: all(ended in ring.log_whole(rank) for rank in range(WORLD) if rank != failed))
    ring.wait(lambda: not image.parent.exists())  # nothing needs it any more
    ring.wait_for_progress()
    kill_between_epochs(ring)
    newest = whole(ring)[-1]
    ring.start_all(*words)
    ring.wait_for_progress()
    assert all(f"goes on from epoch {newest}" in ring.log_whole(rank) for rank in range(WORLD))


NUMBER, OTHER = 1, 2


@pytest.fixture
def context(new_store: Callable[[], Store], tmp_path: Path) -> Context:
    place = place_of("job", 0, tmp_path / "kept", tmp_path / "run")
    place.make()
    keys = Keys("job", top=f"/gpustasis/test-{tmp_path.name}")
    return Context(place, 2, new_store(), keys, Options(criu=newest_criu(), max_chain=8))


def put_epoch(
    context: Context, *parents: int, evidence: bool = False, dump_ms: int = 1, peer: str = ""
) -> int:
    """A whole checkpoint whose ranks' dumps are built on those of earlier ones; 0: on none."""
    keys, plan = context.keys, Plan(world=2, leave_running=True)
    number = epochs.begin(context.store, keys, plan)
    records = {}
    for rank, parent in enumerate(parents or (0, 0)):
        place = context.place.directory.parent / f"rank-{rank}/epoch-{number:08d}"
        place.mkdir(mode=0o700, parents=True)
        write_inventory(place, f"checkpoint-{number}-{rank}")
        size, digest = seal_of(place)
        record = DumpRecord(
            id=f"{number}-{rank}",
            parent=f"{parent}-{rank}" if parent else "",
            directory=str(place),
            host=socket.gethostname(),
            bytes=size,
            digest=digest,
            pid=1,
            dump_ms=dump_ms,
            addresses=(),
            network=Network(),
            peer=peer,
            key=f"{0:032x}-{0:016x}" if peer else "",
        )
        records[rank] = record.to_text()
    puts = [Put(keys.record(number, rank), text) for rank, text in records.items()]
    puts.append(Put(keys.phase(number), phase_text(plan, Phase.COMMITTED, digest_of(records))))
    if evidence:
        puts.append(Put(keys.evidence(number), "1"))
    context.store.write([], puts)
    return number


def test_what_a_kept_dump_is_built_on_is_kept(context: Context) -> None:
    def prune(keep_last: int) -> list[int]:
        return [one.epoch for one in kept.prune(context.store, context.keys, keep_last)]

    def there(rank: int) -> list[int]:
        """Epochs whose dump of the rank is there."""
        found = context.place.directory.parent.glob(f"rank-{rank}/epoch-*")
        return sorted(int(place.name[len("epoch-") :]) for place in found)

    for parents in ((0, 0), (1, 1), (0, 0), (0, 2), (0, 0)):
        put_epoch(context, *parents)
    assert prune(2) == [1, 2, 3]
    assert [there(0), there(1)] == [[4, 5], [1, 2, 4, 5]]  # 4 is built on 2 at one rank, that on 1
    assert prune(1) == [1, 2, 4]
    assert [there(0), there(1)] == [[5], [5]]
    six = put_epoch(context)
    put_epoch(context, six, six, evidence=True)
    put_epoch(context)
    assert prune(1) == [5, six]
    assert [there(0), there(1)] == [[6, 7, 8], [6, 7, 8]]


def test_what_an_engines_dump_is_built_on_is_the_engines(context: Context) -> None:
    put_epoch(context)
    number = put_epoch(context, 77, 77)
    with pytest.raises(JobError, match=f"epoch {number} is built on 77-[01], of which the store"):
        kept.prune(context.store, context.keys, 1)
    context.store.write([], [Put(context.keys.awaited(number), "1")])
    assert [one.epoch for one in kept.prune(context.store, context.keys, 1)] == [1]


def test_how_long_a_full_dump_takes(context: Context) -> None:
    def slowest() -> tuple[int, float] | None:
        return kept.slowest_dump(context.store, context.keys)

    assert slowest() is None
    put_epoch(context, dump_ms=9000)
    put_epoch(context, dump_ms=4000)
    assert slowest() == (2, 4.0)
    put_epoch(context, 2, 2, dump_ms=100)
    assert slowest() == (2, 4.0)
    put_epoch(context, 0, 3, dump_ms=200)
    kept.prune(context.store, context.keys, 1)
    assert slowest() == (2, 4.0)  # of rank 1
    put_epoch(context, 4, 0, dump_ms=300)
    assert slowest() == (5, 0.3)  # rank 0 has a full one in 4


def test_where_it_is_not_known_what_a_kept_dump_is_built_on_nothing_is_pruned(
    context: Context,
) -> None:
    for parents in ((0, 0), (1, 1), (2, 2)):
        put_epoch(context, *parents)
    context.store.write([], [Put(context.keys.record(2, 1), "{}")])
    with pytest.raises(JobError, match="epoch 3 is built on 2-1, of which the store has no record"):
        kept.prune(context.store, context.keys, 1)
    assert len(list(context.place.directory.parent.glob("rank-*/epoch-*"))) == 6


def touch(context: Context, _: DumpRecord) -> None:
    inventory = context.place.images(NUMBER) / "inventory.img"
    data, made = inventory.read_bytes(), inventory.stat().st_ctime_ns
    while inventory.stat().st_ctime_ns == made:  # the clock of a file system goes in ticks
        inventory.write_bytes(data)  # the same, anew


def prune_it(context: Context, _: DumpRecord) -> None:
    context.store.write([], [Put(context.keys.pruned(NUMBER), "1")])


def make_evidence(context: Context, _: DumpRecord) -> None:
    context.store.write([], [Put(context.keys.evidence(NUMBER), "1")])


def put_record(context: Context, record: DumpRecord) -> None:
    context.store.write([], [Put(context.keys.record(NUMBER, 0), record.to_text())])


@pytest.mark.parametrize(
    ("change", "because"),
    [
        (lambda *_: None, "no manifest"),  # nothing else speaks against it
        (touch, "its files are not known to be those that were committed"),
        (prune_it, "it is pruned"),
        (make_evidence, "it is evidence"),
        (lambda c, r: put_record(c, replace(r, host="another")), "it is in /.* on another"),
        (lambda c, r: put_record(c, replace(r, directory="/tmp")), "it is in /tmp on "),
        (lambda c, r: put_record(c, replace(r, id="")), "it is sealed, or holds nothing"),
        (lambda c, r: put_record(c, replace(r, digest="0" * 64)), "its files are not known"),
        (lambda c, _: c.note(last=(7, "")), "the store knows no epoch 7"),
        (lambda c, _: c.note(last=(0, "")), "none of these tasks is known"),
    ],
)
def test_a_dump_that_is_not_what_was_committed_is_not_built_on(
    context: Context,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[Context, DumpRecord], object],
    because: str,
) -> None:
    put_epoch(context)
    record = kept.records_of(epochs.standing(context.store, context.keys, NUMBER))[0]
    context.note(last=(NUMBER, f"{record.digest} {stamp_of(Path(record.directory))}"))
    change(context, record)
    order = Order(OTHER, leave_running=True, restores=0)
    assert not is_between(context, order)
    context.store.write([], [Put(context.keys.in_between(OTHER), "1")])
    assert is_between(context, order)
    caplog.set_level("INFO")
    assert find_parent(context) is None
    (said,) = caplog.messages
    assert said.startswith("rank 0: a full dump")
    assert re.search(because, said), said


def test_a_dump_that_is_sealed_is_not_built_on_one_in_the_clear(
    context: Context, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: Any
) -> None:
    (tmp_path / "config.toml").write_text('recipients = ["/etc/key.pem"]\n')
    monkeypatch.setenv("GPUSTASIS_CONFIG", str(tmp_path / "config.toml"))
    put_epoch(context)
    record = kept.records_of(epochs.standing(context.store, context.keys, NUMBER))[0]
    context.note(last=(NUMBER, f"{record.digest} {stamp_of(Path(record.directory))}"))
    assert find_parent(context) is None
    assert "the dump is to be sealed" in caplog.text


def test_a_dump_that_can_never_be_drained_is_not_built_on(
    context: Context, arena: Path, caplog: pytest.LogCaptureFixture
) -> None:
    context.options = replace(context.options, commit_at=CommitAt.PEER)
    place = context.place.images(put_epoch(context))
    shutil.rmtree(place)
    stored = make_local(place, arena)
    size, digest = content_of(place)
    found = kept.records_of(epochs.standing(context.store, context.keys, NUMBER))
    record = replace(found[0], id=stored.name, bytes=size, digest=digest)
    put_record(context, record)
    context.note(last=(NUMBER, f"{digest} {stamp_of(place)}"))
    assert find_parent(context) == place
    (stored / UNSYNCED).write_bytes(b"pages-1.img")
    assert find_parent(context) is None
    assert "it can never be drained" in caplog.text


@pytest.mark.parametrize("is_told", [False, True])
def test_after_a_dump_that_is_not_recorded_the_next_is_full_unless_its_epoch_was_over(
    context: Context, monkeypatch: pytest.MonkeyPatch, is_told: bool
) -> None:
    context.note(last=(NUMBER, "stamp"))
    part = Checkpointing(context, Order(OTHER, leave_running=True, restores=0))
    part._parent = context.place.images(NUMBER)

    def fail() -> str:
        if is_told:
            part.stopping.set()
        raise PeerError("the neighbour has no room for it")

    monkeypatch.setattr(part.criu, "start", lambda *_: True)
    monkeypatch.setattr(part, "_recorded", fail)
    with pytest.raises(PeerError):
        part.dump()
    assert context.place.load().last == (NUMBER if is_told else 0)


def test_other_tasks_were_in_no_checkpoint(context: Context) -> None:
    context.note(last=(1, "stamp"))
    assert context.place.load().last == 1  # the next keeper knows it
    context.note(pid=os.getpid())
    assert (context.state.last, context.state.stamp) == (0, "")
