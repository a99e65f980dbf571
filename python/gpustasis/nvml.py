# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's management library, for what the CUDA driver does not tell.

Source: nvml.h 12.8, nvmlInit_v2, nvmlSystemGetDriverVersion, nvmlDeviceGetMemoryInfo,
nvmlDeviceGetUtilizationRates, nvmlDeviceGetPersistenceMode, nvmlShutdown.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from gpustasis.answering import ANSWER_S, TimedOutError, answer_within
from gpustasis.declared import Declared
from gpustasis.errors import DriverError

DEFAULT_LIBRARY = "libnvidia-ml.so.1"
_VERSION_SIZE = 80  # NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE

_left_behind: list[threading.Event] = []  # of what was asked and not waited for
Answer = TypeVar("Answer")

_C = Declared(
    """
    int nvmlInit_v2(void);
    int nvmlShutdown(void);
    int nvmlSystemGetDriverVersion(char* version, unsigned int length);
    typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
    int nvmlDeviceGetCount_v2(unsigned int* count);
    int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void** device);
    int nvmlDeviceGetMemoryInfo(void* device, nvmlMemory_t* memory);
    typedef struct { unsigned int gpu, memory; } nvmlUtilization_t;
    int nvmlDeviceGetUtilizationRates(void* device, nvmlUtilization_t* utilization);
    int nvmlDeviceGetPersistenceMode(void* device, int* mode);
    """
)


def driver_version(library: str = DEFAULT_LIBRARY) -> str:
    """The driver's version, "580.95.05". Raises DriverError if NVML is missing or refuses."""
    with _loaded(library) as nvml:
        text = _C.ffi.new("char[]", _VERSION_SIZE)
        _check(nvml.nvmlSystemGetDriverVersion(text, _VERSION_SIZE), "nvmlSystemGetDriverVersion")
        version = _C.ffi.string(text)
    return version.decode("ascii", "replace") if isinstance(version, bytes) else version


def persistence_mode(library: str = DEFAULT_LIBRARY) -> bool:
    """Whether the driver stays loaded while nobody uses the GPUs of this host: for all of them.
    Raises DriverError as driver_version."""
    name = "nvmlDeviceGetPersistenceMode"

    def ask() -> bool:
        with _loaded(library) as nvml:
            modes = []
            call = _function(nvml, name)
            for device in _devices(nvml):
                mode = _C.ffi.new("int*")
                _check(call(device, mode), name)
                modes.append(mode[0] != 0)
        return bool(modes) and all(modes)

    return _answered(ask)


def memory_used(library: str = DEFAULT_LIBRARY) -> int:
    """Bytes in use on all GPUs of this host. Raises DriverError as driver_version."""

    def ask() -> int:
        used = 0
        with _loaded(library) as nvml:
            for device in _devices(nvml):
                memory: Any = _C.ffi.new("nvmlMemory_t*")
                _check(nvml.nvmlDeviceGetMemoryInfo(device, memory), "nvmlDeviceGetMemoryInfo")
                used += int(memory.used)
        return used

    return _answered(ask)


def busiest(library: str = DEFAULT_LIBRARY) -> float:
    """The part of the last moment (1/6 s to 1 s) in which the busiest GPU of this host had work;
    one of which that cannot be told, as of those with MIG, does not count. Raises DriverError as
    driver_version, and if it can be told of none."""
    name = "nvmlDeviceGetUtilizationRates"

    def ask() -> float:
        found: list[float] = []
        wrong: DriverError | None = None
        with _loaded(library) as nvml:
            for device in _devices(nvml):
                busy: Any = _C.ffi.new("nvmlUtilization_t*")
                call = _function(nvml, name)
                try:
                    _check(call(device, busy), name)
                except DriverError as exc:
                    wrong = exc
                else:
                    found.append(int(busy.gpu) / 100)
        if wrong is not None and not found:
            raise wrong
        return max(found, default=0.0)

    return _answered(ask)


def _answered(ask: Callable[[], Answer]) -> Answer:
    """What it gives. A GPU that has failed may hold NVML up for ever: then nothing more is asked
    before it has answered. Raises DriverError."""
    if not all(one.is_set() for one in _left_behind):
        raise DriverError("NVML: it has not answered yet what it was asked before")
    is_over = threading.Event()

    def call() -> Answer:
        try:
            return ask()
        finally:
            is_over.set()

    try:
        return answer_within(ANSWER_S, "NVML", call)
    except TimedOutError:
        _left_behind[:] = [is_over]
        raise


def _function(nvml: Any, name: str) -> Any:
    try:
        return getattr(nvml, name)
    except AttributeError as exc:  # by cffi: the library has no such function
        raise DriverError(f"{name}: this NVML has none") from exc


def _devices(nvml: Any) -> Iterator[Any]:
    count = _C.ffi.new("unsigned int*")
    _check(nvml.nvmlDeviceGetCount_v2(count), "nvmlDeviceGetCount_v2")
    for index in range(count[0]):
        device = _C.ffi.new("void**")
        name = "nvmlDeviceGetHandleByIndex_v2"
        _check(nvml.nvmlDeviceGetHandleByIndex_v2(index, device), name)
        yield device[0]


@contextmanager
def _loaded(library: str) -> Iterator[Any]:
    try:
        nvml: Any = _C.ffi.dlopen(library)
    except OSError as exc:
        reason = str(exc).split("  Additionally", 1)[0]  # cffi adds what else it tried
        raise DriverError(f"NVML cannot be loaded: {reason}") from exc
    _check(nvml.nvmlInit_v2(), "nvmlInit_v2")
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _check(code: int, what: str) -> None:
    if code != 0:
        raise DriverError(f"{what}: NVML error {code}", code)
