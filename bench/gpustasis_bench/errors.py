# SPDX-License-Identifier: Apache-2.0
"""What goes wrong in the programs of this package."""

from __future__ import annotations

from gpustasis.errors import CheckpointError


class BenchError(CheckpointError):
    """A measurement could not be made."""


class WrongMemoryError(BenchError):
    """A restored process does not hold what it held."""


class DemoError(CheckpointError):
    """The demo's program failed, or did not compute what it should have."""
