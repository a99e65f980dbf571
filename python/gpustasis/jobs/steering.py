# SPDX-License-Identifier: Apache-2.0
"""What a person, or a program, asks and says of a job that is recovered; no keeper calls this."""

from __future__ import annotations

import time
from dataclasses import replace

from gpustasis.errors import JobError
from gpustasis.jobs.leading import last_standing, read_ranks
from gpustasis.jobs.lives import (
    Failure,
    Life,
    Recovery,
    Stage,
    Way,
    life_of,
    recovery_of,
    standing_text,
)
from gpustasis.jobs.records import Keys
from gpustasis.jobs.store import Put, Require, Store


def find_life(store: Store, keys: Keys) -> Life:
    """Of a job that is recovered. Raises JobError, StoreError."""
    entry = store.read(keys.life).entries.get(keys.life)
    if entry is None:
        raise JobError(
            f"job {keys.job} is not one that is recovered: no keeper of it was started with "
            "`gpustasis job run --restarts`"
        )
    return life_of(keys.life, entry)


def all_recoveries(store: Store, keys: Keys) -> list[Recovery]:
    """Oldest first. Raises JobError, StoreError."""
    found = store.read(keys.recovery()).entries
    return [recovery_of(key, found[key]) for key in sorted(found)]


def fence(store: Store, keys: Keys, rank: int) -> Life:
    """Take it from whoever asks that a rank has no tasks. Raises JobError, StoreError."""
    life = find_life(store, keys)
    if rank >= life.world:
        raise JobError(f"job {keys.job}: rank {rank}: must be 0 to {life.world - 1}")
    # In a life that goes on a rank has tasks; what it has left of earlier ones is waited for, too.
    waits = life.stage is Stage.STOPS or life.stage.is_final
    last = last_standing(store, keys, rank, life.number if waits else life.number - 1)
    if not waits and (last is None or not last[1].may_run):
        raise JobError(
            f"job {keys.job} is in life {life.number}, stage {life.stage}: it waits for no rank in "
            "this stage"
        )
    if last is None or last[1].way is Way.STOPPED:
        raise JobError(f"job {keys.job}: rank {rank} has no tasks in life {life.number}")
    number, standing = last
    key = keys.in_life(number, rank)
    found = read_ranks(store, keys, life)
    if rank in found.keepers and found.keepers[rank].is_mine(standing.where):
        raise JobError(
            f"job {keys.job}: rank {rank} has a keeper on {standing.where.host}, where its tasks "
            "are: it stops them itself"
        )
    put = Put(key, standing_text(replace(standing, way=Way.STOPPED, by="fence")))
    requires = [Require(key, standing.revision), Require(keys.life, life.revision)]
    if not store.write(requires, [put]).applied:
        raise JobError(f"job {keys.job}: it has gone on meanwhile; look at it again")
    return life


def give_up(store: Store, keys: Keys) -> Life:
    """Raises JobError, StoreError."""
    while True:
        life = find_life(store, keys)
        if life.stage.is_final:
            return life
        if life.stage is Stage.RESTORES:
            raise JobError(f"job {keys.job} is being restored by epoch {life.epoch}: wait for it")
        failure = Failure(rank=0, reason="given up by hand", at=time.time())
        after = life.given_up(failure)
        answer = store.write([Require(keys.life, life.revision)], [Put(keys.life, after.to_text())])
        if answer.applied:
            return replace(after, revision=answer.revision)


def require_no_recovery(store: Store, keys: Keys) -> None:
    """The job is not just being restored by itself. Raises JobError, StoreError."""
    entry = store.read(keys.life).entries.get(keys.life)
    life = None if entry is None else life_of(keys.life, entry)
    if life is not None and life.stage in {Stage.LOOKS, Stage.STOPS, Stage.RESTORES}:
        raise JobError(
            f"job {keys.job} is being restored by itself, in life {life.number}: wait for it, or "
            "end it with `gpustasis job give-up`"
        )
