"""What a benchmarked process holds on the GPU: bytes in a file, and where they go.

A content is a folder: tensors.bin, one NAME.layout for each state, content.json. Lines of a layout:

    file PATH                          the bytes of what follows
    segment BYTES                      one cuMemAlloc, zero at first; only in the first state
    copy SEGMENT OFFSET BYTES AT       these bytes of the segment are those of the file at AT

A later state has only the lines of what is different.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO

from typing_extensions import Buffer

from gpustasis_bench.bench.allocator import CachingAllocator, Place
from gpustasis_bench.bench.errors import BenchError

RECIPE = 3  # raised when contents are made differently: those kept are then made anew
_META = "content.json"
_DATA = "tensors.bin"


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


@dataclass(slots=True)
class ContentWriter:
    """Lays tensors out and writes them. Use inside `make_content`."""

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

    def add(self, name: str, part: str, data: Buffer) -> None:
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

    def change(self, name: str, data: Buffer) -> None:
        """A tensor that this state has different from the state before."""
        self._copy(name, data)

    def _copy(self, name: str, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        place = self._places[name]
        if view.nbytes > place.size:
            raise ValueError(f"tensor {name} has {view.nbytes} bytes, its place {place.size}")
        if self._file is None:
            self._file = (self.folder / _DATA).open("wb")
        self._file.write(view)
        self._copies[-1].append(f"copy {place.segment} {place.offset} {view.nbytes} {self._end}")
        self._end += view.nbytes

    def finish(self, workload: str, final: Path) -> Content:
        """Write the layouts; `final` is where the folder will lie."""
        if self._file is not None:
            self._file.close()
        else:
            (self.folder / _DATA).touch()
        for state, copies in enumerate(self._copies):
            lines = [f"file {(final / _DATA).absolute()}"]
            if state == 0:
                lines += [f"segment {size}" for size in self._allocator.segments]
            text = "\n".join([*lines, *copies]) + "\n"
            (self.folder / f"state-{state}.layout").write_text(text, encoding="utf-8")
        content = Content(
            folder=final,
            workload=workload,
            gpu_bytes=self._allocator.reserved,
            segments=len(self._allocator.segments),
            tensors=len(self._places),
            states=len(self._copies),
            parts=dict(self._parts),
            facts=self.facts,
        )
        fields = asdict(content) | {"folder": str(final), "recipe": RECIPE}
        (self.folder / _META).write_text(json.dumps(fields, indent=2), encoding="utf-8")
        return content


def make_content(
    cache: Path, workload: str, key: str, fill: Callable[[ContentWriter], None]
) -> Content:
    """The content of `workload` for the parameters in `key`, made by `fill` unless it is kept in
    `cache` already. Raises BenchError if it cannot be written."""
    if (kept := find_content(cache, workload, key)) is not None:
        return kept
    final = _folder(cache, workload, key)
    part = final.with_name(final.name + ".part")
    try:
        for old in (final, part):
            if old.exists():
                shutil.rmtree(old)
        part.mkdir(parents=True)
        writer = ContentWriter(part)
        fill(writer)
        content = writer.finish(workload, final)
        part.rename(final)
    except OSError as exc:
        raise BenchError(f"cannot write the content {final}: {exc.strerror}") from exc
    return content


def find_content(cache: Path, workload: str, key: str) -> Content | None:
    """What `make_content` made earlier; None: nothing, or by another recipe."""
    folder = _folder(cache, workload, key)
    try:
        fields = json.loads((folder / _META).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as exc:
        raise BenchError(f"{folder / _META} is damaged ({exc}); remove {folder}") from exc
    if fields.pop("recipe", None) != RECIPE or fields["folder"] != str(folder):
        return None
    return Content(**fields | {"folder": folder})


def _folder(cache: Path, workload: str, key: str) -> Path:
    return (cache / f"{workload}-{key}").absolute()
