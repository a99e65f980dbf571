# SPDX-License-Identifier: Apache-2.0
"""An archive that we look through is unpacked by an engine, whose reader is Go's or GNU tar: what
our reader accepts, they read in the same way."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from campaigns import tar_readers
from gpustasis.errors import ArchiveError
from support.archives import Raw, pax, tar
from support.tar_readers import build_go_reader, of_gnu, of_go, ours

SEED = 20261122
ROUNDS = 3000


@pytest.fixture(scope="module")
def go_reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_go_reader(tmp_path_factory.mktemp("go"))


def test_what_is_accepted_is_read_alike(tmp_path: Path, go_reader: Path) -> None:
    """Seeded; `make soak` does it for longer."""
    tally = tar_readers.run(go_reader, tmp_path, Random(SEED), ROUNDS)
    tally.require_clean()
    assert tally.counts["accepted"] > ROUNDS // 15
    assert tally.counts["refused"] > ROUNDS // 2


def long(text: bytes, kind: bytes = b"L") -> Raw:
    return Raw(b"././@LongLink", text + b"\0", type=kind, magic=b"ustar  \0")


# What a member is called or holds in the eyes of others, and what they make of it.
AMBIGUOUS = {
    "two long names": [long(b"first"), long(b"second"), Raw(b"x", b"1")],
    "two pax headers": [pax(path="first"), pax(mtime="1"), Raw(b"x", b"1")],
    "long name, then pax": [long(b"first"), pax(path="second"), Raw(b"x", b"1")],
    "pax, then long name": [pax(path="first"), long(b"second"), Raw(b"x", b"1")],
    "a header for all that follow": [
        Raw(b"h", b"10 path=y\n", type=b"g"),
        Raw(b"x", b"1"),
    ],
    "a long name with a zero byte in it": [long(b"a\0b"), Raw(b"x", b"1")],
    "an empty long name": [long(b""), Raw(b"x", b"1")],
    "an empty path": [pax(path=""), Raw(b"x", b"1")],
    "a path twice": [Raw(b"h", b"9 path=a\n9 path=b\n", type=b"x"), Raw(b"x", b"1")],
    "two blanks in a record": [Raw(b"h", b"10  path=a\n", type=b"x"), Raw(b"x", b"1")],
    "a prefix in GNU's format": [Raw(b"x", b"1", magic=b"ustar  \0", prefix=b"pre")],
    "Schily's format": [Raw(b"x", b"1", prefix=b"a" * 131, fields={508: b"tar\0"})],
    "a base-256 number of another kind": [
        Raw(b"x", b"1", size_field=b"\x81" + bytes(10) + b"\1"),
    ],
    "a time that is none": [pax(atime="soon"), Raw(b"x", b"1")],
    "an owner that is none": [Raw(b"x", b"1", fields={108: b"root\0\0\0\0"})],
    "half of a sparse member": [pax(GNU__sparse__name="y"), Raw(b"x", b"1")],
    "a contiguous file": [Raw(b"x", b"1", type=b"7")],
}


@pytest.mark.parametrize("members", AMBIGUOUS.values(), ids=AMBIGUOUS.keys())
def test_what_could_be_read_in_two_ways_is_refused(tmp_path: Path, members: list[Raw]) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(tar(members))
    with pytest.raises(ArchiveError) as caught:
        ours(path)
    assert str(caught.value).isprintable()


def test_all_that_writers_use_is_read(tmp_path: Path, go_reader: Path) -> None:
    """Long names and targets in both formats, large numbers, times with fractions, every kind."""
    members = [
        Raw(b"./", type=b"5"),
        Raw(b"d/", type=b"5", magic=b"ustar  \0"),
        Raw(b"plain", b"content"),
        long(b"long/" * 24 + b"name"),
        long(b"../" * 60 + b"target", b"K"),
        Raw(b"link", type=b"2", magic=b"ustar  \0"),
        pax(path="p" * 300, mtime="1700000000.25", size="5"),
        Raw(b"cut", b"12345", size=0),
        Raw(b"big", b"12345", size_field=b"\x80" + bytes(10) + b"\5", magic=b"ustar  \0"),
        Raw(b"hard", type=b"1", target=b"plain"),
        Raw(b"tail", b"x", prefix=b"some/where"),
        Raw(b"fifo", type=b"6"),
        Raw(b"tty", type=b"3"),
        Raw(b"disk", type=b"4"),
        Raw(b"old", b"x", type=b"\0"),
    ]
    path = tmp_path / "a.tar"
    path.write_bytes(tar(members))
    found = ours(path)
    assert len(found) == 12
    assert found[3].target == b"../" * 60 + b"target"
    assert of_go(go_reader, [path]) == [found]
    assert of_gnu(path) == found
