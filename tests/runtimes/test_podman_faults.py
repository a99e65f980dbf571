# SPDX-License-Identifier: Apache-2.0
"""What goes wrong around a checkpoint of Podman's: nothing is lost, and the error says what it
was."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from support.archives import flip_a_byte_of_gpu_memory
from support.engine_gpu import Steady, SteadyContainer, start_podman, write_config
from support.engine_root import EngineRoot

TIMEOUT_S = 60.0
POLL_S = 0.02
RUNTIMES = ["runc", "crun"]


@contextmanager
def slow_copies(root: EngineRoot, ms_per_gib: int) -> Iterator[None]:
    """Let the emulator take its time when it stages GPU memory, so that there is a middle."""
    root.run("gpustasis", "emulator", "set", "d2h_ms_per_gib", str(ms_per_gib))
    try:
        yield
    finally:
        root.run("gpustasis", "emulator", "set", "d2h_ms_per_gib", "0")


def start_dump(container: SteadyContainer, *words: str) -> subprocess.Popen[str]:
    """Start one, and wait until CRIU's log says that the plugin is at work."""
    path = container.root.path(container.images()).parent / "dump.log"
    path.unlink(missing_ok=True)  # of a dump whose podman was killed
    child = container.root.start("podman", "container", "checkpoint", *words, container.name)
    deadline = time.monotonic() + TIMEOUT_S
    while "cuda_plugin: locked" not in read(path):
        assert child.poll() is None and time.monotonic() < deadline, read(path)
        time.sleep(POLL_S)
    return child


