# SPDX-License-Identifier: Apache-2.0
"""A content's file and layouts: tensors, placed as PyTorch's CUDA caching allocator places them.

A content is a folder: tensors.bin, state-N.layout for each state, content.json. Lines of a layout:

    file PATH                          the bytes of what follows
    segment BYTES                      one cuMemAlloc, zero at first; only in the first state
    copy SEGMENT OFFSET BYTES AT       these bytes of the segment are those of the file at AT

A later state has only the lines of what is different. Source of the allocator's rules: PyTorch,
c10/cuda/CUDACachingAllocator (its defaults, one stream).
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

RECIPE = 5  # raised when contents are made differently: those kept are then made anew
META = "content.json"
DATA = "tensors.bin"

ROUNDING = 512  # bytes; every allocation is a multiple of it
SMALL_LIMIT = 1 << 20  # an allocation up to this comes out of a small segment
SMALL_SEGMENT = 2 << 20
MIDDLE_LIMIT = 10 << 20  # an allocation below this comes out of a middle segment
MIDDLE_SEGMENT = 20 << 20
LARGE_ROUNDING = 2 << 20  # others have a segment of their own, a multiple of this

Bytes = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where an allocation lies: segment counts from 0 in the order in which they were made."""

    segment: int
    offset: int
    size: int


@dataclass(slots=True)
class _Gap:
    segment: int
    offset: int
    size: int


@dataclass(slots=True)
class CachingAllocator:
    """Segments, each one cuMemAlloc, and what lies in them. All sizes in bytes."""

    segments: list[int] = field(default_factory=list)
    _small: list[_Gap] = field(default_factory=list)
    _large: list[_Gap] = field(default_factory=list)

    @property
    def reserved(self) -> int:
        return sum(self.segments)

    def allocate(self, size: int) -> Place:
        """The best fitting gap of the pool that serves such sizes, else a new segment."""
        if size <= 0:
            raise ValueError(f"an allocation of {size} bytes")
        rounded = round_up(size, ROUNDING)
        small = rounded <= SMALL_LIMIT
        gaps = self._small if small else self._large
        fitting = [gap for gap in gaps if gap.size >= rounded]
        if fitting:
            gap = min(fitting, key=lambda gap: (gap.size, gap.segment, gap.offset))
        else:
            gap = _Gap(len(self.segments), 0, segment_size(rounded))
            self.segments.append(gap.size)
            gaps.append(gap)
        place = Place(segment=gap.segment, offset=gap.offset, size=rounded)
        gap.offset += rounded
        gap.size -= rounded
        # A rest that is not worth splitting off stays with the block, unused.
        if gap.size < ROUNDING or (not small and gap.size <= SMALL_LIMIT):
            gaps.remove(gap)
        return place


def segment_size(rounded: int) -> int:
    """How much is asked of the driver for an allocation of `rounded` bytes."""
    if rounded <= SMALL_LIMIT:
        return SMALL_SEGMENT
    if rounded < MIDDLE_LIMIT:
        return MIDDLE_SEGMENT
    return round_up(rounded, LARGE_ROUNDING)


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple that is not less than `size`."""
    return -(-size // multiple) * multiple


@dataclass(slots=True)
class ContentWriter:
    """Lays tensors out and writes them into `folder`, which exists."""

    folder: Path
    facts: dict[str, float | int | str] = field(default_factory=dict)
    _allocator: CachingAllocator = field(default_factory=CachingAllocator)
    _places: dict[str, Place] = field(default_factory=dict)
    _parts: Counter[str] = field(default_factory=Counter)
    _copies: list[list[str]] = field(default_factory=lambda: [[]])
    _end: int = 0
    _file: BinaryIO | None = None

    @property
    def reserved(self) -> int:
        """Bytes of GPU memory in segments so far."""
        return self._allocator.reserved

    def add(self, name: str, part: str, data: Bytes) -> None:
        """A tensor of the first state."""
        size = memoryview(data).nbytes
        self.add_untouched(name, part, size)
        self._copy(name, data)

    def add_untouched(self, name: str, part: str, size: int) -> None:
        """A tensor that was allocated and never written: zero."""
        if name in self._places:
            raise ValueError(f"tensor {name} is there already")
        self._places[name] = self._allocator.allocate(size)
        self._parts[part] += size

    def next_state(self) -> None:
        """What is changed from here on belongs to the next state."""
        self._copies.append([])

    def change(self, name: str, data: Bytes) -> None:
        """A tensor that this state has different from the state before."""
        self._copy(name, data)

    def _copy(self, name: str, data: Bytes) -> None:
        view = memoryview(data).cast("B")
        place = self._places[name]
        if view.nbytes > place.size:
            raise ValueError(f"tensor {name} has {view.nbytes} bytes, its place {place.size}")
        if self._file is None:
            self._file = (self.folder / DATA).open("wb")
        self._file.write(view)
        self._copies[-1].append(f"copy {place.segment} {place.offset} {view.nbytes} {self._end}")
        self._end += view.nbytes

    def finish(self, workload: str, final: Path) -> None:
        """Write the layouts and content.json; `final` is the path where the folder will lie."""
        if self._file is not None:
            self._file.close()
        else:
            (self.folder / DATA).touch()
        for state, copies in enumerate(self._copies):
            lines = [f"file {final / DATA}"]
            if state == 0:
                lines += [f"segment {size}" for size in self._allocator.segments]
            text = "\n".join([*lines, *copies]) + "\n"
            (self.folder / f"state-{state}.layout").write_text(text, encoding="utf-8")
        fields = {
            "recipe": RECIPE,
            "folder": str(final),
            "workload": workload,
            "gpu_bytes": self._allocator.reserved,
            "segments": len(self._allocator.segments),
            "tensors": len(self._places),
            "states": len(self._copies),
            "parts": dict(self._parts),
            "facts": self.facts,
        }
        (self.folder / META).write_text(json.dumps(fields, indent=2), encoding="utf-8")
