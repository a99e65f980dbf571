# SPDX-License-Identifier: Apache-2.0
"""A job may name a thread as the driver names its own, and so say which of the job's descriptors
are opened anew, as root. What `recover` and `doctor --container` do then."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from gpustasis import task
from gpustasis.diagnosis import Status, container_checks
from gpustasis.diagnosis.container import Container
from gpustasis.emulator import find_directory

JOB = """
import ctypes, os, sys, threading
libc = ctypes.CDLL(None)
write, read = os.open(sys.argv[1], os.O_RDONLY), os.open("/dev/zero", os.O_RDONLY)
if sys.argv[2] == "pipes":
    read, write = os.pipe()
    os.write(write, bytes(4096))

def wait():
    libc.prctl(15, b"cuda%011x" % (write << 22 | read), 0, 0, 0)
    print("named", flush=True)
    sys.stdin.read()

threading.Thread(target=wait).start()
"""


@contextmanager
def job(victim: Path, kind: str) -> Iterator[int]:
    with subprocess.Popen(
        [sys.executable, "-c", JOB, victim, kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "named\n"
        yield process.pid
        process.kill()


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file of root's that the job may read."""
    path = tmp_path / "victim"
    path.write_text("root's own\n" * 400)
    path.chmod(0o644)
    return path


def test_recover_has_nothing_written_to_it(
    gpustasis: Callable[..., CompletedProcess[str]], victim: Path, images: Path
) -> None:
    before = victim.read_bytes()
    with job(victim, "files") as pid:
        ended = gpustasis("recover", str(pid), "-D", images)
    assert victim.read_bytes() == before
    assert ended.returncode == 3, ended.stderr
    assert f"of process {pid} is named cuda" in ended.stderr
    assert f"leads it to {victim} (descriptor" in ended.stderr


def test_doctor_names_it_and_has_nothing_written_to_it(
    victim: Path, emulator_environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUSTASIS_EMULATOR", emulator_environ["GPUSTASIS_EMULATOR"])
    before = victim.read_bytes()
    with job(victim, "files") as pid:
        container = Container(name="x", init=pid, tasks=(pid,), group="/", config=None)
        library = str(find_directory() / "libcuda.so.1")
        found = container_checks.check(container, library, "libno-such.so.1")
    assert victim.read_bytes() == before
    (threads,) = [finding for finding in found if finding.name == "threads"]
    assert threads.status is Status.PROBLEM
    assert str(victim) in threads.text
    assert "driver state" not in [finding.name for finding in found]


def test_pipes_are_as_the_driver_has_them(victim: Path) -> None:
    with job(victim, "pipes") as pid:
        assert task.misleading_thread(pid) is None
    assert task.misleading_thread(pid) is None  # it has ended


def test_threads_that_have_ended_hide_none(
    victim: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel lists them, and has nothing to say of them a moment later."""
    threads = tmp_path / "7" / "task"
    for tid in range(7, 57):
        (threads / str(tid)).mkdir(parents=True)
    (tmp_path / "7" / "fd").mkdir()
    (tmp_path / "7" / "fd" / "3").symlink_to(victim)
    last = list(threads.iterdir())[-1]
    (last / "comm").write_text(f"cuda{3 << 22 | 3:011x}\n")
    monkeypatch.setattr(task, "PROC", tmp_path)
    assert f"leads it to {victim} (descriptor 3)" in (task.misleading_thread(7) or "")


def test_a_worker_is_believed_only_if_it_is_of_this_user(images: Path) -> None:
    """Any user may name a process like the plugin's worker, and recover waits for those."""
    code = (
        "import ctypes, os, sys\n"
        "os.setgid(65534) or os.setuid(65534) if sys.argv[2] == 'nobody' else None\n"
        "ctypes.CDLL(None).prctl(15, b'gpustasis-work', 0, 0, 0)\n"
        "print('named', flush=True)\nsys.stdin.read()\n"
    )
    for user, expected in (("nobody", False), ("root", True)):
        fd = images.stat()
        with (
            open(images / "file", "w"),
            subprocess.Popen(
                [
                    *("/bin/sh", "-c", 'exec 3<"$1"; exec "$2" -c "$3" x "$4"', "sh"),
                    *(str(images), sys.executable, code, user),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            ) as process,
        ):
            assert process.stdout is not None
            assert process.stdout.readline() == "named\n", fd
            assert (process.pid in task.find_users(images, "gpustasis-work")) is expected
            process.kill()
