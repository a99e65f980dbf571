# SPDX-License-Identifier: Apache-2.0
"""What NCCL has in a rank's processes, looked for before anything of the job is locked."""

from __future__ import annotations

import logging
import socket
from collections.abc import Collection

from gpustasis import nccl
from gpustasis.errors import JobError
from gpustasis.jobs.cuda import load_driver
from gpustasis.jobs.rank import Context
from gpustasis.jobs.records import addresses_of

log = logging.getLogger(__name__)


def require(context: Context, using: Collection[int], *, stands: bool) -> None:
    """None of these CUDA processes has what is known to break a checkpoint, or it is allowed; what
    may break one is told. stands: their program is at a safe point. Raises JobError, DriverError,
    StoreError."""
    seen = [nccl.look(pid) for pid in using]
    if not any(one.has_anything for one in seen):
        return
    shares = sum(one.has_nccl for one in seen) > 1 or _shares_host(context)
    version = load_driver().version()
    for one in seen:
        for found in nccl.findings(one, version, shares_host=shares, stands=stands):
            if found.breaks and found.name not in context.options.risks:
                raise JobError(
                    f"{context.name}: {found.text}; {found.remedy}, or allow it with --risk "
                    f"{found.name}"
                )
            log.warning("%s: %s; %s", context.name, found.text, found.remedy)


def _shares_host(context: Context) -> bool:
    """Whether another rank's keeper has said that it is on this host."""
    keys = {context.keys.addresses(rank): rank for rank in range(context.world)}
    hosts = {
        keys[key]: addresses_of(key, entry)["host"]
        for key, entry in context.store.read(*keys).entries.items()
    }
    return any(
        host == socket.gethostname() and rank != context.place.rank for rank, host in hosts.items()
    )
