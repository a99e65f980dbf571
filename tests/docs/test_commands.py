# SPDX-License-Identifier: Apache-2.0
"""The commands in README.md, docs/operating.md and docs/emulator.md work as they stand there."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from gpustasis.criu.find import Criu
from gpustasis.errors import ImageError
from gpustasis.image.arena import Tier, tier_of
from gpustasis_bench.roots import require_root
from support.chains import make_link, memory_of
from support.local_checkpoints import make_local
from support.recipients import make_recipient

_BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_TIMEOUT_S = 300
_POLL_S = 0.02
_LIBRARY_PATH = "LIBRARY_PATH_OF_THE_CALLER"
_SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
_ROOT = "/var/cache/gpustasis/roots/sid"  # in README.md
_PREFIX = "/usr/local/lib/gpustasis"  # there too
_CDI = "/etc/cdi"  # in docs/emulator.md
_PROBLEMS_FOUND = 20  # doctor's exit status


def shell_blocks(document: Path) -> list[str]:
    return _BLOCK.findall(document.read_text())


def named_block(document: Path, kind: str) -> str:
    """The one that begins with ```sh kind."""
    pattern = rf"^```sh {kind}\n(.*?)^```$"
    (block,) = re.findall(pattern, document.read_text(), re.MULTILINE | re.DOTALL)
    return str(block)


@pytest.fixture
def checkout(repository: Path, tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A folder that looks like the tree after `make build`, and the environment of somebody whose
    system has nothing of it."""
    home = tmp_path / "home"
    (home / "build").mkdir(parents=True)
    (home / "build" / "venv").symlink_to(sys.prefix)
    (home / "build" / "dist").symlink_to(repository / "build" / "dist")
    (home / "tests").symlink_to(repository / "tests")
    environ = {
        "HOME": str(home),
        "LC_ALL": "C.UTF-8",
        "PATH": _SYSTEM_PATH,
        "GPUSTASIS_EMULATOR": str(tmp_path / "socket"),  # not somebody else's
    }
    return home, environ


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


@pytest.mark.one_criu
def test_readme(newcomer: tuple[Path, dict[str, str]], repository: Path) -> None:
    home, environ = newcomer
    blocks = shell_blocks(repository / "README.md")
    assert len(blocks) == 5
    script = "set -eu\n" + "\n".join(blocks)
    try:
        status, output = run_shell(script, home, environ)
        assert status == 0, output
        assert "emulator" in output
        lines = (home / "vectors.log").read_text().splitlines()
        assert lines[-1].startswith("round ")
    finally:
        clean_up(home, environ)


def test_readme_by_hand(checkout: tuple[Path, dict[str, str]], repository: Path) -> None:
    """With a criu that starts by no path: the one of a root."""
    home, environ = checkout
    readme = repository / "README.md"
    root = named_block(readme, "root")
    assert _ROOT in root
    root = root.replace(_ROOT, shlex.quote(str(require_root("sid"))))
    blocks = [named_block(readme, "checkout"), root, *shell_blocks(readme)]
    try:
        status, output = run_shell("set -eu\n" + "\n".join(blocks), home, environ)
        assert status == 0, output
        assert (home / "vectors.log").read_text().splitlines()[-1].startswith("round ")
    finally:
        clean_up(home, environ)


def test_readme_install(
    checkout: tuple[Path, dict[str, str]], repository: Path, tmp_path: Path
) -> None:
    """Without a network: what the wheel depends on is the tests' own."""
    home, environ = checkout
    place = tmp_path / "opt"
    link_dependencies(tmp_path / "dependencies", place)
    programs = tmp_path / "bin"
    programs.mkdir()
    python = shlex.quote(str(Path(sys.executable).resolve()))
    (programs / "python3").write_text(f'#!/bin/sh\nexec {python} "$@"\n')
    (programs / "python3").chmod(0o755)
    environ["PATH"] = f"{programs}:{environ['PATH']}"
    environ |= {"PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    script = named_block(repository / "README.md", "venv")
    assert _PREFIX in script
    status, output = run_shell("set -eu\n" + script.replace(_PREFIX, str(place)), home, environ)
    assert status in (0, _PROBLEMS_FOUND), output
    assert (place / "bin" / "gpustasis").exists()
    assert "CUDA driver" in output


def link_dependencies(links: Path, prefix: Path) -> None:
    """What the tests' environment has, but gpustasis and pip, which brings itself, for one that is
    made at `prefix` later on."""
    links.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith(("gpustasis", "pip", "setuptools")):
            (links / entry.name).symlink_to(entry)
    packages = prefix / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    packages.mkdir(parents=True)
    (packages / "tests.pth").write_text(f"{links}\n")


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


@pytest.mark.one_criu
def test_operating(newcomer: tuple[Path, dict[str, str]], repository: Path) -> None:
    """Of a job that runs, with its pid in $pid: README.md's."""
    home, environ = newcomer
    start = shell_blocks(repository / "README.md")[:2]
    blocks = shell_blocks(repository / "docs" / "operating.md")
    assert len(blocks) == 9
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
        assert "Writes per s: now, mean, peak" in output
        assert (home / "moved" / "inventory.img").exists()
        assert (home / "job.gps").stat().st_mode & 0o777 == 0o600
        assert len(list((home / "jobs").iterdir())) == 2 + 1  # the last two, and their first
        assert (home / "vectors.log").read_text().splitlines()[-1].startswith("round ")
    finally:
        clean_up(home, environ)


def test_sealing(checkout: tuple[Path, dict[str, str]], repository: Path) -> None:
    home, environ = checkout
    environ["PATH"] = f"{Path(sys.executable).parent}:{environ['PATH']}"
    make_link(home / "alone", {7: memory_of(["a1", "0", "A2"])})
    before = {path.name: path.read_bytes() for path in (home / "alone").iterdir()}
    block = named_block(repository / "docs" / "operating.md", "sealing")
    status, output = run_shell(f"set -eu\n{block}", home, environ)
    assert status == 0, output
    assert {path.name: path.read_bytes() for path in (home / "opened").iterdir()} == before
    assert {path.name: path.read_bytes() for path in (home / "alone").iterdir()} == before
    names = {path.name for path in (home / "sealed").iterdir()}
    assert before.keys() & names == {"inventory.img"}
    block = named_block(repository / "docs" / "operating.md", "signing")
    status, output = run_shell(f"set -eu\n{block}", home, environ)
    assert status == 0, output
    assert "opened: signed by CN=node7, EC P-256" in output


def test_a_dump_that_is_sealed(
    newcomer: tuple[Path, dict[str, str]], repository: Path, tmp_path: Path
) -> None:
    home, environ = newcomer
    pair = make_recipient(tmp_path, "backup")
    for place, name in ((pair.certificate, "backup.pem"), (pair.key, "backup.key")):
        shutil.copy(place, home / name)
    start = shell_blocks(repository / "README.md")[:2]
    block = named_block(repository / "docs" / "operating.md", "sealed")
    script = "set -eu\n" + "\n".join([*start, block])
    try:
        status, output = run_shell(script, home, environ)
        assert status == 0, output
        left = {path.name for path in (home / "sealed-job").glob("*.img")}
        assert "pages-1.img" not in left and "gpustasis-sealed.img" in left
        assert (home / "vectors.log").read_text().splitlines()[-1].startswith("round ")
    finally:
        clean_up(home, environ)


def test_draining(
    checkout: tuple[Path, dict[str, str]], repository: Path, tmp_path: Path, arena: Path
) -> None:
    """The script drains what is local, with and without a directory for each job, and goes on after
    what cannot be drained. It fails if the store is not there."""
    home, environ = checkout
    environ["PATH"] = f"{Path(sys.executable).parent}:{environ['PATH']}"
    block = named_block(repository / "docs" / "operating.md", "draining")
    store = tmp_path / "store"
    assert "/srv/checkpoints" in block
    block = block.replace("/srv/checkpoints", str(store))
    status, output = run_shell(block, home, environ)
    assert status != 0 and str(store) in output
    (store / "a job").mkdir(parents=True)
    status, output = run_shell(block, home, environ)
    assert status == 0, output
    lost, *drained = [store / name for name in ("one", "two", "a job/three")]
    shutil.rmtree(make_local(lost, arena))
    for images in drained:
        make_local(images, arena)
    make_link(store / "durable", {7: memory_of(["a1"])})
    status, output = run_shell(block, home, environ)
    assert status == ImageError.exit_code, output
    assert "it is lost" in output
    assert {tier_of(images) for images in drained} == {Tier.DURABLE}
    assert sorted(path.parent for path in store.rglob("gpustasis-arena")) == [lost]


def test_emulator(checkout: tuple[Path, dict[str, str]], repository: Path) -> None:
    home, environ = checkout
    environ["PATH"] = f"{Path(sys.executable).parent}:{environ['PATH']}"
    (block,) = shell_blocks(repository / "docs" / "emulator.md")
    assert _CDI in block
    (home / "program").write_text('#!/bin/sh\necho "on $LD_LIBRARY_PATH: $*"\n')
    (home / "program").chmod(0o755)
    try:
        status, output = run_shell(f"set -eu\n{block.replace(_CDI, str(home))}", home, environ)
        assert status == 0, output
        assert re.search(r"^on /.*: args$", output, re.MULTILINE), output
        assert "checkpoint error, code 801, 2 times" in output
        assert (home / "gpustasis-emulator.json").exists()
    finally:
        clean_up(home, environ)


@pytest.mark.one_criu
def test_ranks(newcomer: tuple[Path, dict[str, str]], repository: Path, tmp_path: Path) -> None:
    """Of docs/jobs.md, with an agent and a directory of this test's own."""
    home, environ = newcomer
    socket, config = tmp_path / "jobs.sock", tmp_path / "agent.toml"
    places = {
        "store": "store",
        "socket": "agent.sock",
        "jobs_socket": socket.name,
        "ranks_socket": "ranks.sock",
    }
    lines = [f'{key} = "{tmp_path / name}"' for key, name in places.items()]
    config.write_text("\n".join([*lines, 'http_socket = ""', ""]))
    config.chmod(0o600)
    text = (repository / "docs/jobs.md").read_text()
    first, second = re.findall(r"^```sh ranks\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    for words, own in (
        ("agent run ", f"agent run --config {config} "),
        ("/run/gpustasis/jobs.sock", str(socket)),
        ("job run ", f"job run --run-directory {tmp_path / 'run'} "),
    ):
        assert words in first
        first = first.replace(words, own)
    ended = "echo ended at $(tail -qn 1 ranks/rank-0/output.log ranks/rank-1/output.log)\n"
    try:
        status, output = run_shell(f"set -eu\n{first}{ended}{second}", home, environ)
        assert status == 0, output
        assert re.findall(r"^count +\d +(checkpoint) +(committed) +2", output, re.MULTILINE) == [
            ("checkpoint", "committed"),
            ("checkpoint", "committed"),
        ], output
        assert "job count, epoch 2: whole; 2 of 2 dumps read" in output
        assert "job count restored, epoch 3: 2 ranks" in output
        (before,) = re.findall(r"^ended at step (\d+) step (\d+)$", output, re.MULTILINE)
        after = re.findall(r"^step (\d+)$", output, re.MULTILINE)
        # Each is compared with itself: which of the two began first is left open.
        for then, now in zip(before, after, strict=True):
            assert int(now) >= int(then), output
    finally:
        end_programs_in(home)
