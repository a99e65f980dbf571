# SPDX-License-Identifier: Apache-2.0
"""What NCCL has in a process that a checkpoint does not survive, as far as /proc tells.

NCCL reads its settings from the environment that a process was started with; one that the program
has changed itself, or that stands in a file of NCCL's, is not seen here. What is read is another
user's: it is bounded, and only compared and quoted. docs/operating.md has the table.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

PROC = Path("/proc")
LAST_580 = 13000  # CUDA version of driver 580: newer ones abort an NCCL process group

THREADS, NVLS, P2P, CUMEM = "nccl", "nccl-nvls", "nccl-p2p", "nccl-cumem"
RAS, GDRCOPY, RDMA = "nccl-ras", "gdrcopy", "rdma"
RISKS = (THREADS, NVLS, P2P, CUMEM, RAS, GDRCOPY, RDMA)

_ENVIRON_BYTES = 4 << 20
_MAPS_BYTES = 64 << 20
_PROGRAM_BYTES = 256 << 20  # of a program that may have NCCL linked into it
_ENTRIES = 1 << 16  # threads, descriptors
_CHUNK = 1 << 20
_SHOWN = 40  # characters of a value
_LIBRARY = re.compile(rb"/lib(?:nccl\.so|nccl_static|nccl-net)[^/]*$")
_FABRIC = re.compile(rb"/libfabric\.so[^/]*$")
_SYMBOL = b"ncclCommInitRank\0"
_OF_TORCH = ("pt_nccl_watchdg", "pt_nccl_heartbt")
_OF_NCCL = "NCCL "  # how it begins the names of its threads, with NCCL_SET_THREAD_NAME=1
_LOCAL_PEERS = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")  # of torchrun, of Open MPI


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """name: as in RISKS. breaks: it is known to break a checkpoint; else it may. remedy: what to
    do."""

    name: str
    breaks: bool
    text: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Of one process. environ: None: it cannot be read. threads: NCCL's and PyTorch's for it.
    devices: files below /dev that are open."""

    pid: int
    has_nccl: bool = False
    has_fabric: bool = False
    environ: Mapping[str, str] | None = None
    threads: frozenset[str] = frozenset()
    devices: frozenset[str] = field(default_factory=frozenset)

    @property
    def has_anything(self) -> bool:
        """Whether there may be findings."""
        return self.has_nccl or self.has_fabric or bool(self.devices)

    def setting(self, name: str) -> str | None:
        return None if self.environ is None else self.environ.get(name)

    def is_set(self, name: str, *values: str) -> bool:
        return self.setting(name) in values

    @property
    def has_local_peers(self) -> bool:
        """Whether its launcher says that others of its job are on this host."""
        sizes = [self.setting(name) or "" for name in _LOCAL_PEERS]
        return any(re.fullmatch(r"[0-9]{1,9}", size) and int(size) > 1 for size in sizes)


def look(pid: int) -> Seen:
    """What there is of NCCL in a process. One that ends meanwhile has nothing."""
    place = PROC / str(pid)
    threads = frozenset(
        name for name in _threads(place) if name in _OF_TORCH or name.startswith(_OF_NCCL)
    )
    paths = set(_mapped(place))
    has_library = any(_LIBRARY.search(path) for path in paths)
    return Seen(
        pid=pid,
        has_nccl=bool(threads) or has_library or _is_linked_in(place),
        has_fabric=any(_FABRIC.search(path) for path in paths),
        environ=_environ(place),
        threads=threads,
        devices=frozenset(_devices(place)),
    )


def findings(
    seen: Seen, driver_version: int | None, *, shares_host: bool, stands: bool
) -> Iterator[Found]:
    """driver_version: as Driver.version; None: it is not known. shares_host: other processes of the
    job are on this host. stands: the program has come to a safe point, where its communicators are
    down."""
    yield from _device_files(seen)
    if not seen.has_nccl:
        return
    of_torch = sorted(seen.threads.intersection(_OF_TORCH))
    if of_torch and (driver_version is None or driver_version > LAST_580):
        yield Found(
            name=THREADS,
            breaks=True,
            text=f"process {seen.pid} is a member of an NCCL process group (thread {of_torch[0]}), "
            "and drivers newer than 580 abort those that they are asked to checkpoint",
            remedy="take it down first: destroy_process_group in `before` of a safe point",
        )
    if not seen.is_set("NCCL_NVLS_ENABLE", "0"):
        yield _wrong(
            *(seen, NVLS, "NCCL_NVLS_ENABLE", "0"),
            why="with multicast memory (NVLS) a checkpoint hangs, and after a restore none can be "
            "made",
        )
    if not seen.is_set("NCCL_RAS_ENABLE", "0"):
        yield _wrong(
            *(seen, RAS, "NCCL_RAS_ENABLE", "0"),
            why="its two listening sockets are never closed, and their ports are taken at the "
            "restore",
        )
    yield from _shared_memory(seen, breaks=(shares_host or seen.has_local_peers) and not stands)


