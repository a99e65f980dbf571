# SPDX-License-Identifier: Apache-2.0
"""Whether a rank's tasks can be dumped at all, as far as that can be told while they run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from gpustasis.criu.plugin import plugin_directory
from gpustasis.errors import JobError
from gpustasis.jobs.cuda import require_unlocked
from gpustasis.jobs.rank import Context
from gpustasis.jobs.stopping import strays
from gpustasis.streaming.tree import resident_bytes


def require_dumpable(context: Context, images: Path) -> None:
    """That they can, to `images`. Nothing is touched. Raises CheckpointError."""
    if not context.state.lives:
        raise JobError(f"{context.name} has no tasks: there is nothing to checkpoint")
    if context.gate.is_held():
        raise JobError(f"{context.name}: a criu still waits for a decision of an earlier epoch")
    pid = context.state.pid
    if not os.path.samestat(os.stat(f"/proc/{pid}/ns/net"), os.stat("/proc/self/ns/net")):
        raise JobError(f"{context.name}: its keeper is not in the network namespace of {pid}")
    if others := strays(pid):
        raise JobError(
            f"{context.name}: process {others[0]} has left the tree below {pid}, and would not "
            "be in the checkpoint"
        )
    plugin_directory()
    if images.exists():
        raise JobError(
            f"{context.name}: {images} exists: a job of this name has left it there; "
            "give another directory"
        )
    require_unlocked(context.name, pid)
    needed = resident_bytes(pid)
    free = shutil.disk_usage(context.place.directory).free
    if free < needed:
        raise JobError(
            f"{context.name}: {context.place.directory} has {free} bytes free, and the tasks "
            f"have {needed} in use"
        )
