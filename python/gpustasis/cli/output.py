# SPDX-License-Identifier: Apache-2.0
"""Everything that the command line says: the one place where text leaves the program.

Whatever is written here for people goes through gpustasis.text.safe: names, paths, logs and
messages of others reach the terminal with nothing in them that moves the cursor, changes colours
or hides text. No other module prints (tests/architecture holds them to it). JSON needs none of
that: it escapes by itself.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from gpustasis.errors import UnsupportedError
from gpustasis.text import safe, safe_lines

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID
    from rich.tree import Tree

# Of every JSON document. A key that is there keeps its meaning; new ones may come.
JSON_VERSION = 1

_WIDE = 1 << 16  # columns of a list, where no terminal says how many there are: no row is that long
_PAGE = 160  # columns of a page, there
_REFRESH_S = 0.25
_STATE = "gpustasis.output"

Row = Sequence[object]


# For people


def say(text: object, *, mark: str = "", colour: str | None = None) -> None:
    """A line on stdout; nothing with --json. mark: a word of ours before it, in colour."""
    if not json_wanted():
        click.echo(f"{click.style(safe(mark), fg=colour)}{safe(text)}")


def teller() -> Callable[[object], None]:
    """As say, for a program that goes on, whether or not anybody reads it still, and for each of
    its threads: whether --json was given is known to the one that calls this alone."""
    is_quiet = json_wanted()

    def tell(text: object) -> None:
        if is_quiet:
            return
        try:
            click.echo(safe(text))
        except BrokenPipeError:
            drop()
        except (OSError, ValueError):
            return

    return tell


def warn(text: object) -> None:
    """A message on stderr, with --json too."""
    click.echo(safe_lines(text), err=True)


def exact(text: str) -> None:
    """Lines on stdout that a shell or another program reads. Raises UnsupportedError if they
    cannot be shown as they are."""
    if json_wanted():
        return
    for line in text.split("\n"):
        if safe(line) != line:
            raise UnsupportedError(f"{safe(line)!r} cannot be printed as it is; use --json")
    click.echo(text)


def table(titles: Sequence[str], rows: Iterable[Row]) -> None:
    """Rows under their titles; where there is no terminal one line to a row, for other programs."""
    grid(titles, [rows], page=False, title="", right=False)


def facts(title: str, rows: Iterable[tuple[str, object]], note: str = "") -> None:
    """Names and what there is to say of them."""
    if not json_wanted():
        _console(_PAGE).print(_facts(title, rows, note))


def grid(
    titles: Sequence[str],
    sections: Iterable[Iterable[Row]],
    *,
    title: str,
    page: bool = True,
    right: bool = True,
) -> None:
    """A table with ruled sections. right: all columns but the first hold numbers."""
    if json_wanted():
        return
    from rich.table import Table

    box: dict[str, Any] = {} if page else {"box": None, "pad_edge": False, "header_style": "bold"}
    made = Table(title=_plain(title) if title else None, title_justify="left", **box)
    for number, name in enumerate(titles):
        made.add_column(name, justify="right" if right and number else "left", overflow="fold")
    for section in sections:
        for row in section:
            made.add_row(*map(_plain, row))
        made.add_section()
    _console(_PAGE if page else _WIDE).print(made)


@dataclasses.dataclass(slots=True)
class Node:
    """A line of a tree, and those below it."""

    text: str
    below: list[Node] = dataclasses.field(default_factory=list)

    def add(self, text: str) -> Node:
        """A further line below this one."""
        self.below.append(Node(text))
        return self.below[-1]


def tree(root: Node) -> None:
    """A tree of lines."""
    if not json_wanted():
        _console(_PAGE).print(_tree(root))


# While something takes its time: on a terminal's stderr, nothing elsewhere


@contextmanager
def status(title: str) -> Iterator[Callable[[Callable[[], str]], None]]:
    """Show what is being done; yields what to call, as often as one likes, with what makes a new
    text: it is only asked when one is due."""
    console = _console(stderr=True)
    if not console.is_terminal:
        yield lambda make: None
        return
    with console.status(_plain(title)) as shown:
        last = 0.0

        def update(make: Callable[[], str]) -> None:
            nonlocal last
            if time.monotonic() - last >= _REFRESH_S:
                last = time.monotonic()
                shown.update(_plain(make()))

        yield update


@contextmanager
def bars(*, count: bool = False) -> Iterator[Callable[[str, int, int | None], None]]:
    """A bar for each name it is called with: name, done, and in all if that is known.

    count: of pieces; else of bytes.
    """
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TransferSpeedColumn,
    )

    console = _console(stderr=True)
    figures = (
        [MofNCompleteColumn(), TimeElapsedColumn()]
        if count
        else [DownloadColumn(binary_units=True), TransferSpeedColumn()]
    )
    known: dict[str, TaskID] = {}
    with Progress(
        *(TextColumn("{task.description}", markup=False), BarColumn(), *figures),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as shown:

        def update(name: str, done: int, total: int | None) -> None:
            if name not in known:
                known[name] = shown.add_task(safe(name), total=total)
            shown.update(known[name], completed=done)

        yield update


@contextmanager
def live() -> Iterator[Callable[[str, Iterable[tuple[str, object]], str], None]]:
    """Facts that change, on a terminal's stdout; yields what to call with the arguments of
    facts."""
    from rich.live import Live

    console = _console()
    with Live(console=console, auto_refresh=False, transient=True) as shown:

        def update(title: str, rows: Iterable[tuple[str, object]], note: str) -> None:
            if console.is_terminal and not json_wanted():
                shown.update(_facts(title, rows, note), refresh=True)

        yield update


# For programs


@dataclasses.dataclass(frozen=True, slots=True)
class Ending:
    """How a command ended that did not do its work. status: the exit status. name: of the
    exception. details: of CheckpointError.details()."""

    status: int
    name: str
    message: str
    details: dict[str, object] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(slots=True)
class _Json:
    command: str
    answer: dict[str, object] = dataclasses.field(default_factory=dict)
    written: bool = False


def want_json(command: str) -> None:
    """From now on the command that runs answers in JSON."""
    click.get_current_context().meta[_STATE] = _Json(command)


def json_wanted() -> bool:
    """Whether the command that runs answers in JSON."""
    return _json() is not None


def answer(fields: object, show: Callable[[], object] = lambda: None) -> None:
    """What the command has found. With --json `fields`, a mapping or a dataclass, is printed when
    the command has ended, with the error if there is one; else `show` shows it to a person."""
    state = _json()
    if state is None:
        show()
    else:
        state.answer |= _mapping(fields)


def stream(fields: Mapping[str, object]) -> None:
    """With --json, one of several documents, on a line of its own."""
    if (state := _json()) is not None:
        _write(_document(state.command, fields), indent=None)
        state.written = True


def finish() -> None:
    """With --json, print the document of a command that has done its work."""
    state = _json()
    if state is not None and not state.written:
        _write(_document(state.command, state.answer), indent=2)


def fail(ending: Ending, command: str | None = None) -> bool:
    """With --json, print the document of a command that has failed, with what it found before
    that; whether it did. command: of one that did not come so far as to want JSON."""
    state = _json() if command is None else _Json(command)
    if state is None:
        return False
    error = {"code": ending.status, "name": ending.name, "message": ending.message}
    fields = state.answer | {"error": error | ending.details}
    _write(_document(state.command, fields), indent=None if state.written else 2)
    return True


def _document(command: str, fields: Mapping[str, object]) -> dict[str, object]:
    return {"version": JSON_VERSION, "command": command, **fields}


def _json() -> _Json | None:
    context = click.get_current_context(silent=True)
    state: _Json | None = None if context is None else context.meta.get(_STATE)
    return state


def _write(document: Mapping[str, object], *, indent: int | None) -> None:
    click.echo(json.dumps(document, indent=indent, default=_as_json))


def _mapping(fields: object) -> dict[str, object]:
    if dataclasses.is_dataclass(fields) and not isinstance(fields, type):
        return dataclasses.asdict(fields)
    assert isinstance(fields, Mapping)
    return dict(fields)


def _as_json(value: object) -> object:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, datetime.datetime):
        return value.isoformat()
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, frozenset | set):
        return sorted(value)
    return _mapping(value)


# What other packages write


class _Formatter(logging.Formatter):
    """A record is one line, and a traceback below it."""

    def format(self, record: logging.LogRecord) -> str:
        return safe_lines(super().format(record))


def start_log(level: int) -> None:
    """Log records and Python's warnings go to stderr from now on."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.captureWarnings(True)


