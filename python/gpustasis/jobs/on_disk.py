# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints of a job are on disks, and not perhaps in the memory of two hosts alone. Who
prunes may not see the directories of other hosts: so the prune of each host says in the store which
dumps of its own are drained.

epochs/E/drained/R   the dump of rank R is on a disk, as a prune on its host has seen
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from pathlib import Path

from gpustasis.jobs.dumps import DumpRecord, may_be_in_memory, record_of
from gpustasis.jobs.epochs import Standing
from gpustasis.jobs.records import Keys
from gpustasis.jobs.store import Put, Store
from gpustasis.peers.copies import FETCHED


def on_disk(store: Store, keys: Keys, newest_first: Iterable[Standing], most: int) -> list[int]:
    """The first so many of these whole checkpoints that are on disks: all dumps of each. What is
    seen here of others is said in the store. Raises JobError, StoreError."""
    found: list[int] = []
    for one in newest_first:
        if len(found) == most:
            break
        if _is_on_disk(store, keys, one):
            found.append(one.number)
    return found


def _is_on_disk(store: Store, keys: Keys, one: Standing) -> bool:
    if one.is_engines:
        return True
    unsaid = [rank for rank in sorted(one.records) if rank not in one.drained]
    records = {
        rank: record_of(one.records[rank], f"epoch {one.number}, rank {rank}") for rank in unsaid
    }
    seen = [rank for rank in unsaid if not may_be_in_memory(records[rank])]
    for rank in seen:
        if records[rank].is_copied and _is_of_here(records[rank]):
            store.write([], [Put(keys.drained(one.number, rank), "1")])
    return seen == unsaid


def _is_of_here(record: DumpRecord) -> bool:
    """Else another host says it of its own: not each of all."""
    return record.host == socket.gethostname() or (Path(record.directory) / FETCHED).is_file()
