# SPDX-License-Identifier: Apache-2.0
"""How long a job that is left running stands still, from rates alone: bytes a second in, seconds
out. Held against what was measured, and asked about GPUs that were not there."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

GB = 10**9
_NEVER = math.inf  # a rate that limits nothing


def _require_positive(rates: object, *names: str) -> None:
    for name in names:
        if not getattr(rates, name) > 0:
            raise ValueError(f"{name} is {getattr(rates, name)} bytes/s: a rate is greater than 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Bytes a second of each GPU, to the host (down) and back (up); all GPUs copy side by side."""

    down: float
    up: float

    def __post_init__(self) -> None:
        _require_positive(self, "down", "up")

    def divided(self, scale: float) -> Rates:
        """Those of a GPU that is so many times slower."""
        return Rates(down=self.down / scale, up=self.up / scale)

    def as_dict(self) -> dict[str, float]:
        return {"down": self.down, "up": self.up}


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Bytes a second of the machine, with all its processors where nothing else is said.

    read: memory of a task is read. hash: bytes that are at hand are hashed and tried with LZ4;
    check: they are hashed alone.
    memory, memory_back: bytes go to pages of a tmpfs that are there, and come from a tmpfs.
    storage, read_back: they go to the disk, synced, and come from it. criu: CRIU's one thread
    stores pages. drop: pages are taken from a task; refill: they are put back. stage, unstage:
    staging is filled and emptied for all GPUs together; map_down, map_up: memory is copied off the
    GPUs and onto them without staging; filled: what can go onto the GPUs at all, where each of them
    is a file to which one thread at a time can write. Where the driver's own rates are known, these
    five limit nothing.
    fixed: seconds of everything that is not copying: lock, unlock, CRIU's own work.
    """

    read: float
    hash: float
    check: float
    memory: float
    memory_back: float
    storage: float
    read_back: float
    criu: float
    drop: float
    refill: float
    stage: float = _NEVER
    unstage: float = _NEVER
    map_down: float = _NEVER
    map_up: float = _NEVER
    filled: float = _NEVER
    fixed: float = 0.0

    def __post_init__(self) -> None:
        _require_positive(self, "read", "hash", "check", "memory", "storage", "read_back", "criu")
        _require_positive(self, "drop", "refill", "stage", "unstage")
        _require_positive(self, "memory_back", "map_down", "map_up", "filled")
        if self.fixed < 0:
            raise ValueError(f"fixed is {self.fixed} s: a time is not negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Tasks, GPUs of each, and bytes on each GPU. A GPU is of one task alone. filled_share: of the
    bytes, that are not zero; zeros are looked at, and neither stored nor written anywhere."""

    tasks: int
    gpus: int
    size: float
    filled_share: float = 1.0

    def __post_init__(self) -> None:
        if self.tasks < 1 or self.gpus < 1 or self.size < 0:
            raise ValueError(f"{self} is no job: it needs a task, a GPU and 0 bytes at least")
        if not 0 <= self.filled_share <= 1:
            raise ValueError(f"{self} is no job: 0 to 1 of its bytes are not zero")

    @property
    def total(self) -> float:
        return self.tasks * self.gpus * self.size

    @property
    def filled(self) -> float:
        """Bytes that are not zero."""
        return self.total * self.filled_share


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How a dump is made. in_turn: the driver works in one task after the other. externalized: the
    plugin stores GPU memory, not CRIU. direct: it never lies in the task, but goes from the GPU to
    who stores it. in_memory: images go to a tmpfs. keeps: staging stays in the task."""

    in_turn: bool = False
    externalized: bool = True
    direct: bool = False
    in_memory: bool = False
    keeps: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """Seconds, one after the other. down: the driver, to the host; where copying and storing go on
    side by side (direct), both, and store is 0. up: likewise on the way back."""

    fixed: float
    down: float
    store: float
    drop: float
    refill: float
    up: float

    @property
    def downtime(self) -> float:
        """From lock to unlock of a job that runs on."""
        return self.dump + self.refill + self.up

    @property
    def dump(self) -> float:
        """Of a dump that ends the job."""
        return self.fixed + self.down + self.store + self.drop

    def as_dict(self) -> dict[str, float]:
        names = ("fixed", "down", "store", "drop", "refill", "up")
        return {name: round(getattr(self, name), 4) for name in names}


def predict(way: Way, shape: Shape, rates: Rates, host: Host) -> Predicted:
    """The parts of a dump that leaves the job running.

    Tasks of the same size are done at the same time, so that nothing is stored while the driver
    works in another one. Bytes that are not zero are taken for noise: all of them are stored.
    """
    down, up = driver_seconds(way, shape, rates)
    staged = {
        "down": max(down, shape.total / host.stage),
        "up": max(up, shape.filled / host.unstage),
    }
    if not way.externalized:
        store = shape.total / host.criu
        return Predicted(fixed=host.fixed, store=store, drop=0.0, refill=0.0, **staged)
    # A disk works beside the processors.
    written = 0.0 if way.in_memory else shape.filled / host.storage
    store = max(storing_seconds(way, shape, host), written)
    if way.direct:
        # The GPU's memory is given away meanwhile: it comes back from what was stored.
        read = 0.0 if way.in_memory else shape.filled / host.read_back
        back = returning_seconds(way, shape, host)
        return Predicted(
            fixed=host.fixed,
            down=max(down, store),
            store=0.0,
            drop=0.0,
            refill=0.0,
            up=max(up, back, read, shape.filled / host.filled),
        )
    return Predicted(
        fixed=host.fixed,
        store=store,
        drop=0.0 if way.keeps else shape.total / host.drop,
        refill=0.0 if way.keeps else shape.filled / host.refill,
        **staged,
    )


def driver_seconds(way: Way, shape: Shape, rates: Rates) -> tuple[float, float]:
    """By its rates alone, down and up. Out of staging it copies all that it has put there; without
    it the plugin hands over what is not zero, on memory that it has filled with zeros."""
    turns = shape.tasks if way.in_turn else 1
    share = shape.filled_share if way.direct else 1.0
    return turns * shape.size / rates.down, turns * share * shape.size / rates.up


def storing_seconds(way: Way, shape: Shape, host: Host) -> float:
    """Of the processors, which do one thing after the other: bytes are copied from where they lie,
    and looked at, which takes as long as hashing. What is not zero is hashed; for a disk it is
    tried with LZ4, what goes to memory is not, before its drain."""
    looked = shape.total - shape.filled
    copied = shape.total / (host.map_down if way.direct else host.read) + looked / host.check
    if way.in_memory:
        return copied + shape.filled * (1 / host.check + 1 / host.memory)
    return copied + shape.filled / host.hash


def returning_seconds(way: Way, shape: Shape, host: Host) -> float:
    """Of the processors, on the way back without staging: what was stored is hashed, and copied
    onto the GPUs."""
    memory = 1 / host.memory_back if way.in_memory else 0.0
    return shape.filled * (1 / host.map_up + 1 / host.check + memory)


def host_of(
    limits: dict[str, Any], medium: str, in_memory: str, fixed: float, shape: Shape, way: Way
) -> Host:
    """The machine of a run, from its limits (limits.measure_limits), for a job of this shape that
    is dumped in this way. medium, in_memory: names of what images lie on and of a tmpfs, which may
    be the same. An emulated GPU is a file of a tmpfs, and gets its bytes by write(2): one thread at
    a time can do that to a file. Out of staging each task fills one GPU after the other."""
    threads = max(int(each) for each in limits["read_process"])
    written = limits[medium]["write"]
    tmpfs = limits[in_memory]

    def to_files(count: int) -> float:
        return max(float(rate) for files, rate in tmpfs["write"].items() if int(files) <= count)

    return Host(
        read=max(limits["read_process"].values()),
        hash=threads / (1 / limits["xxh3"] + 1 / limits["lz4_random"]),
        check=limits["xxh3"] * threads,
        memory=max(tmpfs["rewrite"].values()),
        memory_back=max(tmpfs["read"].values()),
        storage=max(written.values()),
        read_back=max(limits[medium]["read"].values()),
        criu=tmpfs["write"]["1"],  # into the page cache, as into a tmpfs
        drop=limits["drop"]["1"],
        refill=max(limits["write_process"].values()),
        stage=max(limits["write_process"].values()),  # the emulator's driver is the processors
        unstage=to_files(1 if way.in_turn else shape.tasks),
        map_down=max(tmpfs["read"].values()),
        map_up=max(tmpfs["write"].values()),
        filled=to_files(shape.tasks * shape.gpus),
        fixed=fixed,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A GPU, and what others have published of it. size: bytes in use. source: of the rates;
    assumed: which of them are not of this GPU, and whose they are, or empty."""

    name: str
    size: float
    staged: Rates
    direct: Rates
    source: str
    assumed: str


