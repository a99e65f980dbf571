"""Where tensors lie in GPU memory: the rules of PyTorch's CUDA caching allocator.

Source: PyTorch, c10/cuda/CUDACachingAllocator (its defaults, one stream).
"""

from __future__ import annotations

from dataclasses import dataclass, field

ROUNDING = 512  # bytes; every allocation is a multiple of it
SMALL_LIMIT = 1 << 20  # an allocation up to this comes out of a small segment
SMALL_SEGMENT = 2 << 20
MIDDLE_LIMIT = 10 << 20  # an allocation below this comes out of a middle segment
MIDDLE_SEGMENT = 20 << 20
LARGE_ROUNDING = 2 << 20  # others have a segment of their own, a multiple of this


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
    return -(-size // multiple) * multiple