def prepare_streams() -> None:
    """What a stream's encoding cannot write is written as an escape."""
    for stream_ in (sys.stdout, sys.stderr):
        if hasattr(stream_, "reconfigure"):
            stream_.reconfigure(errors="backslashreplace")


def flush() -> None:
    """Write what is still to be written. Raises BrokenPipeError if nobody reads it."""
    sys.stdout.flush()


def drop() -> None:
    """Nobody reads on: what is still to be written at the exit goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


# rich


def _plain(text: object) -> str:
    """Safe, and nothing in it is rich's markup."""
    from rich.markup import escape

    return escape(safe(text))


def _console(width: int | None = None, *, stderr: bool = False) -> Console:
    """width: in columns, where no terminal says how many there are."""
    from rich.console import Console

    class Terminal(Console):
        def on_broken_pipe(self) -> None:
            raise  # noqa: PLE0704 - the error at hand: main() knows what to do

    console = Terminal(stderr=stderr, highlight=False)
    if not console.is_terminal and width is not None:
        console.width = width
    return console


def _facts(title: str, rows: Iterable[tuple[str, object]], note: str) -> Any:
    from rich.table import Table

    made = Table(
        title=_plain(title), show_header=False, title_justify="left", caption=_plain(note) or None
    )
    for name, text in rows:
        made.add_row(_plain(name), _plain(text))
    return made


def _tree(node: Node) -> Tree:
    from rich.tree import Tree

    made = Tree(_plain(node.text))
    made.children = [_tree(below) for below in node.below]
    return made
