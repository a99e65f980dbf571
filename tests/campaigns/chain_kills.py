# SPDX-License-Identifier: Apache-2.0
"""flatten and prune are killed with SIGKILL at any of their system calls.

After a kill every checkpoint is whole or gone, and where a flattened copy should come there is
nothing, or all of it. What is half done is in nobody's way: a second run does the rest.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

from campaigns.tally import Tally
from gpustasis._core import read_manifest
from support.chains import contents, is_whole, make_chain, make_link, memory_of

_KILLED = 137
_MARGIN = 60  # system calls; how many a start takes is not always the same
_CHAIN = 3


def run_flatten(killer: Path, scratch: Path, random: Random, count: int) -> Tally:
    tally = Tally()
    store = scratch / "flatten-store"
    store.mkdir()
    source = make_chain(store, _CHAIN)[-1]
    (source / "dump.log").write_text("a log\n")
    expected = contents(source)
    out = scratch / "flat"
    words = ["flatten", str(source), "-o", str(out)]
    window = _Window(killer, scratch, words, lambda: shutil.rmtree(out))
    for number in window.numbers(random, count):
        tally.counts["trials"] += 1
        try:
            killed = window.run(number)
            tally.counts["killed" if killed else "had ended"] += 1
            part = scratch / ".flat.part"
            tally.counts["the copy was there"] += out.exists()
            _require_nothing_or_all(out, expected)
            if (part / "inventory.img").exists():
                assert is_whole(part), "an unfinished copy could be restored"
            assert is_whole(source), "the original was damaged"
            if not out.exists():
                assert window.run(0) is False
            _require_nothing_or_all(out, expected)
            assert out.exists(), "a second run did not make the copy"
            assert not part.exists(), "something is left of the first run"
        except AssertionError as failure:
            tally.failures.append(f"killed at system call {number}: {failure}")
        for path in (out, scratch / ".flat.part"):
            shutil.rmtree(path, ignore_errors=True)
    shutil.rmtree(store)
    return tally


def run_prune(killer: Path, scratch: Path, random: Random, count: int) -> Tally:
    tally = Tally()
    model = scratch / "prune-model"
    model.mkdir()
    for length in (2, 1):
        _add_chain(model, length)
    store = scratch / "prune-store"
    words = ["prune", str(store), "--keep-last", "1"]

    def begin_anew() -> None:
        shutil.rmtree(store, ignore_errors=True)
        shutil.copytree(model, store, symlinks=True)

    begin_anew()
    stays = {path.name for path in store.iterdir() if path.name.startswith("2")}
    window = _Window(killer, scratch, words, begin_anew)
    for number in window.numbers(random, count):
        tally.counts["trials"] += 1
        begin_anew()
        try:
            killed = window.run(number)
            tally.counts["killed" if killed else "had ended"] += 1
            left = {path.name for path in store.iterdir() if not path.name.startswith(".")}
            tally.counts["some were gone"] += left != {path.name for path in model.iterdir()}
            assert stays <= left, f"gone: {stays - left}"
            for name in sorted(left):
                assert is_whole(store / name), f"{name} is no longer whole"
            assert window.run(0) is False
            found = {path.name for path in store.iterdir()}
            assert found == stays, f"a second run left {found}"
        except AssertionError as failure:
            tally.failures.append(f"killed at system call {number}: {failure}")
    shutil.rmtree(store)
    shutil.rmtree(model)
    return tally


def _add_chain(store: Path, length: int) -> None:
    """A chain of its own: its names begin with a number, later ones with a higher one."""
    number = 1 + len({path.name[0] for path in store.iterdir()})
    parent = None
    for link in range(length + 1):
        directory = store / f"{number}-{link}"
        words = ["A", "b", "0", *(f"C{number}{k}" for k in range(link + 1))]
        taken = 1_800_000_000.0 + 100 * number + link
        make_link(directory, {7: memory_of(words)}, parent=parent, taken=taken)
        parent = directory


def _require_nothing_or_all(out: Path, expected: dict[int, bytes]) -> None:
    if not out.exists():
        return
    assert is_whole(out), "the copy is damaged"
    assert (out / "inventory.img").exists(), "the copy lacks a file"
    assert read_manifest(out).chain_length == 0
    assert contents(out) == expected, "the copy has another content"


class _Window:
    """The system calls of a command that are its own work, not the start of Python."""

    def __init__(
        self, killer: Path, scratch: Path, words: Sequence[str], begin_anew: Callable[[], None]
    ) -> None:
        self._killer, self._scratch, self._words = killer, scratch, list(words)
        assert self._run([words[0], "--help"], 0) is False
        first = self._calls()
        assert self.run(0) is False
        self._first, self._last = max(1, first - _MARGIN), self._calls() + _MARGIN
        begin_anew()

    def numbers(self, random: Random, count: int) -> list[int]:
        """Spread over the window."""
        width = self._last - self._first
        return [
            self._first + int(random.uniform(index / count, (index + 1) / count) * width)
            for index in range(count)
        ]

    def run(self, number: int) -> bool:
        """Run the command, to be killed at that call; whether it was."""
        return self._run(self._words, number)

    def _run(self, words: list[str], number: int) -> bool:
        command = [sys.executable, "-m", "gpustasis", *words]
        ended = subprocess.run(
            [self._killer, self._scratch / "system-calls", str(number), "o", "", *command],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert ended.returncode in (0, _KILLED), ended.stderr
        return ended.returncode == _KILLED

    def _calls(self) -> int:
        return int((self._scratch / "system-calls").read_text())
