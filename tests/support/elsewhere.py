# SPDX-License-Identifier: Apache-2.0
"""Another machine, as far as a stream can tell: pid, mount and network namespaces of their own on
this one, with a link to the network here."""

from __future__ import annotations

import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from campaigns.steady_job import is_alive

_NUMBERS = itertools.count()
_LIMIT_S = 60.0  # for whatever is waited for: it takes a moment
_POLL_S = 0.01
_NETWORKS = 256 * 64  # of four addresses each, in 10.213.0.0/16
# Waits for whatever is left to it, as init does; all is there when it says so.
_INIT = """
import os, time
os.write(1, b"ready")
os.close(1)
while True:
    try:
        os.wait()
    except ChildProcessError:
        time.sleep(0.01)
"""
# Becomes a program whose standard input is a connection to an address.
_CONNECT = """
import os, socket, sys
link = socket.create_connection((sys.argv[1], int(sys.argv[2])))
os.dup2(link.fileno(), 0)
os.execvp(sys.argv[3], sys.argv[3:])
"""


class Elsewhere:
    """`init` is its first process; all of it ends with the with statement."""

    def __init__(self) -> None:
        self._name = f"gps{os.getpid() % 100000}-{next(_NUMBERS)}"
        words = ["unshare", "--pid", "--mount", "--net", "--fork", "--kill-child", "--mount-proc"]
        self._unshare = subprocess.Popen(
            [*words, sys.executable, "-c", _INIT], stdout=subprocess.PIPE
        )
        assert self._unshare.stdout is not None
        with self._unshare.stdout as said:
            if not select.select([said], [], [], _LIMIT_S)[0]:
                self._end()
                raise TimeoutError("no process in the new namespaces")
            assert os.read(said.fileno(), 5) == b"ready", "no namespaces"
        children = Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children")
        (init,) = children.read_text().split()
        self.init = int(init)
        self._listening: socket.socket | None = None

    def __enter__(self) -> Self:
        try:
            self._connect()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _connect(self) -> None:
        peer = f"{self._name}p"
        _run("ip", "link", "add", self._name, "type", "veth", "peer", "name", peer)
        _run("ip", "link", "set", peer, "netns", str(self.init))
        self._here, there = self._take_addresses()
        _run("ip", "link", "set", self._name, "up")
        _run(*self.words(("ip", "addr", "add", f"{there}/30", "dev", peer)))
        _run(*self.words(("ip", "link", "set", peer, "up")))
        _run(*self.words(("ip", "link", "set", "lo", "up")))
        self._listening = socket.create_server((self._here, 0))
        self._listening.settimeout(_LIMIT_S)

    def _take_addresses(self) -> tuple[str, str]:
        """Of the two ends. An address is given to several devices without a word, and another
        process may take the same one at this moment: whoever sees that takes the next."""
        for number in range(_NETWORKS):
            part = (os.getpid() + number) % _NETWORKS
            network = f"10.213.{part // 64}"
            here, there = (f"{network}.{4 * (part % 64) + end}" for end in (1, 2))
            if here in _addresses():
                continue
            _run("ip", "addr", "add", f"{here}/30", "dev", self._name)
            if _addresses().count(here) == 1:
                return here, there
            _run("ip", "addr", "del", f"{here}/30", "dev", self._name)
        raise OSError("no network is free")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._listening is not None:
            self._listening.close()
        self._end()
        words = ("ip", "link", "del", self._name)
        subprocess.run(words, capture_output=True, check=False, timeout=_LIMIT_S)

    def _end(self) -> None:
        self._unshare.kill()
        self._unshare.wait(_LIMIT_S)

    def words(self, argv: Sequence[str]) -> list[str]:
        """That start a program there."""
        return ["nsenter", "-t", str(self.init), "-p", "-m", "-n", *argv]

    def connect(
        self, argv: Sequence[str], environ: Mapping[str, str], stderr: IO[bytes]
    ) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """Start a program there whose standard input is a connection; with its end here. Raises
        TimeoutError if it makes none."""
        assert self._listening is not None
        port = str(self._listening.getsockname()[1])
        start = [sys.executable, "-c", _CONNECT, self._here, port, *argv]
        child = subprocess.Popen(
            self.words(start), env=dict(environ), stdout=subprocess.DEVNULL, stderr=stderr
        )
        try:
            link, _ = self._listening.accept()
        except TimeoutError:
            child.kill()
            child.wait(_LIMIT_S)
            raise
        link.settimeout(None)  # a stream stands for longer, and has limits of its own
        return child, link

    def jobs(self, name: str) -> list[int]:
        """Live processes of that name there, by their pids here."""
        return jobs_in(self.init, name)

    def end_jobs(self, name: str) -> None:
        """Kill these. Raises TimeoutError if one of them stays."""
        for pid in self.jobs(name):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + _LIMIT_S
        while left := self.jobs(name):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name} does not end: {left}")
            time.sleep(_POLL_S)


def _run(*words: str) -> str:
    return subprocess.run(
        words, check=True, timeout=_LIMIT_S, stdout=subprocess.PIPE, text=True
    ).stdout


def _addresses() -> list[str]:
    """Of this machine."""
    found = json.loads(_run("ip", "-json", "-4", "addr"))
    return [one["local"] for link in found for one in link.get("addr_info", ())]


def jobs_in(pid: int, name: str) -> list[int]:
    """Live processes of that name in the pid namespace of `pid`."""
    namespace = os.readlink(f"/proc/{pid}/ns/pid")
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            same = os.readlink(entry / "ns/pid") == namespace
            if same and (entry / "comm").read_text().strip() == name and is_alive(int(entry.name)):
                found.append(int(entry.name))
        except OSError:
            continue
    return found
