# SPDX-License-Identifier: Apache-2.0
"""What a rank's dump is built on: in an epoch by the clock the rank's dump of the last checkpoint
that its tasks were in, or came from. Where anything speaks against that, the dump is a full one."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

from gpustasis.criu.plugin import run_settings
from gpustasis.draining.drain import can_be_drained
from gpustasis.errors import CheckpointError
from gpustasis.image.arena import Tier, tier_of
from gpustasis.image.store import why_not_whole
from gpustasis.jobs.aftercare import settle_at
from gpustasis.jobs.dumps import DumpRecord, record_of, stamp_of
from gpustasis.jobs.messages import Phase
from gpustasis.jobs.neighbour import CommitAt
from gpustasis.jobs.rank import Context
from gpustasis.jobs.records import epoch_of
from gpustasis.jobs.work import Order

log = logging.getLogger(__name__)

_SETTLE_S = 5.0  # for a drain that is at its last step


def is_between(context: Context, order: Order) -> bool:
    """Whether the dump is to be built on an earlier one, and later ones on it: that of an epoch by
    the clock is. Raises StoreError."""
    if not context.options.max_chain or not order.leave_running:
        return False
    mark = context.keys.in_between(order.number)
    return mark in context.store.read(mark).entries


def find_parent(context: Context) -> Path | None:
    """What a dump in between is built on. None: it is a full one; the log says why. Raises
    StoreError."""
    last = context.state.last
    if not last:
        log.info("%s: a full dump: none of these tasks is known", context.name)
        return None
    place = context.place.images(last)
    because = _why_not(context, last, place)
    if because:
        log.warning("%s: a full dump, not built on %s: %s", context.name, place, because)
        return None
    log.info("%s: the dump is built on %s", context.name, place)
    return place


def _why_not(context: Context, number: int, place: Path) -> str:
    """Why the dump of that epoch is not built on. Once it is read here that it is not pruned, and
    an epoch is open, nobody prunes it."""
    store, keys, rank = context.store, context.keys, context.place.rank
    phase_key, record_key = keys.phase(number), keys.record(number, rank)
    marks = {keys.pruned(number): "it is pruned", keys.evidence(number): "it is evidence"}
    found = store.read(phase_key, record_key, *marks).entries
    for mark, because in marks.items():
        if mark in found:
            return because
    try:
        if phase_key not in found or record_key not in found:
            return f"the store knows no epoch {number} with it"
        epoch, plan = epoch_of(phase_key, found[phase_key])
        if epoch.phase is not Phase.COMMITTED or plan.restores:
            return f"epoch {number} is no whole checkpoint"
        record = record_of(found[record_key].value, f"epoch {number}, rank {rank}")
        if record.host != socket.gethostname() or Path(record.directory) != place:
            return f"it is in {record.directory} on {record.host}"
        if not record.id:
            return "it is sealed, or holds nothing that gpustasis has stored"
        if run_settings(os.environ).get("recipients"):
            return "the dump is to be sealed, and it is in the clear"
        is_local = tier_of(place) is Tier.LOCAL
        if context.options.commit_at is CommitAt.DURABLE and is_local:
            return "it is only in memory yet, and the dump goes to the disk"
        if is_local and not can_be_drained(place):
            return "it can never be drained, nor could what is built on it"
        if not _is_as_committed(context, record, place):
            return "its files are not known to be those that were committed"
    except (CheckpointError, OSError) as exc:
        return str(exc)
    return why_not_whole(place)


def _is_as_committed(context: Context, record: DumpRecord, place: Path) -> bool:
    """A drain changes the files a moment before it is noted. Raises OSError, ImageError."""
    if f"{record.digest} {stamp_of(place)}" == context.state.stamp:
        return True
    settle_at(context.aftercare, place, _SETTLE_S)
    return f"{record.digest} {stamp_of(place)}" == context.state.stamp
