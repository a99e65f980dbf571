"""NVIDIA's management library, for the one thing that the CUDA driver does not tell.

Source: nvml.h 12.8, nvmlInit_v2, nvmlSystemGetDriverVersion, nvmlShutdown.
"""

from __future__ import annotations

from typing import Any

import cffi

from cudackpt.errors import DriverError

DEFAULT_LIBRARY = "libnvidia-ml.so.1"
_VERSION_SIZE = 80  # NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE

_ffi = cffi.FFI()
_ffi.cdef(
    """
    int nvmlInit_v2(void);
    int nvmlShutdown(void);
    int nvmlSystemGetDriverVersion(char* version, unsigned int length);
    """
)


def driver_version(library: str = DEFAULT_LIBRARY) -> str:
    """The driver's version, "580.95.05". Raises DriverError if NVML is missing or refuses."""
    try:
        nvml: Any = _ffi.dlopen(library)
    except OSError as exc:
        reason = str(exc).split("  Additionally", 1)[0]  # cffi adds what else it tried
        raise DriverError(f"NVML cannot be loaded: {reason}") from exc
    _check(nvml.nvmlInit_v2(), "nvmlInit_v2")
    try:
        text = _ffi.new("char[]", _VERSION_SIZE)
        _check(nvml.nvmlSystemGetDriverVersion(text, _VERSION_SIZE), "nvmlSystemGetDriverVersion")
        version = _ffi.string(text)
    finally:
        nvml.nvmlShutdown()
    return version.decode("ascii", "replace") if isinstance(version, bytes) else version


def _check(code: int, what: str) -> None:
    if code != 0:
        raise DriverError(f"{what}: NVML error {code}", code)