def _shared_memory(seen: Seen, *, breaks: bool) -> Iterator[Found]:
    has_p2p = not (
        seen.is_set("NCCL_P2P_DISABLE", "1") or seen.is_set("NCCL_P2P_LEVEL", "LOC", "0")
    )
    if has_p2p:
        yield _wrong(
            *(seen, P2P, "NCCL_P2P_DISABLE", "1"),
            why="a process that has GPU memory of another one by P2P cannot be restored",
            breaks=breaks,
        )
    if not seen.is_set("NCCL_CUMEM_ENABLE", "0"):
        yield _wrong(
            *(seen, CUMEM, "NCCL_CUMEM_ENABLE", "0"),
            why="a process that has imported a cuMem handle is checkpointed and can never be "
            "restored",
            breaks=breaks and has_p2p,
        )
    if not seen.is_set("NCCL_CUMEM_HOST_ENABLE", "0"):
        yield _wrong(
            *(seen, CUMEM, "NCCL_CUMEM_HOST_ENABLE", "0"),
            why="host memory that is shared by cuMem handles may not come back",
            breaks=False,
        )


def _device_files(seen: Seen) -> Iterator[Found]:
    for device in sorted(seen.devices):
        if device == "/dev/gdrdrv":
            yield Found(
                name=GDRCOPY,
                breaks=True,
                text=f"process {seen.pid} has {device} open, which CRIU cannot dump "
                f"({_said(seen, 'FI_HMEM_CUDA_USE_GDRCOPY')})",
                remedy="start it with FI_HMEM_CUDA_USE_GDRCOPY=0, and without NCCL_GDRCOPY_ENABLE",
            )
        else:
            yield Found(
                name=RDMA,
                breaks=True,
                text=f"process {seen.pid} has {device} open: neither the driver nor CRIU "
                f"checkpoints RDMA ({_said(seen, 'NCCL_IB_DISABLE')})",
                remedy="start it with NCCL_IB_DISABLE=1, or close it in `before` of a safe point",
            )
    is_off = seen.is_set("FI_HMEM_CUDA_USE_GDRCOPY", "0")
    if seen.has_fabric and not is_off and "/dev/gdrdrv" not in seen.devices:
        yield _wrong(
            *(seen, GDRCOPY, "FI_HMEM_CUDA_USE_GDRCOPY", "0"),
            why="libfabric keeps /dev/gdrdrv open once it has used it",
            breaks=False,
        )


def _wrong(
    seen: Seen, name: str, setting: str, wanted: str, *, why: str, breaks: bool = True
) -> Found:
    return Found(
        name=name,
        breaks=breaks,
        text=f"process {seen.pid}: {_said(seen, setting)}: {why}",
        remedy=f"start it with {setting}={wanted}",
    )


def _said(seen: Seen, setting: str) -> str:
    value = seen.setting(setting)
    if value is not None:
        more = "..." if len(value) > _SHOWN else ""
        return f"{setting} is {value[:_SHOWN]!r}{more}"
    return f"{setting} is not {'set' if seen.environ is not None else 'known'}"


def _environ(place: Path) -> dict[str, str] | None:
    """Of what the process was started with; the first of two wins, as for getenv(3)."""
    try:
        with (place / "environ").open("rb", buffering=0) as file:
            data = _read(file.fileno(), _ENVIRON_BYTES)
    except OSError:
        return None
    found: dict[str, str] = {}
    for line in data.split(b"\0"):
        name, equals, value = line.partition(b"=")
        if equals:
            found.setdefault(
                name.decode(errors="backslashreplace"), value.decode(errors="backslashreplace")
            )
    return found


def _read(descriptor: int, most: int) -> bytes:
    parts, left = [], most
    while left and (part := os.read(descriptor, min(left, _CHUNK))):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _mapped(place: Path) -> Iterator[bytes]:
    """Paths of mapped files."""
    with suppress(OSError), (place / "maps").open("rb", buffering=0) as file:
        for line in _read(file.fileno(), _MAPS_BYTES).splitlines():
            at = line.find(b"/")
            if at >= 0:
                yield line[at:].removesuffix(b" (deleted)")


def _is_linked_in(place: Path) -> bool:
    """Whether the program itself has NCCL's symbols."""
    with suppress(OSError), (place / "exe").open("rb", buffering=0) as file:
        left, kept = _PROGRAM_BYTES, b""
        while left > 0 and (part := file.read(_CHUNK)):
            if _SYMBOL in kept + part:
                return True
            kept = part[-len(_SYMBOL) :]
            left -= len(part)
    return False


def _threads(place: Path) -> Iterator[str]:
    for entry in _entries(place / "task"):
        with suppress(OSError):  # it has ended
            yield (entry / "comm").read_text(errors="replace").rstrip("\n")


def _devices(place: Path) -> Iterator[str]:
    for entry in _entries(place / "fd"):
        with suppress(OSError):  # it is closed
            target = os.readlink(entry)
            if target == "/dev/gdrdrv" or target.startswith("/dev/infiniband/"):
                yield target


def _entries(place: Path) -> Iterator[Path]:
    with suppress(OSError), os.scandir(place) as found:
        for _, entry in zip(range(_ENTRIES), found, strict=False):
            yield Path(entry.path)
