"""The commands in README.md work as they stand there."""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cudackpt.criu.find import Criu

_BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_TIMEOUT_S = 120
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_LIBRARY_PATH = "LIBRARY_PATH_OF_THE_CALLER"


def shell_blocks(document: Path) -> list[str]:
    return _BLOCK.findall(document.read_text())


@pytest.fixture
def newcomer(
    criu: Criu, cuda_include: Path, repository: Path, tmp_path: Path
) -> tuple[Path, dict[str, str]]:
    """A folder with the tree's files in it, and an environment with cudackpt and criu in PATH."""
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
    environ["CUDACKPT_EMULATOR"] = str(tmp_path / "socket")  # not somebody else's
    return home, environ


def end_programs_in(directory: Path) -> None:
    """Kill what runs there: what a block left behind when a later one failed."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").readlink() == directory:
                os.kill(int(process.name), signal.SIGKILL)
        except OSError:
            continue  # it has ended meanwhile


@pytest.fixture
def not_a_subreaper() -> Iterator[None]:
    """Restored jobs go to init, as a newcomer's do: here they would stay zombies, and their pids
    taken, for as long as the shell runs."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0) == 0
    yield
    assert prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


@pytest.mark.usefixtures("not_a_subreaper")
def test_readme(newcomer: tuple[Path, dict[str, str]], repository: Path) -> None:
    home, environ = newcomer
    blocks = shell_blocks(repository / "README.md")
    assert len(blocks) >= 4
    script = "set -eu\n" + "\n".join(blocks)
    try:
        ended = subprocess.run(
            ["bash", "-c", script],
            cwd=home,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
        assert "emulator" in ended.stdout
        lines = (home / "vectors.log").read_text().splitlines()
        assert lines[-1].startswith("round ")
    finally:
        end_programs_in(home)
        subprocess.run(
            [sys.executable, "-m", "cudackpt", "emulator", "stop"],
            env=environ,
            capture_output=True,
            check=False,
        )
