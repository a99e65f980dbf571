# SPDX-License-Identifier: Apache-2.0
"""Who holds what open, of processes that go on opening and closing files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpustasis.task import find_users, open_files
from support.job import ended
from support.openers import find_openers

LOOKS = 200
# Holds a directory as its last descriptor, and opens and closes what comes before it.
BUSY = """
import os, sys
low = [os.open("/dev/null", os.O_RDONLY) for _ in range(40)]
os.open(sys.argv[1], os.O_RDONLY)
print("ready", flush=True)
while True:
    for fd in low:
        os.close(fd)
    low = [os.open("/dev/null", os.O_RDONLY) for _ in range(40)]
"""


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", BUSY, tmp_path], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process.pid
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def test_a_user_that_closes_other_files_is_seen(busy: int, tmp_path: Path) -> None:
    comm = Path(f"/proc/{busy}/comm").read_text().rstrip("\n")
    for _ in range(LOOKS):
        assert find_users(tmp_path, comm) == [busy]
        assert find_openers(str(tmp_path), comm) == [busy]
    os.kill(busy, 9)
    os.waitid(os.P_PID, busy, os.WEXITED | os.WNOWAIT)
    assert find_users(tmp_path, comm) == []


@pytest.mark.parametrize("container", [False, True])
def test_only_a_criu_of_this_pid_namespace_is_believed(tmp_path: Path, container: bool) -> None:
    """Root of a container can name its processes as it likes, and open what it likes."""
    marked = tmp_path / "0123456789abcdef"
    marked.touch()
    words = ["unshare", "--pid", "--fork"] if container else []
    script = f"exec 3<{marked}; printf criu >/proc/self/comm; echo; read line"
    with subprocess.Popen(
        [*words, "bash", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        opened = [name for names in open_files("criu")["criu"].values() for name in names]
        assert (str(marked) in opened) == (not container)
        assert bool(find_openers(marked.name, "criu")) == (not container)
        process.communicate(b"\n")


def test_a_setuid_program_that_is_called_criu_is_not_believed(tmp_path: Path) -> None:
    """It is root's by then, and whoever started it has named it and opened its files."""
    marked = tmp_path / "0123456789abcdef"
    marked.touch()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name, marked.open("rb") as file:
        Path(name).chmod(0o755)
        program = Path(name) / "criu"
        shutil.copy("/bin/sleep", program)
        program.chmod(0o4755)
        for user, believed in ((65534, False), (0, True)):
            with ended(
                subprocess.Popen([program, "1000"], user=user, pass_fds=[file.fileno()])
            ) as process:
                assert os.stat(f"/proc/{process.pid}").st_uid == 0, "the file system is nosuid"
                assert bool(find_openers(marked.name, "criu")) == believed