# oOraph/bench-criu, 8 x A100-80GB (p4de), driver 615.71.09: readv and write 9 GB/s, NVMe 16 GB/s,
# filling from disk 21 GB/s, taking pages out 3 s for 76 GB, CRIU's own work 3 s; of a stock dump of
# 58 s 38 were the driver's: CRIU stored 76 GB in 17 s. hash and check are not theirs: XXH3, and a
# try of LZ4, in 16 threads, each as fast as one on the machine of docs/performance.md. memory and
# memory_back have no source, they are assumed: of 16 threads that copy to pages of a tmpfs that are
# there, and from them.
PUBLISHED_HOST = Host(
    read=9 * GB,
    hash=16 * 11 * GB,
    check=16 * 35 * GB,
    memory=24 * GB,
    memory_back=24 * GB,
    storage=16 * GB,
    read_back=16 * GB,
    criu=76 * GB / 17,
    drop=76 * GB / 3,
    refill=21 * GB,
    fixed=3.0,
)
CARDS = (
    Card(
        name="A100",
        size=76 * GB,
        staged=Rates(down=2.0 * GB, up=7.0 * GB),
        direct=Rates(down=8.9 * GB, up=10.8 * GB),
        source="oOraph/bench-criu, driver 615.71.09",
        assumed="",
    ),
    Card(
        name="H100",
        size=76 * GB,
        staged=Rates(down=5.0 * GB, up=5.0 * GB),
        direct=Rates(down=8.9 * GB, up=10.8 * GB),
        source="NVIDIA/cuda-checkpoint#29, about 15 s a GPU and toggle",
        assumed="direct: the A100's",
    ),
    Card(
        name="B200",
        size=145.4 * GB,
        staged=Rates(down=5.0 * GB, up=145.4 * GB / 17.9),
        direct=Rates(down=43.5 * GB, up=43.5 * GB),
        source="ai-dynamo/snapshot, benchmarks.md: 145.4 GB restored in 17.9 s",
        assumed="staged, down: the H100's; direct: half of the 87 GB/s that a pinned arena of two "
        "GPUs reached in ai-dynamo/snapshot#206, no custom storage",
    ),
)
PUBLISHED_WAYS = {
    "stock": Way(in_turn=True, externalized=False),
    "ours": Way(),
    "ours ram": Way(in_memory=True, keeps=True),
    "ours direct": Way(direct=True),
    "ours direct+ram": Way(direct=True, in_memory=True),
}


