"""A finished file gets its name, and takes nobody's."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpustasis.runtimes.new_file import give_name


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
