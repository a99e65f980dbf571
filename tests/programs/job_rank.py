# SPDX-License-Identifier: Apache-2.0
"""One rank of a job.

job_rank.py DIRECTORY STORE RANK WORLD [PHASE:MOMENT]

Its task is a process that counts, in DIRECTORY/task-RANK. It is locked and stands still by SIGSTOP;
its dump is its count, in DIRECTORY/epoch-N-R. STORE: an etcd endpoint, or the path of a socket.
At the moment `begin` or `end` of the action PHASE the keeper kills itself, once; with `:stop` after
it, it stops itself; with `:no`, the action fails.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path

from gpustasis.jobs.etcd import Etcd
from gpustasis.jobs.etcd_words import Access
from gpustasis.jobs.local import Local
from gpustasis.jobs.member import Keeper, Settings
from gpustasis.jobs.messages import Limits
from gpustasis.jobs.records import Keys
from gpustasis.jobs.store import Store
from gpustasis.jobs.work import Order

LIMITS = Limits(look_s=15, lock_cuda_s=15, lock_network_s=15, dump_s=30)
SETTINGS = Settings(limits=LIMITS, ttl_s=6, store_s=5)


class Task:
    """What a keeper does with a real process."""

    def __init__(self, directory: Path, rank: int, fault: str) -> None:
        self.directory = directory
        self.rank = rank
        self.fault = fault
        self.stopped = False

    @property
    def pid(self) -> int:
        return int((self.directory / f"task-{self.rank}.pid").read_text())

    def at(self, moment: str) -> None:
        with (self.directory / f"log-{self.rank}").open("a") as log:
            log.write(f"{moment}\n")
        mark = self.directory / f"fault-{self.rank}"
        if moment == self.fault and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if f"{moment}:stop" == self.fault and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        if f"{moment}:no" == self.fault and not mark.exists():
            mark.touch()
            raise RuntimeError(f"rank {self.rank} says no at {moment}")

    def enter(self, order: Order) -> None:
        self.order = order

    def has_tasks(self) -> bool:
        return True

    def slipped(self) -> str:
        return ""

    def look(self) -> None:
        self.at("look:begin")
        os.kill(self.pid, 0)
        self.at("look:end")

    def lock_cuda(self) -> None:
        self.at("lock-cuda:begin")
        os.kill(self.pid, signal.SIGSTOP)
        self.at("lock-cuda:end")

    def lock_network(self) -> None:
        self.at("lock-network:begin")
        self.at("lock-network:end")

    def dump(self, number: int) -> str:
        self.at("dump:begin")
        count = (self.directory / f"task-{self.rank}").read_bytes()[:8]
        path = self.directory / f"epoch-{number}-{self.rank}"
        with path.open("wb") as file:
            file.write(count)
            file.flush()
            os.fsync(file.fileno())
        time.sleep(0.05)
        self.at("dump:end")
        return json.dumps({"path": str(path), "count": int.from_bytes(count, "little")})

    def release(self) -> None:
        self.at("release:begin")
        os.kill(self.pid, signal.SIGCONT)
        self.at("release:end")

    def finish(self, *, leave_running: bool) -> None:
        self.at("finish:begin")
        os.kill(self.pid, signal.SIGCONT if leave_running else signal.SIGKILL)
        self.at("finish:end")

    def stop(self) -> None:
        self.stopped = True


def main() -> None:
    directory, place, rank, world = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    store: Store
    if place.startswith("http"):
        store = Etcd(Access(endpoints=(place,), timeout_s=2))
    else:
        store = Local(Path(place), timeout_s=2)
    task = Task(directory, rank, sys.argv[5] if len(sys.argv) > 5 else "")
    keeper = Keeper(store, Keys("job"), rank, int(world), task, SETTINGS)
    print("ready", flush=True)
    while True:
        outcome = keeper.take_part(lambda: False)
        assert outcome is not None
        print(json.dumps(asdict(outcome)), flush=True)
        if (directory / "once").exists():
            return


if __name__ == "__main__":
    main()
