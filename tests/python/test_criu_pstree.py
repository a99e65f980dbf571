# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from gpustasis.criu.images import PSTREE_NAME, Task, read_pstree
from gpustasis.errors import ImageError

MAGIC = bytes.fromhex("1943565430302750")
# Written by CRIU 4.3 for a process 15670 that leads its session.
CRIU_4_3 = MAGIC + bytes.fromhex("0e00000008b67a100018b67a20b67a28b67a")


def write(directory: Path, raw: bytes) -> Path:
    (directory / PSTREE_NAME).write_bytes(raw)
    return directory


def test_reads_what_criu_wrote(tmp_path: Path) -> None:
    leader = Task(pid=15670, ppid=0, pgid=15670, sid=15670, threads=(15670,))
    assert read_pstree(write(tmp_path, CRIU_4_3)) == (leader,)


def test_reads_several_processes_and_packed_threads(tmp_path: Path) -> None:
    child = bytes.fromhex("0d000000080210011801 20012a03020304")
    (_, task) = read_pstree(write(tmp_path, CRIU_4_3 + child))
    assert task == Task(pid=2, ppid=1, pgid=1, sid=1, threads=(2, 3, 4))


@pytest.mark.parametrize("length", range(len(CRIU_4_3)))
def test_every_truncation_is_reported(tmp_path: Path, length: int) -> None:
    with pytest.raises(ImageError):
        read_pstree(write(tmp_path, CRIU_4_3[:length]))


@pytest.mark.parametrize(
    "record",
    [
        "ffffffff",  # longer than the file, and than memory
        "020000000801",  # a process without its other numbers
        "0b00000008" + "ff" * 10,  # a number without end
        "09000000090000000000000000",  # a wire type that there is none of here
    ],
)
def test_nonsense_is_reported(tmp_path: Path, record: str) -> None:
    with pytest.raises(ImageError, match="damaged"):
        read_pstree(write(tmp_path, MAGIC + bytes.fromhex(record)))


def test_another_image_is_no_process_tree(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="not a process tree"):
        read_pstree(write(tmp_path, b"\x19CVT" + b"\0" * 20))


def test_a_missing_one_is_named(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match=PSTREE_NAME):
        read_pstree(tmp_path)
