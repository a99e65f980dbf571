# SPDX-License-Identifier: Apache-2.0
"""An agent, as a process of its own, and what a client that is not ours sends it."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpustasis.agent.client import Client
from gpustasis.criu.find import Criu

POLL_S = 0.02
TIMEOUT_S = 60.0


class Agent:
    """In `place`: its configuration, log and store. Extra lines of the configuration: `lines`."""

    def __init__(
        self, place: Path, environ: Mapping[str, str], criu: Criu, lines: str = ""
    ) -> None:
        self.place = place
        self.socket, self.http = place / "agent.sock", place / "http.sock"
        self.store = place / "store"
        self.log = place / "agent.log"
        self._environ = environ
        self.process: subprocess.Popen[bytes] | None = None
        settings = {
            "store": str(self.store),
            "socket": str(self.socket),
            "http_socket": str(self.http),
            "jobs_socket": str(place / "jobs.sock"),
            "ranks_socket": str(place / "ranks.sock"),
            "criu": str(criu.root or criu.program),
        }
        defaults = {"memory_reserve": '"0"', "disk_reserve": '"0"'}
        text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
        text += "".join(f"{key} = {one}\n" for key, one in defaults.items() if key not in lines)
        self.config = place / "agent.toml"
        self.config.write_text(text + lines)
        self.config.chmod(0o600)

    def _times_ready(self) -> int:
        return sum(one["message"].startswith("ready") for one in self.lines())

    def start(self, ready: bool = True) -> Agent:
        before = self._times_ready() if self.log.exists() else 0
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gpustasis", "agent", "run", "--config", str(self.config)],
                env=dict(self._environ),
                stdin=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )
        if ready:
            self.wait_for(lambda: self._times_ready() > before)
        return self

    def lines(self) -> list[dict[str, Any]]:
        """What it has logged."""
        text = self.log.read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def wait_for(self, what: Callable[[], object], timeout_s: float = TIMEOUT_S) -> None:
        assert self.process is not None
        deadline = time.monotonic() + timeout_s
        while not what():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(POLL_S)

    def client(self) -> Client:
        return Client(self.socket)

    def operation(self, id: str) -> dict[str, Any]:
        with self.client() as client:
            return client.show(id)

    def wait_for_state(self, id: str, *states: str) -> dict[str, Any]:
        self.wait_for(lambda: self.operation(id)["state"] in states)
        return self.operation(id)

    def get(self, path: str) -> tuple[int, str]:
        """Status and body of an HTTP request."""
        head, _, body = say(
            self.http, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
        ).partition(b"\r\n\r\n")
        return int(head.split()[1]), body.decode()

    def metric(self, name: str) -> float:
        """With its labels, as the exposition has them."""
        for line in self.get("/metrics")[1].splitlines():
            if line.startswith(f"{name} "):
                return float(line.split()[-1])
        raise AssertionError(f"no {name} in {self.get('/metrics')[1]}")

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End it; its exit status."""
        assert self.process is not None
        self.process.send_signal(number)
        status = self.process.wait(TIMEOUT_S)
        self.process = None
        return status

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def say(place: Path, data: bytes, timeout_s: float = 30.0) -> bytes:
    """Send this, and nothing more; all that is answered until the other end hangs up."""
    found = b""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(place))  # without a time limit, which a full backlog would not wait for
        sock.settimeout(timeout_s)
        with suppress(BrokenPipeError):  # it has hung up, perhaps with an answer
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
        with suppress(ConnectionResetError):
            while piece := sock.recv(1 << 16):
                found += piece
    return found


def ask(place: Path, *requests: dict[str, Any] | bytes) -> list[dict[str, Any]]:
    """The answers to these lines."""
    lines = [
        one if isinstance(one, bytes) else json.dumps({"version": 1, **one}).encode()
        for one in requests
    ]
    return [
        json.loads(line)
        for line in say(place, b"".join(b"%s\n" % one for one in lines)).splitlines()
    ]


def as_user(uid: int, *words: str, groups: Sequence[int] = ()) -> list[str]:
    """The words that run a program as that user."""
    group = f"--groups={','.join(map(str, groups))}" if groups else "--clear-groups"
    return ["setpriv", f"--reuid={uid}", f"--regid={uid}", group, *words]
