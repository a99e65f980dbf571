# SPDX-License-Identifier: Apache-2.0
"""Sealed and packed checkpoints are tampered with: all of it is refused, and nothing is left
running.

Two readers are asked. `unseal`, in this process, is quick enough for every byte of a small
checkpoint. A restore by criu is asked about every byte of what lies in the clear, about bytes of
all other files, and about whatever can be done with whole frames and whole files: swapped, left
out, repeated, and taken from another checkpoint of the same job.
"""

from __future__ import annotations

import itertools
import shutil
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from campaigns import damage
from campaigns.damage import Checkpoint, Damage, cut, missing
from campaigns.rig import Rig, small_filesystem, with_config
from campaigns.steady_job import SteadyJob
from campaigns.tally import Tally
from gpustasis._core import ENVELOPE_NAME, SEALED_NAME, DataKey
from gpustasis.criu.plugin import Setting
from gpustasis.errors import ImageError, SealError, UnsupportedError
from gpustasis.sealing.directory import open_key, open_sealed, seal_errors
from gpustasis.sealing.keys import KeyFile
from gpustasis.sealing.recipients import read_recipients
from gpustasis.sealing.seal import seal
from support.certificates import Pair

_HEADER, _FRAME_HEADER, _TAG = 128, 16, 16  # docs/format.md, "Sealed file"
_BLOCK = 64 << 10  # of a pack or an image: moved by damage to whole pieces of it
_TMPFS_BYTES = 256 << 20
_CLEAR = ("inventory.img", "pstree.img", "ids-*.img")  # read by CRIU before it asks a plugin
_GPU: Mapping[str, int] = {"mib": 1, "children": 1}


@dataclass(frozen=True, slots=True)
class Two:
    """Two checkpoints of one job. last: of these, the one that ended it; first: made before."""

    job: SteadyJob
    first: Path
    last: Path


@contextmanager
def taken(rig: Rig, shape: Mapping[str, int], settings: Mapping[str, Setting]) -> Iterator[Two]:
    """The job is dead, and is restored from `last` at the end, which must work."""
    sealing = with_config(rig, settings)
    with rig.job(**shape) as job:
        first, last = rig.images(), rig.images()
        for images, extra in ((first, ["--leave-running"]), (last, [])):
            dumped = sealing.dump(job, images, *extra)
            assert dumped.status == 0, dumped.errors
            rig.settle(images)
        job.wait()
        yield Two(job, first, last)
        restored = sealing.restore(last)
        assert restored.status == 0, f"nothing is changed, and not restored: {restored.errors}"
        job.run_on()


def sealed_for(pair: Pair) -> dict[str, Setting]:
    return {
        "recipients": [str(pair.certificate)],
        "private_key": str(pair.key),
        "cpu_memory": "ours",
    }


def run_unseal(rig: Rig, random: Random, pair: Pair, count: int, *, live: bool) -> Tally:
    """Bytes of a checkpoint are changed, and `unseal` reads it. count: of them in each file; 0:
    every one. live: sealed while it was made; else by `gpustasis seal`."""
    tally = Tally()
    settings = sealed_for(pair) if live else {"layout": "criu", "cpu_memory": "ours"}
    tiny = replace(rig, programs=replace(rig.programs, job=rig.programs.tiny))
    with taken(tiny, {}, settings) as two, _tmpfs(rig) as place:
        if live:
            shutil.copytree(two.last, place / "sealed")
            other = two.first
        else:
            other = place / "other"
            for images, out in ((two.last, place / "sealed"), (two.first, other)):
                seal(images, read_recipients([pair.certificate]), out)
        sealed = place / "sealed"
        names = [path.name for path in sorted(sealed.glob("gpustasis-sealed*"))]
        key = open_key(sealed, KeyFile(pair.key))
        _unseal(sealed, pair, key)  # nothing is changed: it opens
        for name in [*names, "inventory.img"]:
            given = None if name == ENVELOPE_NAME else key
            for at in _places(random, (sealed / name).stat().st_size, count):
                _flip(sealed / name, at)
                _require_closed(sealed, pair, given, f"byte {at} of {name}", tally)
                _flip(sealed / name, at)
        whole = place / "whole"
        shutil.copytree(sealed, whole)
        for change in _changes_of_files(other, sealed, random):
            what = change(sealed)
            _require_closed(sealed, pair, None, what, tally)
            shutil.rmtree(sealed)
            shutil.copytree(whole, sealed)
        _unseal(sealed, pair, key)
    return tally


