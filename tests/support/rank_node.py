# SPDX-License-Identifier: Apache-2.0
"""The part of the agent that answers for ranks, in this process, with a store of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from gpustasis import policy
from gpustasis.agent.config import Config
from gpustasis.agent.ranks import Ranks
from gpustasis.errors import JobError
from gpustasis.jobs.local import Local
from gpustasis.jobs.place import Place, place_of
from gpustasis.jobs.records import Keys
from support.job_ranks import ANSWER_S

A, B = "a" * 64, "b" * 64
KEYS = Keys("job")
TIMEOUT_S = 60.0
POLL_S = 0.02
# Says its line, with its parent as criu, and what is answered.
SCRIPT = """
import os, socket, sys
place, line = sys.argv[1:]
with socket.socket(socket.AF_UNIX) as sock:
    sock.connect(place)
    sock.sendall(line.format(criu=os.getppid()).encode() + b"\\n")
    print(sock.makefile().read(), end="", flush=True)
"""


class Node:
    """running: containers that run. config: of the agent that start() starts."""

    def __init__(self, place: Path, held: ExitStack) -> None:
        self._place = place
        self._held = held
        self.running: set[str] = set()
        self.policies = place / "gpustasis/policy"
        self.policies.mkdir(mode=0o700, parents=True)
        self.store = Local(place / "jobs.sock", ANSWER_S)
        self.config = Config(
            store=place / "kept",
            jobs_socket=place / "jobs.sock",
            ranks_socket=place / "ranks.sock",
            jobs_look_limit=600.0,
        )

    def add(self, container: str, *, world: int = 1) -> None:
        """One that runs, rank 0."""
        words = {"job": "job", "rank": "0", "world": f"{world}"}
        found = policy.parse_annotations({policy.PREFIX + name: one for name, one in words.items()})
        assert found is not None
        self.running.add(container)
        file = self.policies / container
        file.write_text(policy.format_policy(found, container))
        file.chmod(0o600)
        file.rename(file.with_suffix(".toml"))

    def end(self, container: str) -> None:
        (self.policies / f"{container}.toml").unlink()
        self.running.remove(container)

    def start(self) -> Ranks:
        found = Ranks(self.config)
        self._held.callback(close, found)
        found.start()
        return found

    @property
    def rank(self) -> Place:
        return place_of("job", 0, self.config.store / "ranks/job", self._place / "run")

    def has_keeper(self) -> bool:
        self.rank.make()
        try:
            os.close(self.rank.only_keeper())
        except JobError:
            return True
        return False

    def script(self, action: str, container: str, criu: str = "{criu}") -> subprocess.Popen[str]:
        line = f"{action} {container} {os.getpid()} /proc/{criu}/fd/0"
        words = [sys.executable, "-c", SCRIPT, str(self.config.ranks_socket), line]
        process = subprocess.Popen(
            ["/bin/sh", "-c", '"$@"; exit $?', "sh", *words], stdout=subprocess.PIPE, text=True
        )
        self._held.callback(process.kill)
        return process

    def newest(self) -> str:
        return self.store.read(KEYS.newest).entries[KEYS.newest].value


def close(found: Ranks) -> None:
    """And let nothing of it run on: other tests say other things."""
    left = list(found._members.values())
    found.close()
    for one in left:
        one._thread.join(TIMEOUT_S)
    assert found._store is not None
    found._store.close()


def answer(script: subprocess.Popen[str]) -> str:
    return script.communicate(timeout=TIMEOUT_S)[0]


def wait_for(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(POLL_S)
