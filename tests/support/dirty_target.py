# SPDX-License-Identifier: Apache-2.0
"""tests/programs/dirty_target.c, and what its writes should look like to a tracker."""

from __future__ import annotations

import select
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from gpustasis._core import DirtyPages

PAGE = 4096
HUGE = 2 << 20


class Target:
    """The running program. Ends with the block it was started for."""

    def __init__(self, program: Path, prefix: Sequence[str] = ()) -> None:
        """prefix: words of a program that runs it; `pid` is that one's."""
        words = [*prefix, str(program)]
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.pid = self.process.pid

    def tell(self, *words: str | int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(
            " ".join(f"{word:x}" if isinstance(word, int) else word for word in words) + "\n"
        )
        self.process.stdin.flush()

    def answer(self) -> str:
        assert self.process.stdout is not None
        answer = self.process.stdout.readline().strip()
        assert answer not in ("", "failed"), (answer, self.process.poll())
        return answer

    def ask(self, *words: str | int) -> str:
        self.tell(*words)
        return self.answer()

    def number(self, *words: str | int) -> int:
        return int(self.ask(*words), 16)

    def answered(self) -> bool:
        """Whether a line is waiting that tell() was the question of."""
        return bool(select.select([self.process.stdout], [], [], 0)[0])

    def end(self) -> int:
        """Close its stdin; its exit status."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        status = self.process.wait(30)
        self.process.stdout.close()
        return status


@contextmanager
def running(program: Path, prefix: Sequence[str] = ()) -> Iterator[Target]:
    target = Target(program, prefix)
    try:
        yield target
    finally:
        target.process.kill()
        target.process.wait()
        for stream in (target.process.stdin, target.process.stdout):
            if stream is not None and not stream.closed:
                stream.close()


@dataclass(slots=True)
class Region:
    """A mapping of the target, and which of its pages hold what, by index.

    populated: a page of the process's own is there. written: since the mark. vague: may be found
    too, for a reason that DirtyTracker's documentation gives. foreign: another process has put a
    page into the file behind it; the kernel may map it with any neighbour that is touched, and
    from then on it is as one that was read.
    """

    kind: str
    address: int
    pages: int
    populated: set[int] = field(default_factory=set)
    written: set[int] = field(default_factory=set)
    vague: set[int] = field(default_factory=set)
    foreign: set[int] = field(default_factory=set)
    readonly: bool = False

    def at(self, page: int) -> int:
        return self.address + page * PAGE

    def write(self, pages: Iterable[int]) -> None:
        for page in pages:
            if self.kind == "h":
                extent = page * PAGE // HUGE * (HUGE // PAGE)
                whole = set(range(extent, extent + HUGE // PAGE))
                if not self.populated & whole:  # the kernel may make a huge page of it
                    self.populated |= whole
                    self.vague |= whole
            self.populated.add(page)
            self.foreign.discard(page)
            self.written.add(page)

    def read(self, pages: Iterable[int]) -> None:
        if self.kind == "s":  # there is no zero page in shared memory
            new = set(pages) - self.populated
            self.populated |= new
            self.foreign -= new
            self.vague |= new

    def write_by_another(self, pages: Iterable[int]) -> None:
        if self.kind == "s":
            self.foreign |= set(pages) - self.populated

    def drop(self, first: int, count: int) -> None:
        """Of private memory only: shared memory stays in its file."""
        gone = set(range(first, first + count))
        self.populated -= gone
        self.written -= gone
        self.vague -= gone

    def mark(self) -> None:
        self.written.clear()
        self.vague.clear()


def found_in(pages: DirtyPages, region: Region) -> set[int]:
    """Indices of the region's pages that a scan has found."""
    end = region.address + region.pages * PAGE
    return {
        (at - region.address) // PAGE
        for address, length in pages.ranges
        for at in range(max(address, region.address), min(address + length, end), PAGE)
    }


def check(pages: DirtyPages, region: Region) -> None:
    found = found_in(pages, region)
    missed = region.written - found
    too_many = found - region.written - region.vague - region.foreign
    assert not missed, (region.kind, "missed", sorted(missed)[:8])
    assert not too_many, (region.kind, "too many", sorted(too_many)[:8])