def run_restores(
    rig: Rig, random: Random, pair: Pair, count: int, *, sealed: bool = True, clear: int = 0
) -> Tally:
    """criu restores what was changed: single bytes, `count` of each file and `clear` of each that
    lies in the clear (0: every one), frames and whole files. sealed False: packed alone."""
    settings: dict[str, Setting] = sealed_for(pair) if sealed else {"layout": "packed"}
    tally = Tally()
    with taken(rig, _GPU, settings) as two:
        clear_names = {path.name for pattern in _CLEAR for path in two.last.glob(pattern)}
        names = [path.name for path in sorted(two.last.glob("gpustasis-*"))]
        names = [name for name in names if name.endswith((".img", ".cms"))]
        damages: list[Damage] = []
        for name in names:
            size = (two.last / name).stat().st_size
            damages += [_flipped(name, at) for at in _places(random, size, count)]
        by_criu: list[Damage] = []
        for name in sorted(clear_names):
            size = (two.last / name).stat().st_size
            by_criu += [_flipped(name, at) for at in _places(random, size, clear)]
        by_criu += _of_earlier(two.first, two.last, clear_names)
        damages += [*by_criu, *_changes_of_files(two.first, two.last, random, clear_names)]
        rig = with_config(rig, settings)
        damage.refuse_all(rig, Checkpoint(two.job, two.last), damages, tally, by_criu=by_criu)
    return tally


