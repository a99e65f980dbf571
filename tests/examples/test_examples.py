# SPDX-License-Identifier: Apache-2.0
"""The commands in the READMEs of examples/, in a Debian root with its PyTorch: SIGTERM in the
middle of a step, the same command again, and every loss is as without it, to the bit."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from gpustasis.preemption.start import FIRST_PID
from gpustasis_bench.roots import roots_directory
from support.engine_root import EngineRoot

CHECKPOINTED = 75
TIMEOUT_S = 240.0
POLL_S = 0.01
EQUAL_LOOKS = 5
PLACES = "/mnt/examples"
pytestmark = pytest.mark.timeout(600)  # PyTorch's start takes minutes where much else runs


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Iterator[EngineRoot]:
    place = tmp_path_factory.mktemp("torch") / "root"
    place.mkdir()
    with EngineRoot(place, binds={PLACES: repository / "examples"}, suite="torch") as system:
        # Its python3 has become that of the environment that runs the tests: PyTorch is Debian's.
        (debians,) = (roots_directory() / "torch/usr/bin").glob("python3.*[0-9]")
        system.path("/usr/local/bin/python3").symlink_to(f"/usr/bin/{debians.name}")
        yield system


class Example:
    """One of them, in a folder of its own in the root."""

    def __init__(self, root: EngineRoot, repository: Path, name: str) -> None:
        self._root = root
        self._readme = (repository / "examples" / name / "README.md").read_text()
        self.folder = f"/tmp/{name}"
        root.run("mkdir", self.folder)
        root.run("cp", f"{PLACES}/{name}/train.py", self.folder)
        # What people have: their `python3`, which has PyTorch, before the environment of gpustasis.
        self._environ = {
            "PATH": f"/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:{Path(sys.executable).parent}",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }

    def block(self, kind: str) -> str:
        (found,) = re.findall(rf"^```sh {kind}\n(.*?)^```$", self._readme, re.MULTILINE | re.DOTALL)
        return str(found)

    def command(self, *kinds: str) -> list[str]:
        return ["sh", "-ec", f"cd {self.folder}\n" + "".join(map(self.block, kinds))]

    def run(self, *kinds: str) -> list[str]:
        done = self._root.run(*self.command(*kinds), environ=self._environ, timeout_s=TIMEOUT_S)
        return done.stdout.splitlines()

    def interrupt(self, kinds: tuple[str, ...], wait: Callable[[Path], None]) -> list[str]:
        """Start it, end it once `wait` returns; what it wrote until then."""
        log = self._root.path(f"{self.folder}/first.log")
        with log.open("w") as out, log.with_name("first.err").open("w") as err:
            shell = self._root.start(
                *self.command(*kinds), environ=self._environ, stdout=out, stderr=err
            )
        wait(log)
        self.run("end")
        status = shell.wait(TIMEOUT_S)
        said = log.with_name("first.err").read_text()
        assert status == CHECKPOINTED, said
        # In a new pid namespace it leaves the low pids to the next supervisor and its criu.
        (pid,) = re.findall(r"process (\d+) starts afresh", said)
        assert int(pid) > FIRST_PID
        return log.read_text().splitlines()

    def go_on(self, kinds: tuple[str, ...], *variables: str) -> list[str]:
        """Start it again, and let what was stopped, of processes(*variables), run on once it is
        restored. What it wrote since."""
        log = self._root.path(f"{self.folder}/second.log")
        with log.open("w") as out, log.with_name("second.err").open("w") as err:
            shell = self._root.start(
                *self.command(*kinds), environ=self._environ, stdout=out, stderr=err
            )
        deadline = time.monotonic() + TIMEOUT_S
        while "goes on, restored from" not in log.with_name("second.err").read_text():
            assert time.monotonic() < deadline and shell.poll() is None
            time.sleep(POLL_S)
        (stopped,) = self.processes(*variables)
        assert log.read_text() == ""  # the step that was cut in two is not done yet
        os.kill(stopped, signal.SIGCONT)  # it is stopped, as it was
        assert shell.wait(TIMEOUT_S) == 0, log.with_name("second.err").read_text()
        return log.read_text().splitlines()

    def processes(self, *variables: str) -> list[int]:
        """Of this root, those that are train.py, with these in their environment."""
        inside = os.stat(f"/proc/{self._root.init}/ns/pid")
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                environ = (entry / "environ").read_bytes().split(b"\0")
                if (
                    b"train.py" in words[1:3]  # its supervisor's come after its own options
                    and all(word.encode() in environ for word in variables)
                    and os.path.samestat(os.stat(entry / "ns/pid"), inside)
                ):
                    found.append(int(entry.name))
            except OSError:
                continue  # it has ended
        return found


def await_line(log: Path, text: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while text not in log.read_text():
        assert time.monotonic() < deadline, log.with_name("first.err").read_text()
        time.sleep(POLL_S)


def test_ddp(root: EngineRoot, repository: Path) -> None:
    example = Example(root, repository, "ddp")
    whole = example.run("debian", "whole")
    steps = [line.split(" loss ")[0] for line in whole[:-1]]
    assert steps == [f"step {n}" for n in range(1, 401)]

    def stop_rank_1(log: Path) -> None:
        """Rank 0 is then in a step that it cannot finish: it waits for the other's gradients."""
        await_line(log, "step 1 ")
        (rank_1,) = example.processes("RANK=1")
        (rank_0,) = example.processes("RANK=0")
        await_line(log, "step 5 ")
        os.kill(rank_1, signal.SIGSTOP)
        used, equal = -1, 0
        deadline = time.monotonic() + TIMEOUT_S
        while equal < EQUAL_LOOKS:  # one alone may be of a process that has got no turn
            assert time.monotonic() < deadline
            now = processor_time(rank_0)
            equal = equal + 1 if now == used and not wants_to_run(rank_0) else 0
            used = now
            time.sleep(0.3)

    first = example.interrupt(("debian", "start"), stop_rank_1)
    assert 5 <= len(first) < 400 and first == whole[: len(first)]

    assert first + example.go_on(("debian", "start"), "RANK=1") == whole


def processor_time(pid: int) -> int:
    """Of all its threads, in ticks."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    return sum(map(int, stat[stat.rindex(")") + 2 :].split()[11:13]))


def wants_to_run(pid: int) -> bool:
    """Whether any of its threads does, or runs."""
    states = []
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            states.append(stat.read_text().rpartition(")")[2].split()[0])
    return "R" in states


def test_trainer(root: EngineRoot, repository: Path) -> None:
    example = Example(root, repository, "trainer")
    whole = told(example.run("whole"))
    assert len(whole) == 200 + 200 + 1

    def half_a_step(log: Path) -> None:
        await_line(log, "'loss'")
        (trainer,) = example.processes()
        begin = time.monotonic()
        while log.read_text().count("'loss'") < 6:
            time.sleep(POLL_S / 10)
        time.sleep((time.monotonic() - begin) / 10)
        os.kill(trainer, signal.SIGSTOP)  # it may be through before it is asked to end

    first = told(example.interrupt(("start",), half_a_step))
    assert 6 <= len(first) < 200 and first == whole[: len(first)]
    assert first + told(example.go_on(("start",))) == whole


def told(lines: list[str]) -> list[str]:
    """What depends on the training, and not on the clock."""
    return [line for line in lines if line.startswith(("{'loss'", "step ", "weights "))]
