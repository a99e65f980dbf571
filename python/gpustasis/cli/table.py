"""Tables: as wide as the terminal there, and one line to a row elsewhere, for other programs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

_WIDE = 1 << 16  # characters; no row is that long


def print_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows under their titles on stdout; cells are plain text."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDE)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table)
