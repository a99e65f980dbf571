# SPDX-License-Identifier: Apache-2.0
"""The commands in README.md and docs/operating.md work as they stand there."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpustasis.criu.find import Criu

_BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_TIMEOUT_S = 120
_POLL_S = 0.02
_LIBRARY_PATH = "LIBRARY_PATH_OF_THE_CALLER"


def shell_blocks(document: Path) -> list[str]:
    return _BLOCK.findall(document.read_text())


@pytest.fixture
def newcomer(
    criu: Criu, cuda_include: Path, repository: Path, tmp_path: Path
) -> tuple[Path, dict[str, str]]:
    """A folder with the tree's files in it, and an environment with gpustasis and criu in PATH."""
    programs = tmp_path / "bin"
    programs.mkdir()
    # A criu of a test root is started by that root's loader, which takes the place of the
    # system's: it is told the library path of the shell that calls it.
    words = " ".join(map(shlex.quote, criu.command({"LD_LIBRARY_PATH": _LIBRARY_PATH})))
    start = words.replace(_LIBRARY_PATH, "$LD_LIBRARY_PATH")
    (programs / "criu").write_text(f'#!/bin/sh\nexec {start} "$@"\n')
    (programs / "criu").chmod(0o755)
    home = tmp_path / "home"
    home.mkdir()
    (home / "tests").symlink_to(repository / "tests")
    environ = dict(os.environ)
    environ["PATH"] = f"{programs}:{Path(sys.executable).parent}:{environ['PATH']}"
    environ["CUDA_INCLUDE"] = str(cuda_include)
    environ["GPUSTASIS_EMULATOR"] = str(tmp_path / "socket")  # not somebody else's
    return home, environ


def end_programs_in(directory: Path) -> None:
    """Kill what runs there: what a block left behind when a later one failed."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").readlink() == directory:
                os.kill(int(process.name), signal.SIGKILL)
        except OSError:
            continue  # it has ended meanwhile


def run_shell(script: str, home: Path, environ: dict[str, str]) -> tuple[int, str]:
    """Exit status and output of a script whose orphans are collected as init would do it.

    The test process is a subreaper (tests/conftest.py): a restored job becomes its child, and would
    stay a zombie, and its pid taken, for as long as the script runs.
    """
    log = home / "shell.log"
    with log.open("wb") as output:
        shell = subprocess.Popen(
            ["bash", "-c", script],
            cwd=home,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    deadline = time.monotonic() + _TIMEOUT_S
    while shell.poll() is None:
        if time.monotonic() > deadline:
            shell.kill()
            shell.wait()
            raise AssertionError(f"not done in {_TIMEOUT_S} s:\n{log.read_text()}")
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None and ended.si_pid != shell.pid:
            os.waitpid(ended.si_pid, 0)
        else:
            time.sleep(_POLL_S)
    return shell.returncode, log.read_text(errors="replace")


def test_readme(newcomer: tuple[Path, dict[str, str]], repository: Path) -> None:
    home, environ = newcomer
    blocks = shell_blocks(repository / "README.md")
    assert len(blocks) >= 4
    script = "set -eu\n" + "\n".join(blocks)
    try:
        status, output = run_shell(script, home, environ)
        assert status == 0, output
        assert "emulator" in output
        lines = (home / "vectors.log").read_text().splitlines()
        assert lines[-1].startswith("round ")
    finally:
        clean_up(home, environ)


@pytest.mark.parametrize("shell", ["a script", "a shell with job control"])
def test_the_pid_in_the_readme_is_its_own_programs(
    newcomer: tuple[Path, dict[str, str]], repository: Path, tmp_path: Path, shell: str
) -> None:
    """Not a stranger's of the same name, started a moment later; not that of setsid, which starts
    a second process where the shell has made it the leader of a group."""
    home, environ = newcomer
    (tmp_path / "bin" / "vectors").symlink_to("/bin/sleep")
    script = "set -eu\n" + ("set -m\n" if shell != "a script" else "")
    script += "(sleep 1; vectors 60; :) &\n"
    script += "\n".join(shell_blocks(repository / "README.md")[:2])
    script += '\necho "program $(readlink "/proc/$pid/exe")"\n'
    try:
        status, output = run_shell(script, home, environ)
        assert status == 0, output
        assert f"program {home}/vectors" in output.splitlines()
    finally:
        clean_up(home, environ)


def clean_up(home: Path, environ: dict[str, str]) -> None:
    end_programs_in(home)
    subprocess.run(
        [sys.executable, "-m", "gpustasis", "emulator", "stop"],
        env=environ,
        capture_output=True,
        check=False,
    )


def test_operating(newcomer: tuple[Path, dict[str, str]], repository: Path) -> None:
    """Of a job that runs, with its pid in $pid: README.md's."""
    home, environ = newcomer
    start = shell_blocks(repository / "README.md")[:2]
    blocks = shell_blocks(repository / "docs" / "operating.md")
    assert len(blocks) >= 5
    script = "set -eu\n" + "\n".join([*start, *blocks])
    try:
        status, output = run_shell(script, home, environ)
        assert status == 0, output
        assert "in earlier checkpoints already" in output
        assert "of it in 1 earlier checkpoint\n" in output
        assert "alone: manifest and 1 image whole" in output
        assert "s between the two" in output
        assert "two.tar.gz: manifest and 1 image whole" in output
        assert "not in the archive but in checkpoint" in output
        assert (home / "moved" / "inventory.img").exists()
        assert len(list((home / "jobs").iterdir())) == 2 + 1  # the last two, and their first
        assert (home / "vectors.log").read_text().splitlines()[-1].startswith("round ")
    finally:
        clean_up(home, environ)
