"""`checkpointctl cudackpt CHECKPOINT`: what `cudackpt inspect` shows."""

from __future__ import annotations

import sys
from typing import NoReturn

from cudackpt.cli.inspect import command
from cudackpt.errors import CheckpointError

_NAME = "checkpointctl cudackpt"


def run() -> NoReturn:
    """Exit as `cudackpt inspect` does."""
    try:
        command.main(prog_name=_NAME, standalone_mode=True)
    except CheckpointError as exc:
        print(f"{_NAME}: {exc}", file=sys.stderr)
        sys.exit(exc.exit_code)
    sys.exit(0)
