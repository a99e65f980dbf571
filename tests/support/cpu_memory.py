# SPDX-License-Identifier: Apache-2.0
"""Jobs without CUDA whose memory our plugin stores (tests/programs/memory_job.c)."""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from campaigns.rig import Rig, Run
from campaigns.steady_job import SteadyJob, process_state
from gpustasis._core import ImageReader
from gpustasis.criu.plugin import Scalar
from support.job import POLL_S, TIMEOUT_S

OURS: dict[str, Scalar] = {"cpu_memory": "ours"}
_DEATH_S = 20.0
WITHOUT_PLUGIN = "Missing required plugin: "  # in criu's log
FIRST_CHECKPOINT = "' hook 11 "  # in criu's log
_MAPPING = re.compile(r"([0-9a-f]+-[0-9a-f]+) rw-p \S+ 00:00 0 .*")
_HUGE_PAGE_KB = 2048


@contextmanager
def running(
    rig: Rig, program: Path, *, criu_restores: bool = False, **options: int
) -> Iterator[SteadyJob]:
    """criu_restores: some of its memory is left to CRIU, as what a child shares is. Where all get
    huge pages CRIU fills holes, also in what has refused them: it repeats that to the kernel only
    when the memory is there."""
    if huge_pages_for_all() and (criu_restores or options.get("children")):
        options["holes"] = 0
    job = SteadyJob(program, rig.scratch / "memory.log", rig.environ, **options)
    try:
        yield job
    finally:
        job.end()


def stop(job: SteadyJob) -> None:
    """All of it: nothing of its memory changes until go_on()."""
    for pid in job.pids:
        os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + TIMEOUT_S
    while any(process_state(tid) != "T" for pid in job.pids for tid in _threads(pid)):
        assert time.monotonic() < deadline, "the job does not stop"
        time.sleep(POLL_S)


def go_on(job: SteadyJob) -> None:
    for pid in job.pids:
        os.kill(pid, signal.SIGCONT)


def _threads(pid: int) -> list[int]:
    return [int(name) for name in os.listdir(f"/proc/{pid}/task")]


def huge_pages_for_all() -> bool:
    """Whether this kernel gives huge pages to whatever has not refused them."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return setting.exists() and "[always]" in setting.read_text()


@dataclass(frozen=True, slots=True)
class Resident:
    """kB of each private anonymous mapping of a process that are in memory: those into which the
    kernel may put huge pages, and the others. shared: of each of them, what other processes have
    as well. own_huge_kb: of those of may_grow, in huge pages. huge_kb: what the kernel has put into
    any process of this machine's since it runs; it fills holes, and is shared with nobody."""

    exact: dict[str, int]
    may_grow: dict[str, int]
    shared: dict[str, int]
    own_huge_kb: int
    huge_kb: int

    @property
    def kb(self) -> int:
        return sum(self.exact.values()) + sum(self.may_grow.values())


def resident(pid: int) -> Resident:
    for_all = huge_pages_for_all()
    exact, may_grow, shared = {}, {}, {}
    mapping, size, own_huge = "", 0, 0
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        key, _, value = line.partition(":")
        if " " in key:
            found = _MAPPING.fullmatch(line)
            mapping = found[1] if found else ""
        elif mapping and key == "Rss":
            size = int(value.split()[0])
        elif mapping and key == "Shared_Dirty":
            shared[mapping] = int(value.split()[0])
        elif mapping and key == "AnonHugePages":
            own_huge += int(value.split()[0])
        elif mapping and key == "VmFlags":
            grows = for_all or "hg" in value.split()
            (may_grow if grows else exact)[mapping] = size
    counts = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    # By khugepaged, at any moment; and where all get them, whenever a page is touched.
    made = int(counts.get("thp_collapse_alloc", 0))
    if for_all:
        made += int(counts.get("thp_fault_alloc", 0))
    return Resident(exact, may_grow, shared, own_huge, made * _HUGE_PAGE_KB)


def require_counted(found: Resident, kb: int) -> None:
    """More of it was looked at than that, in the way that tells most on this kernel."""
    looked_at = found.may_grow if huge_pages_for_all() else found.exact
    assert sum(looked_at.values()) > kb, found


def shared_places(pids: Sequence[int]) -> set[str]:
    """Mappings that all have, each behind one that all have: CRIU's restore shares none that lies
    directly behind mappings of which one ends elsewhere, or is protected otherwise."""
    found = []
    for pid in pids:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        found.append(set(itertools.pairwise(" ".join(line.split()[:2]) for line in lines)))
    return {place.split()[0] for _, place in set.intersection(*found)}


def pages_bytes(images: Path) -> int:
    return sum(path.stat().st_size for path in images.glob("pages-*.img"))


def require_refused_when_damaged(
    rig: Rig, job: SteadyJob, images: Path, name: str, starts: Container[int] | None = None
) -> None:
    """A restore of a copy of which a byte of a stored chunk is another, one at `starts` if that is
    given, kills all; the checkpoint itself is restored."""
    damaged = rig.copy(images)
    image = ImageReader.open(damaged / name)
    chunks = (image.chunk(number) for number in range(len(image)))
    chunk = next(
        one for one in chunks if one.stored_size and (starts is None or one.address in starts)
    )
    with (damaged / name).open("r+b") as file:
        file.seek(chunk.offset + chunk.stored_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    log = refused(rig.restore(damaged))
    assert "every restored task was killed" in log and name in log
    deadline = time.monotonic() + 10  # of SIGKILL, which takes its time with much memory
    while job.alive_pids() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not job.alive_pids()
    job.reap()
    assert rig.restore(images).status == 0
    job.run_on()


def end_processes(job: SteadyJob) -> None:
    """Its processes, and not the record of what they have said."""
    for pid in job.pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + TIMEOUT_S
    while any(process_state(pid) for pid in job.pids):
        assert time.monotonic() < deadline, "the job does not end"
        job.reap()
        time.sleep(POLL_S)


def require_dead(job: SteadyJob) -> None:
    """A process that was killed may take a moment to be gone."""
    deadline = time.monotonic() + _DEATH_S
    while job.alive_pids() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not job.alive_pids()


def refused(run: Run) -> str:
    """criu's log."""
    assert run.status != 0, run.log[-2000:]
    return run.log
