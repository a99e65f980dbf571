# SPDX-License-Identifier: Apache-2.0
"""A finished file gets its name, and takes nobody's."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gpustasis.files import give_name


def test_a_finished_file_gets_its_name(tmp_path: Path) -> None:
    part = tmp_path / ".archive.part"
    part.write_bytes(b"new")
    give_name(part, tmp_path / "archive")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("archive", b"new")]


def test_a_file_that_came_first_keeps_its_name(tmp_path: Path) -> None:
    part, archive = tmp_path / ".archive.part", tmp_path / "archive"
    part.write_bytes(b"new")
    archive.write_bytes(b"somebody's")
    with pytest.raises(FileExistsError):
        give_name(part, archive)
    assert (part.read_bytes(), archive.read_bytes()) == (b"new", b"somebody's")


def test_without_hard_links_it_gets_its_name_all_the_same(tmp_path: Path) -> None:
    """As on vfat, where link(2) fails with EPERM: so it does for somebody else's file."""
    part, archive = tmp_path / ".archive.part", tmp_path / "archive"
    part.write_bytes(b"new")
    part.chmod(0o600)
    tmp_path.chmod(0o777)

    def as_nobody() -> int:
        os.chdir(tmp_path)
        os.setgid(65534)
        os.setuid(65534)
        try:
            os.link(part.name, "linked")
        except PermissionError:
            give_name(part.name, archive.name)
            return 0
        return 3

    assert in_child(as_nobody) == 0
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("archive", b"new")]


def in_child(run: Callable[[], int]) -> int:
    pid = os.fork()
    if pid == 0:
        status = 2
        try:
            status = run()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