def predictions() -> list[dict[str, Any]]:
    """Downtimes of one task and of eight, each with a GPU, of CARDS on PUBLISHED_HOST."""
    found = []
    for card in CARDS:
        for tasks in (1, 8):
            shape = Shape(tasks=tasks, gpus=1, size=card.size)
            seconds = {
                name: round(
                    predict(
                        way, shape, card.direct if way.direct else card.staged, PUBLISHED_HOST
                    ).downtime,
                    1,
                )
                for name, way in PUBLISHED_WAYS.items()
            }
            found.append(
                {
                    "gpu": card.name,
                    "gpus": tasks,
                    "gpu_bytes": card.size,
                    "seconds": seconds,
                    "source": card.source,
                    "assumed": card.assumed,
                }
            )
    return found


def published_dumps() -> list[dict[str, Any]]:
    """Dumps of 76 GB that others have measured on the machine of PUBLISHED_HOST, and what the model
    makes of them. None of the host's figures was derived from these two."""
    (card,) = (each for each in CARDS if each.name == "A100")
    shape = Shape(tasks=1, gpus=1, size=card.size)
    rows = (
        (
            "Staging, taken out by a plugin",
            51.6,
            predict(Way(), shape, card.staged, PUBLISHED_HOST),
        ),
        ("CustomStorage", 11.4, predict(Way(direct=True), shape, card.direct, PUBLISHED_HOST)),
    )
    return [
        {
            "what": what,
            "predicted_seconds": round(predicted.dump, 1),
            "measured_seconds": measured,
            "ratio": round(predicted.dump / measured, 3),
        }
        for what, measured, predicted in rows
    ]
