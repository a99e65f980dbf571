# SPDX-License-Identifier: Apache-2.0
"""The caching allocator's rules."""

from __future__ import annotations

import itertools
import random

import pytest

from gpustasis_bench.contents.layout import CachingAllocator, segment_size

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (1, 2 * MIB),
        (1 * MIB, 2 * MIB),
        (1 * MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (100 * MIB + 512, 102 * MIB),
    ],
)
def test_a_first_allocation_asks_the_driver_for(size: int, segment: int) -> None:
    allocator = CachingAllocator()
    place = allocator.allocate(size)
    assert allocator.segments == [segment]
    assert (place.segment, place.offset) == (0, 0)


def test_sizes_are_rounded_to_512_bytes() -> None:
    allocator = CachingAllocator()
    assert allocator.allocate(1).size == 512
    assert allocator.allocate(513).offset == 512
    assert allocator.allocate(1).offset == 512 + 1024
    assert allocator.segments == [2 * MIB]


def test_small_and_large_do_not_share_segments() -> None:
    allocator = CachingAllocator()
    large = allocator.allocate(5 * MIB)
    small = allocator.allocate(4 * KIB)
    assert large.segment != small.segment
    assert allocator.allocate(8 * MIB).segment == large.segment
    assert allocator.segments == [20 * MIB, 2 * MIB]


def test_the_best_fitting_gap_is_taken() -> None:
    allocator = CachingAllocator()
    allocator.allocate(8 * MIB)  # 12 left
    allocator.allocate(9 * MIB)  # and 3 left of them
    second = allocator.allocate(9 * MIB)  # a new segment, with 11 left
    assert allocator.segments == [20 * MIB, 20 * MIB]
    assert second.segment == 1
    assert allocator.allocate(2 * MIB).segment == 0


def test_a_rest_of_a_large_block_below_1_mib_is_not_split_off() -> None:
    allocator = CachingAllocator()
    allocator.allocate(11 * MIB)  # in 12: 1 is left, and stays unused
    allocator.allocate(1 * MIB + 512)
    assert allocator.segments == [12 * MIB, 20 * MIB]


def test_nothing_overlaps_and_nothing_is_outside() -> None:
    numbers = random.Random(5)
    allocator = CachingAllocator()
    places = [allocator.allocate(int(2 ** numbers.uniform(0, 25))) for _ in range(400)]
    taken: dict[int, list[tuple[int, int]]] = {}
    for place in places:
        taken.setdefault(place.segment, []).append((place.offset, place.offset + place.size))
    for segment, ranges in taken.items():
        ranges.sort()
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ranges))
        assert ranges[-1][1] <= allocator.segments[segment]
    assert sum(place.size for place in places) <= allocator.reserved


def test_no_memory_is_no_allocation() -> None:
    with pytest.raises(ValueError, match="0 bytes"):
        CachingAllocator().allocate(0)
    assert segment_size(512) == 2 * MIB