def _changes_of_files(
    other: Path, images: Path, random: Random, without: Collection[str] = ()
) -> list[Damage]:
    """What can be done with frames and files as wholes. without: files that are not replaced by
    those of the earlier checkpoint."""
    changes: list[Damage] = []
    names = [path.name for path in sorted(images.glob("gpustasis-*.img"))]
    for name in names:
        raw = (images / name).read_bytes()
        theirs = (other / name).read_bytes() if (other / name).exists() else b""
        pieces, others = _pieces(name, raw), _pieces(name, theirs)
        changes += _changes_of_pieces(name, pieces, others, random)
        changes += [missing(name), cut(name, len(raw) - 1), cut(name, len(raw) // 2)]
        changes.append(_written(name, raw + b"\0", "one byte longer"))
    changes += _of_earlier(other, images, {path.name for path in images.iterdir()} - set(without))
    for first, second in itertools.pairwise(names):
        changes.append(_swapped(first, second))
    # What says which memory there is, of the earlier one, with all that is new beside it.
    told = [name for name in (SEALED_NAME, ENVELOPE_NAME) if (other / name).exists()]
    if told and len(names) > 1:
        changes.append(_taken(other, told))
        changes.append(_taken(other, [name for name in names if name != SEALED_NAME]))
    sealed = [name for name in (*names, ENVELOPE_NAME) if (other / name).exists()]
    changes.append(_taken(other, sealed))  # all of it, beside CRIU's inventory of the later one
    return changes


def _of_earlier(other: Path, images: Path, names: Collection[str]) -> list[Damage]:
    """Each of these files that the earlier checkpoint has as well, and that differs there."""
    changes = []
    for path in sorted(images / name for name in names):
        their = other / path.name
        is_read = path.suffix in (".img", ".cms")
        if is_read and their.exists() and their.read_bytes() != path.read_bytes():
            changes.append(_written(path.name, their.read_bytes(), "of an earlier checkpoint"))
    return changes


def _pieces(name: str, raw: bytes) -> list[bytes]:
    """The frames of a sealed file with its header before them; of another file, blocks."""
    if not name.startswith("gpustasis-sealed"):
        return [raw[at : at + _BLOCK] for at in range(0, len(raw), _BLOCK)]
    found, at = [raw[:_HEADER]], _HEADER
    while at < len(raw):
        (size,) = struct.unpack_from("<I", raw, at + 8)
        end = at + _FRAME_HEADER + size + _TAG
        found.append(raw[at:end])
        at = end
    return found


def _changes_of_pieces(
    name: str, pieces: Sequence[bytes], others: Sequence[bytes], random: Random
) -> list[Damage]:
    changes: list[Damage] = []
    raw = b"".join(pieces)

    def add(made: Sequence[bytes], what: str) -> None:
        if b"".join(made) != raw:
            changes.append(_written(name, b"".join(made), what))

    at = random.randrange(len(pieces))
    by = random.randrange(len(pieces))
    swapped = list(pieces)
    swapped[at], swapped[by] = swapped[by], swapped[at]
    add(swapped, f"pieces {at} and {by} swapped")
    for left_out in {at, len(pieces) - 1, len(pieces) // 2}:
        add([*pieces[:left_out], *pieces[left_out + 1 :]], f"piece {left_out} left out")
        add([*pieces[: left_out + 1], *pieces[left_out:]], f"piece {left_out} twice")
    for one in range(min(len(pieces), len(others))):
        add([*pieces[:one], others[one], *pieces[one + 1 :]], f"piece {one} of an earlier one")
    return changes


def _written(name: str, content: bytes, what: str) -> Damage:
    def change(images: Path) -> str:
        (images / name).write_bytes(content)
        return f"{name}: {what}"

    return change


def _flipped(name: str, at: int) -> Damage:
    def change(images: Path) -> str:
        _flip(images / name, at)
        return f"bit {at % 8} of byte {at} of {name} flipped"

    return change


def _swapped(first: str, second: str) -> Damage:
    def change(images: Path) -> str:
        content = (images / first).read_bytes()
        (images / first).write_bytes((images / second).read_bytes())
        (images / second).write_bytes(content)
        return f"{first} and {second} swapped"

    return change


def _taken(other: Path, names: Sequence[str]) -> Damage:
    def change(images: Path) -> str:
        for name in names:
            shutil.copy(other / name, images / name)
        return f"{', '.join(names)} of an earlier checkpoint"

    return change


def _places(random: Random, size: int, count: int) -> Sequence[int]:
    """Bytes of a file of that size: so many, its ends among them; 0: all."""
    if count == 0 or count >= size:
        return range(size)
    return sorted({0, size - 1, *random.sample(range(size), count)})


def _flip(path: Path, at: int) -> None:
    with path.open("r+b", buffering=0) as file:
        file.seek(at)
        (value,) = file.read(1)
        file.seek(at)
        file.write(bytes([value ^ 1 << at % 8]))


def _unseal(sealed: Path, pair: Pair, key: DataKey | None) -> None:
    """As the command does; key: that of an envelope which is known to be whole."""
    out = sealed.with_name("out")
    out.mkdir()
    try:
        opened = open_sealed(sealed, key or open_key(sealed, KeyFile(pair.key)))
        with seal_errors(sealed):
            opened.extract(out, 1, None)
    finally:
        shutil.rmtree(out)


def _require_closed(sealed: Path, pair: Pair, key: DataKey | None, what: str, tally: Tally) -> None:
    tally.counts["trials"] += 1
    try:
        _unseal(sealed, pair, key)
    except (SealError, UnsupportedError, ImageError):
        tally.counts["refused by unseal"] += 1
    except Exception as fault:  # noqa: BLE001 - whatever it is, it is no refusal
        tally.failures.append(f"{what}: {type(fault).__name__}: {fault}")
    else:
        tally.failures.append(f"{what}: it was opened")


@contextmanager
def _tmpfs(rig: Rig) -> Iterator[Path]:
    with small_filesystem(rig.scratch / "tampered", _TMPFS_BYTES, 0) as place:
        yield place
