# SPDX-License-Identifier: Apache-2.0
"""What a supervisor needs of the kernel's privileges, said before a job runs for days."""

from __future__ import annotations

import os

from gpustasis.errors import UnsupportedError


def require_privileges() -> None:
    """Raises UnsupportedError that says what is missing."""
    if os.geteuid() != 0:
        raise UnsupportedError("criu needs root")
