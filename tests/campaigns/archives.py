# SPDX-License-Identifier: Apache-2.0
"""Archives are changed at random: each is read or refused with a sentence, never a traceback, and
nothing is written but what a flatten that succeeded has written."""

from __future__ import annotations

import traceback
from pathlib import Path
from random import Random

from campaigns.tally import Tally
from gpustasis.archive.flatten import flatten_archive
from gpustasis.archive.opened import inspect_archive, open_archive
from gpustasis.archive.verification import verify_archive
from gpustasis.errors import CheckpointError
from support.archives import COMPRESSIONS, compressed

_BLOCK = 512


def run(sample: bytes, scratch: Path, random: Random, rounds: int) -> Tally:
    """Change `sample`, a tar archive, that often; scratch: an empty directory."""
    tally = Tally()
    path = scratch / "archive"
    for _ in range(rounds):
        raw = mutated(sample, random)
        if random.randrange(3):
            raw = with_checksums(raw)
        packed = compressed(raw, random.choice(COMPRESSIONS))
        if random.randrange(10) == 0:
            packed = mutated(packed, random)
        path.write_bytes(packed)
        tally.counts["trials"] += 1
        try:
            tally.counts["read" if is_read(path) else "refused"] += 1
        except Exception:  # noqa: BLE001 - whatever it is, it is what is looked for
            kept = scratch / f"failed-{tally.trials}"
            kept.write_bytes(packed)
            tally.failures.append(f"{kept}: {traceback.format_exc()}")
    path.unlink(missing_ok=True)
    return tally


def is_read(path: Path) -> bool:
    """Do all that can be done with an archive; whether all of it succeeded."""
    out = path.with_name("out")
    before = set(path.parent.rglob("*"))
    try:
        with open_archive(path) as archive:
            inspect_archive(archive)
            problems = verify_archive(archive, threads=1).problems
            flatten_archive(archive, out, threads=1)
    except CheckpointError as exc:
        assert str(exc).isprintable(), repr(str(exc))
        assert set(path.parent.rglob("*")) == before, "something was left behind"
        return False
    assert problems == [], "flattened, though it is damaged"
    written = set(out.iterdir())
    assert set(path.parent.rglob("*")) - before == {out, *written}
    for file in written:
        assert file.is_file() and not file.is_symlink()
        file.unlink()
    out.rmdir()
    return True


def mutated(raw: bytes, random: Random) -> bytes:
    """One to four changes: bytes, blocks cut, doubled, copied, zeroed, the end cut off."""
    changed = bytearray(raw)
    for _ in range(random.randint(1, 4)):
        at = random.randrange(max(1, len(changed)))
        block = at // _BLOCK * _BLOCK
        whole = slice(block, block + _BLOCK)
        match random.randrange(7):
            case 0:
                changed[at : at + 1] = random.randbytes(1)
            case 1:
                del changed[whole]
            case 2:
                changed[block:block] = changed[whole]
            case 3:
                other = random.randrange(max(1, len(changed))) // _BLOCK * _BLOCK
                changed[whole] = changed[other : other + _BLOCK]
            case 4:
                changed[whole] = bytes(_BLOCK)
            case 5:
                del changed[at:]
            case 6:
                changed[at : at + 8] = random.randbytes(8)
    return bytes(changed)


def with_checksums(raw: bytes) -> bytes:
    """The checksums of what looks like a tar header made right, so that what is in it is read."""
    fixed = bytearray(raw)
    for block in range(0, len(fixed) - _BLOCK + 1, _BLOCK):
        if fixed[block + 257 : block + 262] == b"ustar":
            fixed[block + 148 : block + 156] = b" " * 8
            total = sum(fixed[block : block + _BLOCK])
            fixed[block + 148 : block + 156] = b"%06o\0 " % total
    return bytes(fixed)
