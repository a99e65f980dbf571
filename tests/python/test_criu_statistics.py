# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpustasis.cli.options import describe
from gpustasis.criu.statistics import failures, find_statistics, statistics_path
from gpustasis.errors import ImageError
from support.inventory import write_inventory

TASK = {
    "pid": 900,
    "image_pid": 7,
    "externalized": True,
    "staged_bytes": 4096,
    "file_bytes": 512,
    "phases_ms": {"lock": 1.5},
}
DUMP = {
    "version": 1,
    "result": "ok",
    "error": "",
    "backend": "emulator",
    "tasks": [TASK, TASK],
    "phases_ms": {"driver_checkpoint": 20},
}


def write(images: Path, content: object) -> None:
    statistics_path(images, "dump").write_text(json.dumps(content))


def test_sums_over_the_tasks(tmp_path: Path) -> None:
    write(tmp_path, DUMP)
    statistics = find_statistics(tmp_path, "dump")
    assert statistics is not None
    assert (statistics.staged_bytes, statistics.file_bytes) == (8192, 1024)
    assert statistics.succeeded
    assert statistics.emulated
    assert statistics.tasks[0].phases_ms == {"lock": 1.5}


def test_what_an_earlier_checkpoint_has_is_summed_too(tmp_path: Path) -> None:
    ref = {"ref": {"chunks": 3, "plain_bytes": 1 << 20, "stored_bytes": 0}}
    write(tmp_path, DUMP | {"tasks": [TASK | ref, TASK], "full_because": ""})
    statistics = find_statistics(tmp_path, "dump")
    assert statistics is not None
    assert statistics.same_bytes == 1 << 20
    assert "1.0 MiB of it in earlier checkpoints already" in describe(statistics)


def test_why_a_checkpoint_is_full(tmp_path: Path) -> None:
    write(tmp_path, DUMP | {"full_because": "max_chain: c ends a chain of 2", "parent": None})
    statistics = find_statistics(tmp_path, "dump")
    assert statistics is not None
    assert statistics.full_because == "max_chain: c ends a chain of 2"
    assert "earlier" not in describe(statistics)


def test_there_may_be_none(tmp_path: Path) -> None:
    assert find_statistics(tmp_path, "dump") is None


def test_a_failure_says_why(tmp_path: Path) -> None:
    write(tmp_path, DUMP | {"result": "failed", "error": "pid 7: no GPU"})
    statistics = find_statistics(tmp_path, "dump")
    assert statistics is not None
    assert not statistics.succeeded
    assert statistics.error == "pid 7: no GPU"


DAMAGED = [
    "",
    "[]",
    "{}",
    '{"version": 99}',
    '{"version": 1}',
    '{"version": 1, "tasks": 3}',
    json.dumps(DUMP | {"tasks": [TASK | {"file_bytes": float("inf")}]}),
    "\xff",
]


@pytest.mark.parametrize("content", DAMAGED)
def test_damage_is_an_image_error_that_names_the_file(tmp_path: Path, content: str) -> None:
    path = statistics_path(tmp_path, "dump")
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ImageError, match=path.name):
        find_statistics(tmp_path, "dump")


def test_one_without_an_end_is_not_read_to_it(tmp_path: Path) -> None:
    with statistics_path(tmp_path, "dump").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ImageError, match="is longer than 67108864 bytes"):
        find_statistics(tmp_path, "dump")


FORGED = ["a line in the name of a file"]


@pytest.mark.parametrize(
    ("found", "names", "status", "said"),
    [
        ({}, ("cuda_plugin",), 0, []),
        (None, (), 0, []),
        (None, ("cuda_plugin",), 0, FORGED),  # it could not write what it had to say
        (None, ("gpustasis",), 0, FORGED),
        ({}, (), 1, FORGED),
        ({"result": "failed", "error": "no GPU"}, (), 0, FORGED),
    ],
)
def test_whose_lines_in_criu_s_log_are_believed(
    tmp_path: Path,
    found: dict[str, str] | None,
    names: tuple[str, ...],
    status: int,
    said: list[str],
) -> None:
    write_inventory(tmp_path, *names)
    if found is not None:
        write(tmp_path, DUMP | found)
    statistics = find_statistics(tmp_path, "dump")
    assert failures(statistics, tmp_path, status, FORGED) == said
    if found:
        assert failures(statistics, tmp_path, status, []) == ["no GPU"]