def read(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:  # not yet, or, when the dump is done, no more
        return ""


def in_root(root: EngineRoot, name: str) -> list[int]:
    """The pids, as of here, of the programs of that name in the root."""
    namespace = os.readlink(f"/proc/{root.init}/ns/mnt")
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            same = os.readlink(process / "ns/mnt") == namespace
            if same and (process / "comm").read_text().strip() == name:
                found.append(int(process.name))
        except OSError:
            continue  # it has ended meanwhile
    return found


def is_of(session: int, pid: int) -> bool:
    """Podman's service has another session."""
    try:
        return os.getsid(pid) == session
    except ProcessLookupError:
        return False


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_podman_killed_in_the_middle(steady: Steady, runtime: str) -> None:
    """Podman alone, then with its runtime and criu: the job runs on, and the next one succeeds."""
    container = steady(f"killed-{runtime}", runtime, mib=16)
    root = container.root
    for victims in (["podman"], ["podman", runtime, "criu"]):
        with slow_copies(root, 500_000):
            child = start_dump(container, "--leave-running")
            for name in victims:
                pids = [pid for pid in in_root(root, name) if is_of(child.pid, pid)]
                assert pids, f"no {name} runs"
                for pid in pids:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            child.wait(TIMEOUT_S)
            deadline = time.monotonic() + TIMEOUT_S
            while in_root(root, "criu"):
                assert time.monotonic() < deadline
                time.sleep(POLL_S)
        container.run_on()
    root.run("podman", "container", "checkpoint", container.name)
    root.run("podman", "container", "restore", container.name)
    container.run_on()


def test_two_checkpoints_of_one_container(steady: Steady) -> None:
    """Podman lets one go first; the other finds the container ended, or makes its own."""
    container = steady("twice", "runc", mib=8)
    root = container.root
    words = ("podman", "container", "checkpoint", "--leave-running", container.name)
    children = [root.start(*words) for _ in range(2)]
    assert [child.wait(TIMEOUT_S) for child in children] == [0, 0]
    container.run_on()
    words = ("podman", "container", "checkpoint", container.name)
    children = [root.start(*words, stderr=subprocess.DEVNULL) for _ in range(2)]
    assert sorted(child.wait(TIMEOUT_S) == 0 for child in children) == [False, True]
    root.run("podman", "container", "restore", container.name)
    container.run_on()


def test_restored_twice(steady: Steady) -> None:
    container = steady("again", "runc", mib=4)
    root = container.root
    root.run("podman", "container", "checkpoint", container.name)
    words = ("podman", "container", "restore", "--keep", container.name)
    root.run(*words)
    again = root.run(*words, check=False)
    assert again.returncode != 0 and "running or paused" in again.stderr
    container.run_on()


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_storage_full(steady: Steady, runtime: str) -> None:
    """Podman's own storage: the dump fails, says so, and the job runs on."""
    container = steady(f"full-{runtime}", runtime, mib=32)
    root = container.root
    place = container.images()
    root.path(place).mkdir(mode=0o700)
    root.run("mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", place)
    try:
        url = start_podman(root, runtime)
        words = ("gpustasis", "podman", "--url", url, "checkpoint", container.name)
        done = root.run(*words, check=False)
        assert done.returncode == 16 and "No space left on device" in done.stderr
        container.run_on()
    finally:
        root.run("umount", place)
    root.run("podman", "container", "checkpoint", container.name)
    root.run("podman", "container", "restore", container.name)
    container.run_on()


def test_no_room_for_the_archive(steady: Steady) -> None:
    """The dump is done, the archive cannot be written: the container is restored in place."""
    container = steady("no-room", "runc", mib=16)
    root = container.root
    root.run("mkdir", "/mnt/small")
    root.run("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/mnt/small")
    try:
        url = start_podman(root, "runc")
        archive = "/mnt/small/archive.tar"
        words = ("gpustasis", "podman", "--url", url, "checkpoint", container.name, "-e", archive)
        done = root.run(*words, check=False)
        assert done.returncode == 3 and "No space left on device" in done.stderr
        assert f"`podman container restore {container.name}` restores it" in done.stderr
        assert list(root.path("/mnt/small").iterdir()) == []
        root.run("podman", "container", "restore", container.name)
        container.run_on()
    finally:
        root.run("umount", "/mnt/small")


def test_removed_in_the_middle(steady: Steady) -> None:
    """Podman holds the container until its dump is done; then it is removed, and nothing of it
    stays."""
    container = steady("removed", "runc", mib=16)
    root = container.root
    with slow_copies(root, 100_000):
        child = start_dump(container)
        root.run("podman", "rm", "--force", "--time", "0", container.name)
        child.wait(TIMEOUT_S)
    assert in_root(root, "criu") == [] and in_root(root, "steady_job") == []


@pytest.mark.parametrize("wrong", ["config", "libdir"])
def test_a_host_set_up_wrongly_costs_the_job_nothing(steady: Steady, wrong: str) -> None:
    container = steady(f"wrong-{wrong}", "runc", mib=4)
    root = container.root
    url = start_podman(root, "runc")
    before = root.path("/etc/criu/runc.conf").read_text()
    try:
        if wrong == "config":
            write_config(root, "colour = 7")
        else:
            root.write("/etc/criu/runc.conf", "libdir /nowhere\n")
        words = ("gpustasis", "podman", "--url", url, "checkpoint", container.name)
        done = root.run(*words, check=False)
        assert done.returncode == 16
        assert ("colour" if wrong == "config" else "/nowhere") in done.stderr
        container.run_on()
    finally:
        write_config(root)
        root.write("/etc/criu/runc.conf", before)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_podman_alone_says_what_the_plugin_says(steady: Steady, runtime: str) -> None:
    """The runtimes quote lines of criu's log, each those that it takes for errors."""
    container = steady(f"quoted-{runtime}", runtime, mib=4)
    root = container.root
    try:
        write_config(root, "colour = 7")
        done = root.run("podman", "container", "checkpoint", container.name, check=False)
    finally:
        write_config(root)
    assert done.returncode != 0
    assert "cuda_plugin: " in done.stderr and "colour" in done.stderr, done.stderr
    container.run_on()


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_damaged_checkpoint_ends_at_once(
    engines: EngineRoot, steady: Steady, shared: Path, runtime: str
) -> None:
    """criu waits for the first process of a pid namespace without limit: it has to be able to
    end, with all its threads and children, although criu traces them."""
    container = steady("damaged", runtime, mib=8, children=1)
    words = ("--compress", "none", "--export", "/mnt/shared/damaged.tar")
    engines.run("podman", "container", "checkpoint", *words, container.name)
    container.remove()
    flip_a_byte_of_gpu_memory(shared / "damaged.tar")
    done = engines.run(
        *("podman", "--runtime", runtime, "container", "restore"),
        *("--import", "/mnt/shared/damaged.tar"),
        check=False,
        timeout_s=90,
    )
    (shared / "damaged.tar").unlink()
    assert done.returncode > 0, "the restore hangs"
    assert not in_root(engines, "steady_job")
