# SPDX-License-Identifier: Apache-2.0
"""What there is of an epoch that was aborted, where the rank's node was started anew since: its
keeper's state is gone, and what is on the disk, and at the neighbour, is not."""

from __future__ import annotations

import logging
import socket
from pathlib import Path

from gpustasis.dump_records import why_needed
from gpustasis.errors import CheckpointError, JobError, StoreError
from gpustasis.image.directory import is_there
from gpustasis.jobs import neighbour
from gpustasis.jobs.dumps import DumpRecord, named_in, record_of
from gpustasis.jobs.messages import Phase
from gpustasis.jobs.rank import Context
from gpustasis.jobs.records import epoch_of

log = logging.getLogger(__name__)


def clear_aborted(context: Context, number: int) -> None:
    """Have the copy of the rank's dump in that epoch removed, and the dump if it is known to be
    that one: a store that has lost its entries counts anew, and then another epoch's has its name.
    Raises OSError; CheckpointError if a drain is at work, or
    it cannot be told whether a process needs the dump."""
    images = context.place.images(number)
    copied = context.aftercare.sent_copy(images)
    if copied is None and not is_there(images):
        return
    try:
        phase, record = _read(context, number)
    except StoreError as exc:
        log.warning("%s is left as it is: %s", images, exc)
        phase, record = None, None
    if phase not in {Phase.ABORTED, None}:
        return
    if copied is None and record is not None and record.is_copied:
        copied = (record.peer, record.key)
    try:
        may_go = phase is not None and not context.state.pid and is_there(images)
        if may_go and (why_not := why_needed(images)):
            log.warning("%s stays: %s", images, why_not)
        elif may_go and _is_its(images, copied, record):
            neighbour.remove(images)
            log.info("%s is removed: epoch %d was aborted", images, number)
    finally:
        if copied is not None:
            context.aftercare.forget(*copied)


def _read(context: Context, number: int) -> tuple[Phase | None, DumpRecord | None]:
    """How far the epoch has come, and the rank's record; None: it is not known. Raises
    StoreError."""
    keys, rank = context.keys, context.place.rank
    phase, record = keys.phase(number), keys.record(number, rank)
    found = context.store.read(phase, record).entries
    reached: Phase | None = None
    try:
        if phase in found:
            reached = epoch_of(phase, found[phase])[0].phase
        if record in found:
            return reached, record_of(found[record].value, f"epoch {number}, rank {rank}")
    except JobError as exc:
        log.warning("%s", exc)
    return reached, None


def _is_its(images: Path, copied: tuple[str, str] | None, record: DumpRecord | None) -> bool:
    """Whether what is there is what was sent, or what this host has a record of. Power that was
    lost may have left nothing in it that says which dump it is."""
    known = {neighbour.id_in(copied[1])} if copied is not None else set()
    is_here = record is not None and record.host == socket.gethostname()
    if record is not None and is_here and record.directory == str(images):
        known.add(record.id)
    try:
        return bool(known) and not images.is_symlink() and named_in(images) <= known
    except CheckpointError as exc:
        log.warning("%s is left as it is: %s", images, exc)
        return False
