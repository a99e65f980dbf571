"""What a person sees while criu works: a line on the terminal, nothing elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from gpustasis.criu.log import phase_of
from gpustasis.criu.run import OnLine

_REFRESH_S = 0.25
_PHASE_WIDTH = 70  # characters


@contextmanager
def criu_progress(title: str, images: Path) -> Iterator[OnLine]:
    """Show title, phase and the size of `images`; yields what to call with each log line."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda line: None
        return
    with console.status(escape(title)) as status:
        shown = 0.0

        def on_line(line: str) -> None:
            nonlocal shown
            phase = phase_of(line)
            if phase is None or time.monotonic() - shown < _REFRESH_S:
                return
            shown = time.monotonic()
            size_mib = directory_size(images) / 2**20
            text = f"{title}: {phase[:_PHASE_WIDTH]} ({size_mib:.1f} MiB of images)"
            status.update(escape(text))

        yield on_line


def directory_size(directory: Path) -> int:
    """Bytes of the files in `directory`, not below it; files that vanish meanwhile count 0."""
    total = 0
    for path in directory.iterdir():
        try:
            total += path.lstat().st_size
        except FileNotFoundError:
            continue
    return total
