# SPDX-License-Identifier: Apache-2.0
"""Checkpoint and restore GPU workloads, transparently, with CRIU: the public Python API.

The names in __all__ are stable; docs/api.md describes them. They are imported when they are first
used: `import gpustasis` alone costs next to nothing.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as typing's; the OCI hook, which each container waits for, imports this
if TYPE_CHECKING:
    from gpustasis.api import (
        Checkpoint,
        CriuOptions,
        RestoreOptions,
        checkpoint,
        open,
        prune,
        recover,
        restore,
    )
    from gpustasis.criu.run import Run
    from gpustasis.criu.statistics import Statistics
    from gpustasis.errors import (
        ArchiveError,
        CheckpointError,
        CriuError,
        DriverError,
        ImageError,
        UnsupportedError,
    )
    from gpustasis.image.difference import Difference
    from gpustasis.image.flatten import Flattened
    from gpustasis.image.inspection import Inspection
    from gpustasis.image.prune import Outcome as Pruned
    from gpustasis.image.requirements import RequirementsView
    from gpustasis.image.verification import Verification
    from gpustasis.recovery import Recovery

__version__ = "0.1.0"

__all__ = [
    "ArchiveError",
    "Checkpoint",
    "CheckpointError",
    "CriuError",
    "CriuOptions",
    "Difference",
    "DriverError",
    "Flattened",
    "ImageError",
    "Inspection",
    "Pruned",
    "Recovery",
    "RequirementsView",
    "RestoreOptions",
    "Run",
    "Statistics",
    "UnsupportedError",
    "Verification",
    "__version__",
    "checkpoint",
    "open",
    "prune",
    "recover",
    "restore",
]

# What a function of the API returns, where it is not the API's own.
_HOMES = {
    "Difference": "image.difference",
    "Flattened": "image.flatten",
    "Inspection": "image.inspection",
    "Pruned": "image.prune",
    "Recovery": "recovery",
    "RequirementsView": "image.requirements",
    "Run": "criu.run",
    "Statistics": "criu.statistics",
    "Verification": "image.verification",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    module = "errors" if name.endswith("Error") else _HOMES.get(name, "api")
    found = importlib.import_module(f"gpustasis.{module}")
    return globals().setdefault(name, getattr(found, "Outcome" if name == "Pruned" else name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
