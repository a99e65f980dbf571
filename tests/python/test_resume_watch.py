# SPDX-License-Identifier: Apache-2.0
"""`gpustasis crio resume --watch` beside a runtime that comes, goes and hangs. What it resumes and
what it leaves is shown in tests/kubernetes, and by test_pauses."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpustasis.cli import cli
from support.json_output import check_document

TESTS = Path(__file__).resolve().parent.parent
TIMEOUT_S = 60.0
END_S = 15.0  # after a signal; a call that the runtime does not answer takes 30
ID = "0123456789abcdef" * 4
RUNTIME = """
import sys, time
from pathlib import Path
from support.cri_server import CriServer, inventory
with CriServer(Path(sys.argv[1]), inventory("cri-o", "1.36", {one: 1 for one in sys.argv[2:]})):
    print("serves", flush=True)
    time.sleep(1000)
"""


@pytest.fixture
def path() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="cri-") as name:
        yield f"{name}/socket"


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def runtime(path: str) -> Iterator[Start]:
    """Starts one that has these containers."""
    started = []

    def start(*containers: str) -> subprocess.Popen[str]:
        Path(path).unlink(missing_ok=True)
        words = [sys.executable, "-c", RUNTIME, path, *containers]
        made = subprocess.Popen(
            words, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(TESTS)}
        )
        started.append(made)
        assert made.stdout is not None and made.stdout.readline() == "serves\n"
        return made

    yield start
    for made in started:
        with made:
            made.kill()


class Watch:
    def __init__(self, path: str) -> None:
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - close() closes it
        words = ("-m", "gpustasis", "crio", "--address", path, "resume", "--watch", "--json")
        self.process = subprocess.Popen(
            [sys.executable, *words], stdout=self._said, stderr=subprocess.PIPE, text=True
        )

    def events(self) -> list[str]:
        text = os.pread(self._said.fileno(), 1 << 20, 0).decode()
        lines = text.split("\n")[:-1]  # the last one may be there in part
        return [check_document(line, "crio resume")["event"]["what"] for line in lines]

    def wait_for(self, event: str, count: int = 1) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while self.events().count(event) < count:
            assert time.monotonic() < deadline and self.process.poll() is None, self.events()
            time.sleep(0.05)

    def end(self, number: int = signal.SIGTERM) -> str:
        """What it has said on stderr. It ends at once, and has done its work."""
        begin = time.monotonic()
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=TIMEOUT_S)
        assert self.process.returncode == 0 and time.monotonic() - begin < END_S, errors
        return errors

    def descriptors(self) -> int:
        """But for those that a look opens for a moment."""
        return min(self._descriptors() for _ in range(20))

    def _descriptors(self) -> int:
        time.sleep(0.01)
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def memory(self) -> int:
        """KiB of its own, and not of files, which come and go as the kernel likes; the same."""
        return min(self._memory() for _ in range(20))

    def _memory(self) -> int:
        time.sleep(0.01)
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        (own,) = re.findall(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE)
        return int(own)

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


@pytest.fixture
def watch(path: str) -> Iterator[Watch]:
    made = Watch(path)
    yield made
    if made.process.poll() is None:
        made.process.kill()
        made.process.communicate()
    made._said.close()


def test_a_runtime_that_comes_and_goes(watch: Watch, runtime: Start) -> None:
    """It costs nothing to wait for, and nothing is left of those that have gone."""
    watch.wait_for("waiting")
    rounds, seen = 8, []
    for number in range(1, rounds + 1):
        server = runtime()
        watch.wait_for("watching", number)
        time.sleep(1.5)  # it has looked at least twice
        seen.append((watch.descriptors(), watch.memory()))
        server.kill()
        watch.wait_for("ended", number)
    assert seen[-1][0] <= seen[1][0], seen
    assert seen[-1][1] <= seen[3][1] + 1024, seen  # a thread of gRPC's more may have begun before
    time.sleep(3.5)  # it looks more often for as long as a late pause may come
    before = watch.cpu_s()
    time.sleep(3)
    assert watch.cpu_s() - before < 0.2
    assert watch.end() == ""
    assert set(watch.events()) == {"waiting", "watching", "ended"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_at_once(watch: Watch, runtime: Start, number: int) -> None:
    """While a runtime hangs, too."""
    server = runtime()
    watch.wait_for("watching")
    server.send_signal(signal.SIGSTOP)
    time.sleep(1.5)
    assert watch.end(number) == ""


def test_a_signal_ends_it_while_nobody_is_there(watch: Watch) -> None:
    watch.wait_for("waiting")
    time.sleep(2.5)
    assert watch.end() == ""
    assert watch.events() == ["waiting"]


def test_it_says_that_it_sees_no_control_groups(watch: Watch, runtime: Start) -> None:
    runtime(ID)
    watch.wait_for("failed")
    time.sleep(2.5)
    said = watch.end()
    assert said.count("no control group of any container is seen from here") == 1, said
    assert watch.events() == ["watching", "failed"] or watch.events()[0] == "waiting"


@pytest.mark.parametrize("words", [("--watch", "a/b/c"), ()])
@pytest.mark.parametrize("command", ["containerd", "crio"])
def test_one_container_or_a_watch(command: str, words: tuple[str, ...]) -> None:
    done = CliRunner().invoke(cli, [command, "resume", *words])
    assert done.exit_code == 2
    assert "name one CONTAINER, or give --watch" in done.output
