# SPDX-License-Identifier: Apache-2.0
"""C declarations of a library, which cffi parses when they are first needed: that takes a tenth of
a second, and most commands that import them call nothing of the library."""

from __future__ import annotations

import threading
from typing import Any


class Declared:
    """May be used from several threads."""

    def __init__(self, declarations: str) -> None:
        self._declarations = declarations
        self._parsing = threading.RLock()  # also for a signal's handler
        self._ffi: Any = None

    @property
    def ffi(self) -> Any:
        """A cffi.FFI, always the same: what one FFI makes is of no use to another."""
        with self._parsing:
            if self._ffi is None:
                import cffi

                ffi = cffi.FFI()
                ffi.cdef(self._declarations)
                self._ffi = ffi
            return self._ffi
