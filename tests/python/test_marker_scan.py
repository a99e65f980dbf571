# SPDX-License-Identifier: Apache-2.0
"""The search for markers of a process finds them, and minds nobody else who is at work here."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from campaigns.marker_scan import Scanner

TESTS = Path(__file__).resolve().parent.parent
MARKER = secrets.token_hex(16).encode()
# Looks into what processes hold open, but for this one's parent, or with an argument in all.
SEARCH = """
import sys
from campaigns.marker_scan import Scanner
scanner = Scanner({"here": sys.argv[1].encode()}, 0, alone=len(sys.argv) > 2)
print(sorted(scanner.held_open().values()))
"""


@pytest.fixture
def scanner() -> Scanner:
    return Scanner({"here": MARKER}, 0)


@contextmanager
def held_by_another(path: Path, flags: int) -> Iterator[None]:
    """Open in a child, and without a name."""
    words = "import os, sys; os.open(sys.argv[1], int(sys.argv[2])); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", words, path, str(flags)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == "\n"
            (path.rmdir if path.is_dir() else path.unlink)()
            yield
        finally:
            child.kill()


def test_what_a_child_holds_open_without_a_name(scanner: Scanner, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(5000) + MARKER)
    with held_by_another(file, os.O_RDONLY):
        assert list(scanner.held_open().values()) == [{"here"}]
    assert scanner.held_open() == {}


@pytest.mark.parametrize("kind", ["directory", "pipe"])
def test_what_is_no_file_is_not_read(scanner: Scanner, tmp_path: Path, kind: str) -> None:
    """Nobody writes to the pipe: it would be waited for."""
    place = tmp_path / kind
    if kind == "pipe":
        os.mkfifo(place)
    else:
        place.mkdir()
    with held_by_another(place, os.O_RDWR if kind == "pipe" else os.O_RDONLY):
        assert scanner.held_open() == {}


def test_other_peoples_files_are_looked_into_by_one_that_is_alone(tmp_path: Path) -> None:
    """Where there is none but the two: what is looked into is open there, for a dump as well."""
    file = tmp_path / "file"
    for more, found in (([], "[]"), (["alone"], "[{'here'}]")):
        file.write_bytes(MARKER)
        holder = 'exec 3<"$1"; rm "$1"; shift; "$@" 3<&-'
        words = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-ec", holder]
        words += ["sh", str(file), sys.executable, "-c", SEARCH, MARKER.decode(), *more]
        environ = os.environ | {"PYTHONPATH": str(TESTS)}
        said = subprocess.run(words, env=environ, capture_output=True, text=True, check=True)
        assert said.stdout == found + "\n"


def test_a_hole_that_nobody_could_read(scanner: Scanner, tmp_path: Path) -> None:
    for name, at in (("end", (1 << 40) - 100), ("begin", 0), ("middle", 1 << 39)):
        with (tmp_path / name).open("wb") as file:
            file.truncate(1 << 40)
            file.seek(at)
            file.write(MARKER)
    assert scanner.below([tmp_path]).keys() == {str(path) for path in tmp_path.iterdir()}
    assert scanner.scanned_bytes < 1 << 20


def test_half_of_a_marker_over_the_end_of_a_block(scanner: Scanner, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes((4 << 20) - 8) + MARKER[:16] + bytes(100))
    assert scanner.below([tmp_path]) == {str(tmp_path / "file"): {"here"}}


def test_a_file_system_that_is_mounted_in_a_place_is_another_s(
    scanner: Scanner, tmp_path: Path
) -> None:
    """In a tmpfs what was made last is listed first."""
    place = tmp_path / "place"
    mounted = place / "mounted"
    for point in (place, mounted):
        point.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", point], check=True)
        (point / "file").write_bytes(MARKER)
        if point == place:
            (place / "other").write_bytes(MARKER)
    try:
        assert os.listdir(place)[0] == "mounted"
        assert scanner.below([place]).keys() == {str(place / "file"), str(place / "other")}
    finally:
        subprocess.run(["umount", mounted, place], check=True)


def test_what_was_changed_is_read_again(scanner: Scanner, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"nothing")
    assert scanner.below([tmp_path]) == {} == scanner.below([tmp_path])
    assert scanner.files == 1
    file.write_bytes(MARKER)
    assert scanner.below([tmp_path]) == {str(file): {"here"}}


def test_files_of_other_tests_are_read_only_where_nothing_else_runs(tmp_path: Path) -> None:
    other = tmp_path / "pytest-of-somebody" / "file"
    other.parent.mkdir()
    other.write_bytes(MARKER)
    for alone in (False, True):
        scanner = Scanner({"here": MARKER}, 0, alone=alone)
        assert (scanner.below([tmp_path]) != {}) is alone
        assert scanner.below([other.parent]) == {str(other): {"here"}}
