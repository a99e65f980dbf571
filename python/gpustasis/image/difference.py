# SPDX-License-Identifier: Apache-2.0
"""What changed in memory from one checkpoint to another, by the hashes in their indexes.

No chunk is read, and no earlier checkpoint is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self

from gpustasis._core import ImageReader, Manifest, MemoryKind, hash128
from gpustasis.errors import ImageError
from gpustasis.image.checkpoint import CheckpointFiles, DirectoryFiles

# Content of a chunk: plain size and hash.
_Content = tuple[int, bytes]
# Of an image: the pid, and the value of its MemoryKind.
_Place = tuple[int, int]


@dataclass(slots=True, kw_only=True)
class Amounts:
    """Bytes of memory, each counted once.

    same: as in A at the same address. changed: A has other bytes at that address. moved: not as in
    A at that address, but the same bytes are elsewhere in A. only_in_b: neither address nor content
    is in A. only_in_a: the other way round. A chunk that became zero is changed, not moved.
    """

    same: int = 0
    changed: int = 0
    moved: int = 0
    only_in_a: int = 0
    only_in_b: int = 0

    def add(self, other: Self) -> None:
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))

    @property
    def in_b(self) -> int:
        """All of B's memory."""
        return self.same + self.changed + self.moved + self.only_in_b

    @property
    def fresh(self) -> int:
        """What B holds and A does not, wherever."""
        return self.changed + self.only_in_b


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionDifference:
    """A region of B; or one of A that begins elsewhere, for what only A has."""

    address: int
    length: int
    amounts: Amounts


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDifference:
    """The memory of a task, by its pid and kind ("gpu" or "cpu"); a side that does not have it
    counts as empty."""

    pid: int
    kind: str
    in_a: bool
    in_b: bool
    regions: tuple[RegionDifference, ...]
    amounts: Amounts


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """seconds: from A's dump to B's, as their manifests are dated; None: B is not the later one."""

    chunk_size: int
    seconds: float | None
    tasks: tuple[TaskDifference, ...]
    amounts: Amounts


@dataclass(frozen=True, slots=True)
class _Side:
    name: str
    images: dict[_Place, ImageReader]


def compare(a: Path, b: Path) -> Difference:
    """compare_files of two image directories."""
    return compare_files(DirectoryFiles(a), DirectoryFiles(b))


def compare_files(a: CheckpointFiles, b: CheckpointFiles) -> Difference:
    """What changed from checkpoint `a` to `b`, chunk by chunk.

    Raises ImageError if one is damaged, has no images of ours, or has chunks of another
    size; UnsupportedError.
    """
    before, after = _open(a), _open(b)
    chunk_size = _chunk_size(before, after)
    contents = {
        content for image in before.images.values() for _, content in _chunks_with_content(image)
    }
    later = {
        content for image in after.images.values() for _, content in _chunks_with_content(image)
    }
    zeros = _Zeros()
    tasks = tuple(
        _compare_task(
            place, before.images.get(place), after.images.get(place), contents, later, zeros
        )
        for place in sorted({*before.images, *after.images})
    )
    return Difference(
        chunk_size=chunk_size,
        seconds=_seconds_between(a, b),
        tasks=tasks,
        amounts=_sum(task.amounts for task in tasks),
    )


def _open(files: CheckpointFiles) -> _Side:
    manifest = files.manifest()
    if manifest is None:
        raise ImageError(f"{files.name}: no manifest: it holds nothing that gpustasis saved")
    images = _images(files, manifest)
    if not images:
        raise ImageError(f"{files.name}: its memory is in CRIU's own images: nothing to compare")
    return _Side(files.name, images)


def _images(files: CheckpointFiles, manifest: Manifest) -> dict[_Place, ImageReader]:
    return {
        (task.pid, task.kind.value): files.open_image(manifest, task)
        for task in manifest.tasks
        if task.externalized
    }


def _chunk_size(before: _Side, after: _Side) -> int:
    sizes = {
        image.info.chunk_size: f"{side.name}: chunks of {image.info.chunk_size} bytes"
        for side in (before, after)
        for image in side.images.values()
    }
    if len(sizes) > 1:
        found = ", ".join(sizes.values())
        raise ImageError(f"only checkpoints with chunks of one size can be compared: {found}")
    return next(iter(sizes))


def _chunks_with_content(image: ImageReader) -> Iterator[tuple[int, _Content]]:
    """Address and content of every chunk."""
    for index in range(len(image)):
        chunk = image.chunk(index)
        yield chunk.address, (chunk.plain_size, chunk.hash)


class _Zeros:
    """Which contents are all zeros."""

    def __init__(self) -> None:
        self._hashes: dict[int, bytes] = {}

    def __contains__(self, content: _Content) -> bool:
        size, found = content
        if size not in self._hashes:
            self._hashes[size] = hash128(bytes(size))
        return self._hashes[size] == found


def _compare_task(
    place: _Place,
    before: ImageReader | None,
    after: ImageReader | None,
    contents: set[_Content],
    later: set[_Content],
    zeros: _Zeros,
) -> TaskDifference:
    old = {} if before is None else dict(_chunks_with_content(before))
    new = {} if after is None else dict(_chunks_with_content(after))
    regions = []
    for begin, length in _regions(after):
        amounts = Amounts()
        for address, content in _within(after, new, begin, length):
            size = content[0]
            there = old.get(address)
            if there == content:
                amounts.same += size
            elif content in contents and not (there is not None and content in zeros):
                amounts.moved += size
            elif there is not None:
                amounts.changed += size
            else:
                amounts.only_in_b += size
        regions.append(RegionDifference(address=begin, length=length, amounts=amounts))
    taken = {region.address: region for region in regions}
    for begin, length in _regions(before):
        gone = sum(
            content[0]
            for address, content in _within(before, old, begin, length)
            if address not in new and content not in later
        )
        if begin in taken:
            taken[begin].amounts.only_in_a += gone
        elif gone:
            amounts = Amounts(only_in_a=gone)
            regions.append(RegionDifference(address=begin, length=length, amounts=amounts))
    regions.sort(key=lambda region: region.address)
    return TaskDifference(
        pid=place[0],
        kind=MemoryKind(place[1]).name.lower(),
        in_a=before is not None,
        in_b=after is not None,
        regions=tuple(regions),
        amounts=_sum(region.amounts for region in regions),
    )


def _regions(image: ImageReader | None) -> list[tuple[int, int]]:
    return [] if image is None else [(r.address, r.length) for r in image.info.regions]


def _within(
    image: ImageReader | None, chunks: dict[int, _Content], begin: int, length: int
) -> Iterator[tuple[int, _Content]]:
    if image is not None:
        for address in range(begin, begin + length, image.info.chunk_size):
            yield address, chunks[address]


def _sum(parts: Iterator[Amounts]) -> Amounts:
    total = Amounts()
    for part in parts:
        total.add(part)
    return total


def _seconds_between(a: CheckpointFiles, b: CheckpointFiles) -> float | None:
    seconds = (b.dated_ns() - a.dated_ns()) / 1e9
    return seconds if seconds > 0 else None
