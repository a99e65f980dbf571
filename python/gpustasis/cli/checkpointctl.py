"""`checkpointctl gpustasis CHECKPOINT`: what `gpustasis inspect` shows."""

from __future__ import annotations

import sys
from typing import NoReturn

from gpustasis.cli.inspect import command
from gpustasis.errors import CheckpointError

_NAME = "checkpointctl gpustasis"


def run() -> NoReturn:
    """Exit as `gpustasis inspect` does."""
    try:
        command.main(prog_name=_NAME, standalone_mode=True)
    except CheckpointError as exc:
        print(f"{_NAME}: {exc}", file=sys.stderr)
        sys.exit(exc.exit_code)
    sys.exit(0)
