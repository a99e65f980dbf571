# SPDX-License-Identifier: Apache-2.0
"""`--key-command`: a program that opens the envelope, and what it is kept from."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpustasis import errors, process
from gpustasis.errors import SealError
from gpustasis.sealing import keys
from gpustasis.sealing.keys import KeyCommand
from gpustasis.sealing.recipients import read_recipients
from gpustasis.sealing.seal import seal
from gpustasis.sealing.unseal import unseal
from support.certificates import Pair
from support.command import call
from support.inventory import write_inventory
from support.recipients import make_recipient


@pytest.fixture(scope="module")
def me(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_recipient(tmp_path_factory.mktemp("me"), kind="SECP256R1")


@pytest.fixture
def sealed(tmp_path: Path, me: Pair) -> Path:
    directory = tmp_path / "one"
    directory.mkdir()
    write_inventory(directory)
    (directory / "core-1.img").write_bytes(b"core" * 100)
    seal(directory, read_recipients([me.certificate]), tmp_path / "sealed")
    return tmp_path / "sealed"


def opens(sealed: Path, command: KeyCommand, out: Path) -> None:
    """Raises SealError; nothing is at `out` then."""
    try:
        unseal(sealed, command, out)
    finally:
        assert not out.exists()


def test_a_command_opens(sealed: Path, me: Pair, tmp_path: Path) -> None:
    command = f"openssl cms -decrypt -inform DER -inkey '{me.key}' -recip '{me.certificate}'"
    done = call("unseal", sealed, "--key-command", command, "-o", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out" / "core-1.img").read_bytes() == b"core" * 100


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("sys.exit('no such token')", "no such token"),
        ("pass", "64 bytes, not 0"),
        ("print('GPUSKEY')", "64 bytes, not 8"),
        ("sys.stdout.write('x' * 64)", "no key record"),
        ("sys.stdout.write('x' * 65)", "64 bytes, not 65"),
        ("sys.stdout.write('GPUSKEY\\n\\1\\0\\0\\0' + '\\0' * 52)", "envelope was changed"),
        ("os.fork() or __import__('time').sleep(3)", "64 bytes, not 0"),
    ],
)
def test_a_command_that_does_not_open(
    sealed: Path, program: str, says: str, tmp_path: Path
) -> None:
    command = KeyCommand([sys.executable, "-c", f"import os, sys\n{program}"])
    with pytest.raises(SealError, match=says):
        opens(sealed, command, tmp_path / "out")


def test_a_command_that_hangs(
    sealed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "COMMAND_TIMEOUT_S", 0.3)
    with pytest.raises(SealError, match="did not end within"):
        opens(sealed, KeyCommand(["sleep", "100"]), tmp_path / "out")
    with pytest.raises(SealError, match="cannot run absent-program"):
        opens(sealed, KeyCommand(["absent-program"]), tmp_path / "out")


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("cat /dev/zero", "prints more than the 49168 bytes"),
        ("cat /dev/zero >&2", "bytes of errors"),
        ("sleep 100", "did not end within"),
    ],
)
def test_a_command_is_killed_with_all_that_it_runs(
    sealed: Path, program: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = tmp_path / "pids"

    def clock() -> float:
        """By which the time is up once the program sleeps, however late that is."""
        sleeps = program.startswith("sleep") and pids.exists() and pids.read_text().count("\n") == 2
        return time.monotonic() + sleeps * 10 * keys.COMMAND_TIMEOUT_S

    monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=clock))
    script = f"sleep 100 & echo $! > {pids}; echo $$ >> {pids}; {program}; true"
    begin = time.monotonic()
    with pytest.raises(SealError, match=says):
        opens(sealed, KeyCommand(["sh", "-c", script]), tmp_path / "out")
    assert time.monotonic() - begin < keys.COMMAND_TIMEOUT_S / 2
    for pid in pids.read_text().split():
        while runs(pid):
            assert time.monotonic() - begin < keys.COMMAND_TIMEOUT_S
            time.sleep(0.05)


def runs(pid: str) -> bool:
    """Whether it is neither gone nor a zombie."""
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_command_that_cannot_be_split_is_not_shown(sealed: Path, tmp_path: Path) -> None:
    done = call("unseal", sealed, "--key-command", "open --pin 'geheim", "-o", tmp_path / "out")
    assert done.exit_code == errors.USAGE
    assert "No closing quotation" in done.output
    assert "geheim" not in done.output


@pytest.mark.parametrize(
    "words",
    [[], ["--key-command", ""], ["--key-command", "'"], ["--key", "a", "--key-command", "b"]],
)
def test_just_one_key_is_named(sealed: Path, me: Pair, words: list[str], tmp_path: Path) -> None:
    rest = {"unseal": ["-o", tmp_path / "out"], "rewrap": ["--to", me.certificate]}
    for command, more in rest.items():
        done = call(command, sealed, *words, *more)
        assert done.exit_code == errors.USAGE
        assert "--key" in done.output
    assert not (tmp_path / "out").exists()
