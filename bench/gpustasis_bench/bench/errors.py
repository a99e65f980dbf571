"""What goes wrong in a benchmark."""

from __future__ import annotations

from gpustasis.errors import CheckpointError


class BenchError(CheckpointError):
    """A measurement could not be made."""


class WrongMemoryError(BenchError):
    """A restored process does not hold what it held."""
