# SPDX-License-Identifier: Apache-2.0
"""Tar archives of odd headers, made at random: what our reader accepts, GNU tar and Go's
archive/tar read in the same way. An engine reads what we have looked through; it must be the same
archive."""

from __future__ import annotations

import traceback
from pathlib import Path
from random import Random

from campaigns.archives import mutated, with_checksums
from campaigns.tally import Tally
from gpustasis.errors import ArchiveError
from support.archives import Raw, pax, tar
from support.tar_readers import DisagreementError, Listed, of_gnu, of_go, ours

_AT_ONCE = 200  # archives that one run of the Go program reads
_NAMES = [b"checkpoint/a", b"./b", b"c//d", b"e/", b"f" * 100, b"g" * 60 + b"/h", b"./", b"i j"]
_NAMES += [b"k\n", b'l"\\', b"\xc3\xa9", b"\xff", b"m/.", b"", b"/n", b"o/../p", b"q\0r"]
_TARGETS = [b"", b"a", b"../a", b"/etc/passwd", b"x" * 100, b"t\n", b"\xff"]
_KEYWORDS = ["path", "linkpath", "size", "mtime", "uid", "gname", "atime", "comment", "charset"]
_KEYWORDS += ["hdrcharset", "SCHILY.xattr.user.x", "GNU.sparse.major", "GNU.sparse.name", " path"]
_VALUES = ["p", "q/r", "5", "05", "0", "", "-1", "1.5", "1e3", " 7", "s\0t", "\u00e9", "u" * 120]
_LIKELY = {
    "path": ["p", "q/r", "dir/", "u" * 120, "\u00e9"],
    "linkpath": ["p", "../q", "/etc/r", "u" * 120],
    "size": ["0", "3", "5", "512"],
    "mtime": ["1.5", "-3.25", "1700000000", "1700000000.123456789"],
    "uid": ["5", "70000"],
    "gname": ["root", "\u00e9"],
    "atime": ["1.5", "5"],
    "comment": ["p q", "a=b", ""],
    "SCHILY.xattr.user.x": ["s\0t", "=", ""],
}
_NUMBERS = [b"%011o\0", b"%012o", b"%10o \0", b"%o", b" %o", b"+%o", b"%o x", b"0x%x"]
_MAGICS = [b"ustar\x0000"] * 60 + [b"ustar  \0"] * 60
_MAGICS += [b"ustar\0  ", b"ustar \0\0", b"ustar  x", bytes(8), b"ustar\x00\x00\x00"]


def run(program: Path, scratch: Path, random: Random, rounds: int) -> Tally:
    """Make that many archives; program: build_go_reader's. Those that we refuse count as trials."""
    tally = Tally()
    accepted: list[tuple[Path, list[Listed]]] = []
    for number in range(rounds):
        path = scratch / f"{number}.tar"
        raw = archive(random)
        if random.randrange(4) == 0:
            raw = with_checksums(mutated(raw, random))
        path.write_bytes(raw)
        tally.counts["trials"] += 1
        try:
            accepted.append((path, ours(path)))
            tally.counts["accepted"] += 1
        except ArchiveError:
            tally.counts["refused"] += 1
            path.unlink()
        except Exception:  # noqa: BLE001 - whatever it is, it is what is looked for
            tally.failures.append(f"{path}: {traceback.format_exc()}")
        if len(accepted) == _AT_ONCE or number + 1 == rounds:
            _compare(program, accepted, tally)
            accepted.clear()
    return tally


def _compare(program: Path, accepted: list[tuple[Path, list[Listed]]], tally: Tally) -> None:
    """Archives that are read alike are removed."""
    by_go = of_go(program, [path for path, _ in accepted]) if accepted else []
    for (path, found), go in zip(accepted, by_go, strict=True):
        try:
            gnu: list[Listed] | str = of_gnu(path)
        except DisagreementError as exc:
            gnu = str(exc)
        tally.counts["members"] += len(found)
        if found == go == gnu:
            path.unlink()
        else:
            tally.failures.append(f"{path}:\n  ours {found}\n  Go   {go}\n  GNU  {gnu}")


