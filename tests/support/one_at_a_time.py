# SPDX-License-Identifier: Apache-2.0
"""What test processes of one machine do one after the other."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def turn(directory: Path) -> Iterator[None]:
    """One at a time for each directory, which stays as it is. Not to be nested: it would wait for
    itself."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
