# SPDX-License-Identifier: Apache-2.0
"""What a benchmarked process holds on the GPU: made once by gpustasis_bench.contents, then kept."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from gpustasis import process
from gpustasis.errors import UnsupportedError
from gpustasis_bench.contents.layout import META, RECIPE
from gpustasis_bench.errors import BenchError
from gpustasis_bench.roots import command_in, require_root

FINETUNING, QLORA = "finetuning", "qlora"
CPU, MIXED, SEALED = "cpu", "mixed", "sealed"
TORCH_ROOT = "torch"  # ci/test-root makes it


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """computed: its contents come from PyTorch, so they are made in the root that has it.
    cpu_memory: it has CPU memory, which its program makes; ours stores it as well (cpu_memory.py).
    """

    name: str
    computed: bool = True
    cpu_memory: bool = False


WORKLOADS = {
    each.name: each
    for each in (
        Workload(name="inference"),
        Workload(name=FINETUNING),
        Workload(name=QLORA),
        Workload(name="random", computed=False),
        Workload(name="zeros", computed=False),
        Workload(name=CPU, computed=False, cpu_memory=True),
        Workload(name=MIXED, computed=False, cpu_memory=True),
        Workload(name=SEALED, computed=False, cpu_memory=True),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """gpu_bytes: all segments. parts: bytes of tensors by what they are. facts: how it was made."""

    folder: Path
    workload: str
    gpu_bytes: int
    segments: int
    tensors: int
    states: int
    parts: dict[str, int]
    facts: dict[str, float | int | str]

    def layout(self, state: int) -> Path:
        """The layout of a state, absolute. State 0 is whole, others hold what they change."""
        return (self.folder / f"state-{state}.layout").absolute()

    def nonzero_bytes(self, state: int) -> int:
        """Bytes that it or a state before it has written: all others of the segments are zero."""
        written: dict[tuple[str, str], int] = {}
        for each in range(state + 1):
            for line in self.layout(each).read_text(encoding="utf-8").splitlines():
                kind, *words = line.split()
                if kind == "copy":
                    segment, offset, size, _ = words
                    place = segment, offset
                    written[place] = max(written.get(place, 0), int(size))
        return sum(written.values())


def require_contents(workloads: list[Workload]) -> None:
    """Raises UnsupportedError if one of them needs PyTorch and there is no root with it."""
    needing = [each.name for each in workloads if each.computed]
    if not needing:
        return
    try:
        require_root(TORCH_ROOT)
    except UnsupportedError as exc:
        raise UnsupportedError(
            f"the contents of {', '.join(needing)} are computed with PyTorch: {exc}; or name other "
            "--workloads (random, zeros)"
        ) from exc


def obtain_content(workload: Workload, size: int, seed: int, cache: Path) -> Content:
    """At least `size` bytes of GPU memory; made once for these parameters and then kept in `cache`.

    Made by a process of its own, so that what computes it takes no part in what is measured.
    Raises BenchError if that fails, UnsupportedError without the root that it needs.
    """
    return make_content(
        workload.name, size, seed, cache, require_root(TORCH_ROOT) if workload.computed else None
    )


def make_content(name: str, size: int, seed: int, cache: Path, root: Path | None) -> Content:
    """The same in the Debian root `root`; None: with this Python."""
    final = (cache / f"{name}-{size >> 10}k-{seed}").absolute()
    if (kept := read_content(final)) is not None:
        return kept
    part = final.with_name(final.name + ".part")
    try:
        for old in (final, part):
            if old.exists():
                shutil.rmtree(old)
        part.mkdir(parents=True)
        _run(name, size, seed, part, final, root)
        part.rename(final)
    except OSError as exc:
        raise BenchError(f"cannot write the content {final}: {exc.strerror}") from exc
    made = read_content(final)
    if made is None:
        raise BenchError(f"the program for contents made {final} by another recipe")
    return made


def read_content(folder: Path) -> Content | None:
    """What lies in `folder`; None: nothing, or of another recipe. Raises BenchError if damaged."""
    try:
        fields = json.loads((folder / META).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as exc:
        raise BenchError(f"{folder / META} is damaged ({exc}); remove {folder}") from exc
    if fields.pop("recipe", None) != RECIPE or fields["folder"] != str(folder):
        return None
    return Content(**fields | {"folder": folder})


def _run(name: str, size: int, seed: int, part: Path, final: Path, root: Path | None) -> None:
    words = ["-m", "gpustasis_bench.contents", name, str(size), str(seed)]
    if root is None:
        words = [sys.executable, *words, str(part), str(final)]
    else:
        words = command_in(root, part, ["python3", *words, "{folder}", str(final)])
    ended = process.run(words)
    if ended.status != 0:
        said = ended.output.strip()[-2000:]
        raise BenchError(f"the content of {name} was not made ({ended.ending}): {said}")