def archive(random: Random) -> bytes:
    """A few members with headers of all kinds, most of them as some writer makes them."""
    members: list[Raw] = []
    for number in range(random.randint(1, 4)):
        extensions = random.choice([0] * 9 + [1] * 8 + [2, 2, 3])
        members += [_extension(random) for _ in range(extensions)]
        members.append(_member(random, number))
    return tar(members)


def _extension(random: Random) -> Raw:
    match random.randrange(6):
        case 0:
            text = random.choice([*_NAMES, b"long/" * 30 + b"name"])
            end = random.choice([b"\0", b"\0", b"\0", b"", b"\0\0", b"\0x\0"])
            end = random.choice([b"\0", end])
            return Raw(b"././@LongLink", text + end, type=b"L", magic=b"ustar  \0")
        case 1:
            text = random.choice([*_TARGETS, b"up/" * 50])
            return Raw(b"././@LongLink", text + b"\0", type=b"K", magic=b"ustar  \0")
        case 2:
            return _odd_records(random)
        case _:
            count = random.choice([1, 1, 1, 2])
            keywords = [random.choice(_KEYWORDS) for _ in range(count)]
            records = {
                word: random.choice(_LIKELY.get(word, []) * 4 + _VALUES) for word in keywords
            }
            made = pax(**records)
            made.type = random.choice([b"x"] * 8 + [b"g", b"X"])
            return made


def _odd_records(random: Random) -> Raw:
    """Records as no writer makes them."""
    records = [b"9 path=z\n", b"09 path=z\n", b"10  path=z\n", b"9 path=z\n9 path=y\n", b"5 a=\n"]
    records += [b"12 a=b\0c=d\n", b"6 a=b\n\0\0", b"9 size=3\n9 size=4\n", b"", b"6 =ab\n"]
    records += [b"13 path\t=zzz\n", b"10 pa\0th=z\n", b"+9 path=z\n", b"11 path==z\n"]
    return Raw(b"PaxHeaders/x", random.choice(records), type=b"x")


def _member(random: Random, number: int) -> Raw:
    kind = random.choice(
        [*(b"%c" % letter for letter in b"0" * 24 + b"\0\0\0552211346"), b"7", b"S", b"D"]
    )
    name = random.choice([b"m%d" % number] * 60 + _NAMES)
    made = Raw(
        name,
        random.randbytes(random.choice([0, 3, 5, 512, 700])) if kind in b"0\x007" else b"",
        type=kind,
        target=random.choice(_TARGETS) if kind in b"12" or random.randrange(8) == 0 else b"",
        magic=random.choice(_MAGICS),
    )
    made.prefix = random.choice([b""] * 40 + [b"pre/fix", b"p" * 155, b"a\0b", b"q" * 131])
    if random.randrange(8) == 0:
        made.size_field = _number(random, len(made.content), 12)
    for offset, width in ((100, 8), (108, 8), (116, 8), (136, 12), (329, 8), (337, 8)):
        if random.randrange(60) == 0:
            made.fields[offset] = _number(random, random.randrange(4096), width)
    if random.randrange(40) == 0:
        made.fields[random.choice([345, 369, 386, 476, 488, 495, 500, 508])] = random.choice(
            [b"tar\0", b"1", b"x", b"\x80", b"00000000000 "]
        )
    return made


def _number(random: Random, value: int, width: int) -> bytes:
    """As some writers have it, or none."""
    match random.randrange(6):
        case 0:
            lead = random.choice([0x80, 0x80, 0x81, 0xBF, 0xFF, 0xC0])
            return bytes([lead]) + value.to_bytes(width - 1, "big")
        case 1:
            return random.choice([bytes(width), b" " * width, b"\0" + b"7" * (width - 1)])
        case 2:
            return (b"%o" % value).ljust(width, b"\0")[: width - 1] + random.choice([b"\0", b" "])
        case _:
            form = random.choice(_NUMBERS)
            return (form % value)[-width:].ljust(width, b"\0")
