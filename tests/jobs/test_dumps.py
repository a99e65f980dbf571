# SPDX-License-Identifier: Apache-2.0
"""The record of a rank's dump is checked before it is used, and so are the files that it names."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpustasis.errors import ImageError, JobError
from gpustasis.jobs.dumps import DumpRecord, record_of, require_same, seal_of
from gpustasis.jobs.network import Connection, Network

RECORD = DumpRecord(
    id="ab" * 16,
    parent="",
    directory="/kept/rank-1/epoch-00000001",
    host="one",
    bytes=7,
    digest="0" * 64,
    pid=12,
    dump_ms=3,
    addresses=("10.0.0.1", "::1"),
    network=Network(
        frozenset({80}),
        frozenset({Connection("10.0.0.1", 80, "10.0.0.2", 81), Connection("::1", 1, "::1", 2)}),
    ),
)
TEXT = RECORD.to_text()
KEY = f"{RECORD.id}-{16 * '0'}"  # of a copy


def test_what_is_written_is_read() -> None:
    assert record_of(TEXT, "rank 1") == RECORD


def test_a_record_of_an_older_version_is_read_and_one_without_a_copy_is_as_it_was() -> None:
    assert not {"peer", "key"} & json.loads(TEXT).keys()
    copied = replace(RECORD, peer="10.0.0.9:7420", key=KEY)
    assert record_of(copied.to_text(), "rank 1") == copied
    assert copied.is_copied
    assert not RECORD.is_copied


@given(st.data())
def test_any_text_is_read_or_refused(data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(TEXT)))
    text = TEXT[:at] + data.draw(st.text(max_size=3)) + TEXT[at + data.draw(st.integers(0, 3)) :]
    with contextlib.suppress(JobError):
        record_of(text, "rank 1")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("version", 2),
        ("directory", "kept"),
        ("directory", "/kept/../etc"),
        ("digest", "0" * 63),
        ("bytes", -1),
        ("bytes", True),
        ("pid", "12"),
        ("addresses", [1]),
        ("host", None),
        ("more", 1),
        ("peer", "10.0.0.9:7420"),
        ("key", KEY),
        ("peer", 7),
        ("network", {"ports": [0], "connections": []}),
        ("network", {"ports": [True], "connections": []}),
        ("network", {"ports": [], "connections": [["10.0.0.1", 80, "::1", 81]]}),
        ("network", {"ports": [], "connections": [["0 }; flush ruleset", 80, "10.0.0.1", 81]]}),
        ("network", {"ports": [], "connections": [["10.0.0.1", 80, "10.0.0.1", 1 << 16]]}),
        ("network", {"ports": [], "connections": [["10.0.0.1", "80", "10.0.0.1", 81]]}),
        ("network", {"ports": []}),
    ],
)
def test_a_record_that_cannot_be_is_refused(name: str, value: Any) -> None:
    with pytest.raises(JobError):
        record_of(json.dumps({**json.loads(TEXT), name: value}), "rank 1")


def record_for(directory: Path) -> DumpRecord:
    size, digest = seal_of(directory)
    value = json.loads(TEXT) | {"directory": str(directory), "bytes": size, "digest": digest}
    return record_of(json.dumps(value), "rank 1")


def test_each_file_is_in_the_digest(tmp_path: Path) -> None:
    (tmp_path / "inventory.img").write_bytes(b"inventory")
    (tmp_path / "pages-1.img").write_bytes(b"pages")
    record = record_for(tmp_path)
    require_same(record)
    for name in ("dump.log", "restore.log", "stats-dump", "gpustasis-restore.json"):
        (tmp_path / name).write_bytes(b"written later")
    require_same(record)

    (tmp_path / "pages-1.img").write_bytes(b"Pages")
    with pytest.raises(JobError, match="is not what was committed"):
        require_same(record)
    (tmp_path / "pages-1.img").write_bytes(b"pages")
    require_same(record)
    (tmp_path / "pages-2.img").touch()
    with pytest.raises(JobError, match="is not what was committed"):
        require_same(record)
    (tmp_path / "pages-2.img").unlink()
    (tmp_path / "pages-1.img").rename(tmp_path / "pages-3.img")
    with pytest.raises(JobError, match="is not what was committed"):
        require_same(record)


def test_a_fifo_in_a_dump_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pages-1.img")
    with pytest.raises((ImageError, OSError)):
        seal_of(tmp_path)
