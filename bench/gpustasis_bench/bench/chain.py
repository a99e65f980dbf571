# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that build on earlier ones: the second of a training, and a chain of ten."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from gpustasis_bench.bench.checkpointing import Dumped
from gpustasis_bench.bench.contenders import CONTENDERS, OURS, STOCK
from gpustasis_bench.bench.content import Content
from gpustasis_bench.bench.course import Course
from gpustasis_bench.bench.medium import Medium
from gpustasis_bench.bench.statistics import spread

_OURS, _STOCK = CONTENDERS[OURS], CONTENDERS[STOCK]
_LENGTH = 10  # checkpoints on top of a full one


def measure_second(course: Course, content: Content, medium: Medium, pairs: int) -> dict[str, Any]:
    """A full checkpoint of ours, ten steps of training, then in turns: ours on top of that, and a
    full one of stock CRIU's, of the same memory. Raises BenchError."""
    ours: list[tuple[Dumped, float]] = []
    stock: list[tuple[Dumped, float]] = []
    with course.target(content) as target:
        for pair in range(pairs):
            with ExitStack() as stack:
                first, second, full = (stack.enter_context(course.images(medium)) for _ in range(3))
                target.load(content.layout(0))
                before = target.digests()
                course.checkpointing.dump(target, first, _OURS)
                course.restore(target, before, medium, [first], _OURS)
                target.load(content.layout(1))
                wanted = target.digests()
                for is_ours in (True, False) if pair % 2 == 0 else (False, True):
                    medium.settle()
                    if is_ours:
                        dumped = course.checkpointing.dump(target, second, _OURS, first)
                        restored = course.restore(target, wanted, medium, [first, second], _OURS)
                    else:
                        dumped = course.checkpointing.dump(target, full, _STOCK)
                        restored = course.restore(target, wanted, medium, [full], _STOCK)
                        shutil.rmtree(full)
                    (ours if is_ours else stock).append((dumped, restored.seconds))
                course.say(
                    f"{content.workload}, {medium.name}, pair {pair + 1}, second checkpoint: ours "
                    f"{ours[-1][0].seconds:.2f} s, {ours[-1][0].count('ref')} chunks of the "
                    f"parent's; stock {stock[-1][0].seconds:.2f} s"
                )
    return {
        "workload": content.workload,
        "medium": medium.name,
        "pairs": pairs,
        "gpu_bytes": content.gpu_bytes,
        "ours": _figures(ours),
        "stock": _figures(stock),
        "chunks": {name: ours[-1][0].count(name) for name in ("zero", "lz4", "raw", "ref")},
        "skipped_of_all": _skipped(ours[-1][0], with_zeros=True),
        "skipped_of_nonzero": _skipped(ours[-1][0], with_zeros=False),
        "ratios": {
            "dump_seconds": _ratio(stock, ours),
            "stored_bytes": round(
                median(each.stored_bytes for each, _ in ours)
                / median(each.stored_bytes for each, _ in stock),
                4,
            ),
        },
    }


def measure_chain(course: Course, content: Content, medium: Medium, pairs: int) -> dict[str, Any]:
    """A full checkpoint and ten more, each on top of the last; then, in turns, restores through
    that chain and from a full checkpoint of the very same memory. Raises BenchError."""
    length = min(_LENGTH, content.states - 1)
    with course.target(content) as target, ExitStack() as stack:
        folders = [stack.enter_context(course.images(medium)) for _ in range(length + 1)]
        full = stack.enter_context(course.images(medium))
        dumps: list[Dumped] = []
        for state, images in enumerate(folders):
            target.load(content.layout(state))
            medium.settle()
            parent = folders[state - 1] if state else None
            dumps.append(
                course.checkpointing.dump(target, images, _OURS, parent, leave_running=True)
            )
        wanted = target.digests()
        whole = course.checkpointing.dump(target, full, _OURS)
        through: list[float] = []
        direct: list[float] = []
        for pair in range(pairs):
            for is_chain in (True, False) if pair % 2 == 0 else (False, True):
                target.kill()
                images_read: list[Path] = folders if is_chain else [full]
                restored = course.restore(target, wanted, medium, images_read, _OURS)
                (through if is_chain else direct).append(restored.seconds)
            course.say(
                f"{content.workload}, {medium.name}, pair {pair + 1}, restore: through the chain "
                f"of {length} {through[-1]:.2f} s, from a full checkpoint {direct[-1]:.2f} s"
            )
    return {
        "workload": content.workload,
        "medium": medium.name,
        "pairs": pairs,
        "length": length,
        "chain_restore_seconds": round(median(through), 6),
        "full_restore_seconds": round(median(direct), 6),
        "spread": {"chain": spread(through), "full": spread(direct)},
        "ratio": round(median(through) / median(direct), 4),
        "stored_bytes": [each.stored_bytes for each in dumps],
        "full_stored_bytes": whole.stored_bytes,
        "skipped_of_nonzero": [_skipped(each, with_zeros=False) for each in dumps[1:]],
    }


def _figures(runs: list[tuple[Dumped, float]]) -> dict[str, Any]:
    seconds = [dumped.seconds for dumped, _ in runs]
    return {
        "dump_seconds": round(median(seconds), 6),
        "frozen_seconds": round(median(dumped.frozen_seconds for dumped, _ in runs), 6),
        "restore_seconds": round(median(restore for _, restore in runs), 6),
        "stored_bytes": int(median(dumped.stored_bytes for dumped, _ in runs)),
        "peak_rss_bytes": int(median(dumped.peak_rss_bytes for dumped, _ in runs)),
        "driver_seconds": round(median(dumped.driver_seconds for dumped, _ in runs), 6),
        "spread": spread(seconds),
    }


def _ratio(stock: list[tuple[Dumped, float]], ours: list[tuple[Dumped, float]]) -> float:
    above, below = (median(dumped.seconds for dumped, _ in runs) for runs in (stock, ours))
    return round(above / below, 4)


def _skipped(dumped: Dumped, *, with_zeros: bool) -> float:
    """The share of chunks that were not written: those of the parent, and zeros or without them."""
    zeros, refs = dumped.count("zero"), dumped.count("ref")
    everything = zeros + refs + dumped.count("lz4") + dumped.count("raw")
    if with_zeros:
        return round((refs + zeros) / everything, 4)
    return round(refs / (everything - zeros), 4) if everything > zeros else 0.0
