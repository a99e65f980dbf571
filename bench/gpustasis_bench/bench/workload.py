"""What is put into GPU memory, by name."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpustasis import process
from gpustasis.errors import UnsupportedError
from gpustasis_bench.bench.content import Content, ContentWriter, find_content, make_content
from gpustasis_bench.bench.errors import BenchError
from gpustasis_bench.bench.plain import fill_random, fill_zeros

QLORA = "qlora"
EXTRA = "torch"  # in pyproject.toml

Fill = Callable[[ContentWriter, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """computed: its contents come from PyTorch, which is the extra."""

    name: str
    computed: bool = True


WORKLOADS = {
    each.name: each
    for each in (
        Workload(name="inference"),
        Workload(name="finetuning"),
        Workload(name=QLORA),
        Workload(name="random", computed=False),
        Workload(name="zeros", computed=False),
    )
}


def require_extra(workloads: list[Workload]) -> None:
    """Raises UnsupportedError if one of them needs PyTorch and it is not there."""
    needing = [each.name for each in workloads if each.computed]
    if needing and importlib.util.find_spec("torch") is None:
        raise UnsupportedError(
            f"the contents of {', '.join(needing)} are computed with PyTorch, which is not "
            f"installed; install the extra: pip install 'gpustasis-bench[{EXTRA}]', or name other "
            "--workloads (random, zeros)"
        )


def content_of(workload: Workload, size: int, seed: int, cache: Path) -> Content:
    """At least `size` bytes of GPU memory; made once for these parameters and then kept."""
    fill = _filler(workload)
    key = _key(size, seed)
    return make_content(cache, workload.name, key, lambda writer: fill(writer, size, seed))


def content_from_outside(workload: Workload, size: int, seed: int, cache: Path) -> Content:
    """The same, made by another process. Raises BenchError if that fails."""
    kept = find_content(cache, workload.name, _key(size, seed))
    if kept is not None:
        return kept
    words = [
        sys.executable,
        "-m",
        "gpustasis_bench.bench.make_content",
        workload.name,
        str(size),
        str(seed),
    ]
    ended = process.run([*words, str(cache)])
    if ended.status != 0:
        raise BenchError(f"the content of {workload.name} was not made: {ended.output[-2000:]}")
    return content_of(workload, size, seed, cache)


def _key(size: int, seed: int) -> str:
    return f"{size >> 10}k-{seed}"


def _filler(workload: Workload) -> Fill:
    if workload.name == "random":
        return fill_random
    if workload.name == "zeros":
        return fill_zeros
    # Only here: without the extra the others still work.
    if workload.name == QLORA:
        from gpustasis_bench.bench.qlora import fill_qlora

        return fill_qlora
    from gpustasis_bench.bench.pretraining import fill_finetuning, fill_inference

    return fill_inference if workload.name == "inference" else fill_finetuning
