# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of a job restored to be looked at: each rank alone, in a network namespace that
leads nowhere, and beside whatever the store says of the job."""

from __future__ import annotations

import ctypes
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from gpustasis import process
from gpustasis.criu import run
from gpustasis.criu.find import Criu
from gpustasis.criu.images import read_pstree
from gpustasis.errors import CheckpointError, JobError
from gpustasis.files import changeable_by_others
from gpustasis.jobs.dumps import DumpRecord, require_same
from gpustasis.jobs.network import Lock, Network
from gpustasis.jobs.stopping import killed
from gpustasis.streaming.tree import Tree

Found = TypeVar("Found")
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET of linux/sched.h
_IP_S = 20.0
_SCRIPT = """\
#!/bin/sh
[ "$CRTOOLS_SCRIPT_ACTION" = pre-resume ] || exit 0
kill -STOP {pids}
"""


@dataclass(frozen=True, slots=True)
class Replayed:
    """pid: of the root of the rank's tasks."""

    rank: int
    pid: int
    directory: str


def replay(
    job: str, records: Sequence[tuple[int, DumpRecord]], criu: Criu, *, runs: bool
) -> list[Replayed]:
    """Bring these ranks back. runs: they run; else they stand, as after SIGSTOP. Raises JobError
    and what criu.run.restore raises; what was brought back before that is killed."""
    if not records:
        raise JobError(f"job {job}: no dump of this checkpoint is on this host")
    for rank, record in records:
        _require_free(rank, record)
    done: list[Replayed] = []
    try:
        for rank, record in records:
            pid = _in_thread(partial(_restored, job, rank, record, criu, runs))
            done.append(Replayed(rank, pid, record.directory))
    except BaseException:
        for one in done:
            _kill(one.pid)
        raise
    return done


def is_here(record: DumpRecord) -> bool:
    """Whether the dump is on this host, or shared with it."""
    return Path(record.directory).is_dir()


def _require_free(rank: int, record: DumpRecord) -> None:
    images = Path(record.directory)
    if not is_here(record):
        raise JobError(f"rank {rank}: its dump is in {images} on {record.host}, and not here")
    wrong = next(changeable_by_others(str(images), owners=(0, os.geteuid())), None)
    if wrong is not None:
        raise JobError(
            f"rank {rank}: {images}, which the store names, is not restored: {wrong}; whoever can "
            "change it decides what is run as this user"
        )
    require_same(record)
    for task in read_pstree(images):
        if Path(f"/proc/{task.pid}").exists():
            raise JobError(
                f"rank {rank}: process {task.pid} exists, and is to be restored: the job may run "
                "here; replay it on another host"
            )


def _in_thread(work: Callable[[], Found]) -> Found:
    """In a thread of its own, whose network namespace is its own from then on."""
    found: list[Found] = []
    failed: list[BaseException] = []

    def call() -> None:
        try:
            found.append(work())
        except BaseException as exc:  # noqa: BLE001 - raised below
            failed.append(exc)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return found[0]


def _restored(job: str, rank: int, record: DumpRecord, criu: Criu, runs: bool) -> int:
    _leave_network(record)
    if record.network != Network():
        Lock(f"{job}-replay", rank).take(record.network)  # the kernel would answer itself
    images = Path(record.directory)
    with _stopping(images) as words:
        settings = run.Settings(options={"tcp-established": True}, extra=() if runs else words)
        return run.restore(criu, images, settings).pid


@contextmanager
def _stopping(images: Path) -> Iterator[tuple[str, ...]]:
    """Arguments of a criu whose tasks stand as soon as it lets go of them. Its --leave-stopped
    stops them earlier, when the driver has still to bring back their GPU memory."""
    pids = " ".join(str(task.pid) for task in read_pstree(images))
    # Beside the dump: programs often cannot be run from elsewhere.
    with tempfile.TemporaryDirectory(prefix=".replay-", dir=images.parent) as place:
        script = Path(place) / "script"
        descriptor = os.open(script, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o700)
        with open(descriptor, "w") as file:
            file.write(_SCRIPT.format(pids=pids))
        yield ("--action-script", str(script))


def _leave_network(record: DumpRecord) -> None:
    """A namespace with the addresses that the rank had, so that its sockets can be bound, and
    with no other link than its own."""
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_NETWORK) != 0:
        raise JobError(f"no network namespace can be made: {os.strerror(ctypes.get_errno())}")
    commands = [["link", "set", "lo", "up"]]
    commands += [
        ["addr", "add", f"{address}/{128 if ':' in address else 32}", "dev", "lo"]
        for address in record.addresses
        if not address.startswith("127.") and address != "::1"
    ]
    # What goes to other ranks needs a route, or CRIU cannot make the sockets; it ends there.
    commands.append(["route", "add", "default", "dev", "lo"])
    for words in commands:
        try:
            done = process.run(["ip", *words], timeout_s=_IP_S)
        except OSError as exc:
            raise JobError(f"ip {' '.join(words)}: {exc.strerror or exc}") from exc
        if done.status != 0:
            raise JobError(f"ip {' '.join(words)}: {done.output.strip() or done.ending}")


def _kill(pid: int) -> None:
    try:
        killed(Tree(pid)).close()
    except CheckpointError:
        return  # it has ended
