# SPDX-License-Identifier: Apache-2.0
"""The CUDA driver's checkpoint API: lock, checkpoint, restore and unlock another process.

Source: cuda.h 13.0, "CUDA Checkpointing" (driver 570 or newer has the calls). The driver answers
through a thread in the other process, so all but get_restore_thread_id wait for as long as that
process is stopped; there are no timeouts here but lock's.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeVar

from gpustasis.answering import ANSWER_S, answer_within
from gpustasis.declared import Declared
from gpustasis.errors import DriverError

DEFAULT_LIBRARY = "libcuda.so.1"
# For who only looks.
INIT_S = 30.0  # of cuInit: many GPUs that nobody uses take their time to wake up

NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED: the process does not use CUDA
_RESTORE_THREAD = re.compile(r"cuda([0-9a-f]{11})")  # two descriptor numbers of 22 bits
_NUMBER_BITS = 22

_DECLARATIONS = """
typedef struct {
    unsigned int timeoutMs;
    unsigned int reserved0;
    uint64_t reserved1[7];
} CUcheckpointLockArgs;
typedef struct { uint64_t reserved[8]; } CUcheckpointCheckpointArgs;
typedef struct {
    void* gpuPairs;
    unsigned int gpuPairsCount;
    unsigned char reserved[44];
    uint64_t reserved1;
} CUcheckpointRestoreArgs;
typedef struct { uint64_t reserved[8]; } CUcheckpointUnlockArgs;
typedef struct { unsigned char bytes[16]; } CUuuid;

int cuInit(unsigned int flags);
int cuDriverGetVersion(int* version);
int cuGetErrorName(int error, const char** text);
int cuGetErrorString(int error, const char** text);
int cuDeviceGetCount(int* count);
int cuDeviceGet(int* device, int ordinal);
int cuDeviceGetName(char* name, int size, int device);
int cuDeviceGetUuid_v2(CUuuid* uuid, int device);
int cuDeviceTotalMem_v2(size_t* bytes, int device);
int cuCheckpointProcessGetRestoreThreadId(int pid, int* tid);
int cuCheckpointProcessGetState(int pid, int* state);
int cuCheckpointProcessLock(int pid, CUcheckpointLockArgs* args);
int cuCheckpointProcessCheckpoint(int pid, CUcheckpointCheckpointArgs* args);
int cuCheckpointProcessRestore(int pid, CUcheckpointRestoreArgs* args);
int cuCheckpointProcessUnlock(int pid, CUcheckpointUnlockArgs* args);
"""

Answer = TypeVar("Answer")

_C = Declared(_DECLARATIONS)


class ProcessState(IntEnum):
    """CUprocessState; the last two since CUDA 13.4, while custom storage is in flight."""

    RUNNING = 0
    LOCKED = 1
    CHECKPOINTED = 2
    FAILED = 3
    CHECKPOINTING = 4
    RESTORING = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU as the driver lists it. uuid: "GPU-<hex>" as nvidia-smi prints; memory in bytes."""

    name: str
    uuid: str
    memory_size: int

    @property
    def emulated(self) -> bool:
        """It is one of our driver emulator's, which name themselves so."""
        return "emulat" in self.name.lower()


class Driver:
    """One loaded driver library, named `library`. Every method raises DriverError when the driver
    refuses."""

    def __init__(self, library: str = DEFAULT_LIBRARY) -> None:
        """Load it. Raises DriverError if it cannot be loaded."""
        self.library = library
        try:
            self._library: Any = _C.ffi.dlopen(library)
        except OSError as exc:
            reason = str(exc).split("  Additionally", 1)[0]  # cffi adds what else it tried
            raise DriverError(f"the CUDA driver cannot be loaded: {reason}") from exc

    def init(self) -> None:
        """cuInit: takes part in the GPUs. restore and the device queries need it."""
        self._check(self._function("cuInit")(0), "cuInit")

    def version(self) -> int:
        """The newest CUDA version it supports, 1000 * major + 10 * minor: 13000 is 13.0."""
        out = _C.ffi.new("int*")
        self._check(self._function("cuDriverGetVersion")(out), "cuDriverGetVersion")
        return int(out[0])

    def has_checkpoint_api(self) -> bool:
        """Whether the library exports the checkpoint calls (driver 570 or newer)."""
        try:
            self._function("cuCheckpointProcessLock")
        except DriverError:
            return False
        return True

    def devices(self) -> tuple[Device, ...]:
        """The GPUs, in the driver's order. Needs init."""
        count = _C.ffi.new("int*")
        self._check(self._function("cuDeviceGetCount")(count), "cuDeviceGetCount")
        return tuple(self._device(ordinal) for ordinal in range(count[0]))

    def get_restore_thread_id(self, pid: int) -> int:
        """The thread of `pid` that answers the driver. Does not wait for the process."""
        out = _C.ffi.new("int*")
        self._call("GetRestoreThreadId", pid, out)
        return int(out[0])

    def get_state(self, pid: int) -> ProcessState:
        """What state `pid` is in. Waits for as long as its restore thread is stopped."""
        out = _C.ffi.new("int*")
        self._call("GetState", pid, out)
        try:
            return ProcessState(out[0])
        except ValueError as exc:
            raise DriverError(f"process {pid} is in a state unknown here: {out[0]}") from exc

    def lock(self, pid: int, timeout_ms: int) -> None:
        """RUNNING to LOCKED: new GPU work waits, submitted work finishes within timeout_ms.

        timeout_ms: 1..2**32-1; 0, with which the driver waits for ever, raises ValueError.
        """
        if not 0 < timeout_ms < 1 << 32:
            raise ValueError(f"timeout_ms is {timeout_ms}, not in 1..2**32-1")
        args = _C.ffi.new("CUcheckpointLockArgs*", {"timeoutMs": timeout_ms})  # the rest is zero
        self._call("Lock", pid, args)

    def checkpoint(self, pid: int) -> None:
        """LOCKED to CHECKPOINTED: GPU memory goes to fresh host memory of `pid`."""
        self._call("Checkpoint", pid, _C.ffi.new("CUcheckpointCheckpointArgs*"))

    def restore(self, pid: int) -> None:
        """CHECKPOINTED to LOCKED, onto the same GPUs. Needs init."""
        self._call("Restore", pid, _C.ffi.new("CUcheckpointRestoreArgs*"))

    def unlock(self, pid: int) -> None:
        """LOCKED to RUNNING."""
        self._call("Unlock", pid, _C.ffi.new("CUcheckpointUnlockArgs*"))

    def error_name(self, code: int) -> str:
        """CUDA_ERROR_ILLEGAL_STATE, say; "CUDA error 999999" if the driver does not know it."""
        return self._text("cuGetErrorName", code) or f"CUDA error {code}"

    def _device(self, ordinal: int) -> Device:
        handle = _C.ffi.new("int*")
        self._check(self._function("cuDeviceGet")(handle, ordinal), "cuDeviceGet")
        name = _C.ffi.new("char[256]")
        self._check(self._function("cuDeviceGetName")(name, 256, handle[0]), "cuDeviceGetName")
        uuid = _C.ffi.new("CUuuid*")
        self._check(self._function("cuDeviceGetUuid_v2")(uuid, handle[0]), "cuDeviceGetUuid_v2")
        size = _C.ffi.new("size_t*")
        self._check(self._function("cuDeviceTotalMem_v2")(size, handle[0]), "cuDeviceTotalMem_v2")
        digits = bytes(_C.ffi.buffer(uuid)).hex()
        groups = digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]
        return Device(
            name=_string(name),
            uuid="GPU-" + "-".join(groups),
            memory_size=int(size[0]),
        )

    def _call(self, name: str, pid: int, argument: object) -> None:
        function = self._function(f"cuCheckpointProcess{name}")
        if name != "GetRestoreThreadId":  # which opens nothing
            _require_pipes_in_thread_names(pid)
        self._check(function(pid, argument), f"{name} on process {pid}")

    def _function(self, name: str) -> Any:
        try:
            return getattr(self._library, name)
        except AttributeError as exc:
            raise DriverError(f"this CUDA driver has no {name}; 570 or newer is needed") from exc

    def _check(self, code: int, what: str) -> None:
        if code != 0:
            text = self._text("cuGetErrorString", code)
            raise DriverError(f"{what}: {self.error_name(code)} ({text or 'no text'})", code)

    def _text(self, function: str, code: int) -> str:
        out = _C.ffi.new("const char**")
        if self._function(function)(code, out) != 0 or out[0] == _C.ffi.NULL:
            return ""
        return _string(out[0])


def list_devices_within(driver: Driver) -> tuple[Device, ...]:
    """The GPUs, for who only looks. Raises DriverError, TimedOutError among them."""
    answer_within(INIT_S, "cuInit", driver.init)
    return answer_within(ANSWER_S, "the list of GPUs", driver.devices)


def _require_pipes_in_thread_names(pid: int) -> None:
    """Refuse a process that names a thread so that the driver would open something else than a
    pipe.

    The driver takes two descriptor numbers out of the name of its restore thread and opens them
    through /proc with our rights: it would write to a file that the process may only read. As in
    src/cuda_plugin/proc.cpp.
    """
    for comm in Path(f"/proc/{pid}/task").glob("*/comm"):
        for number in _descriptors_in(comm):
            if not _opens_no_file(pid, number):
                raise DriverError(
                    f"process {pid} names a thread as the driver names its own, and descriptor "
                    f"{number} of that name is not a pipe: the driver would open a file of the "
                    "process; nothing is asked of the driver"
                )


def _descriptors_in(comm: Path) -> tuple[int, ...]:
    """What the name in that file gives; nothing if it is no restore thread's."""
    try:
        match = _RESTORE_THREAD.fullmatch(comm.read_text(errors="replace").rstrip("\n"))
    except (FileNotFoundError, ProcessLookupError):
        return ()  # the thread has ended
    if match is None:
        return ()
    value = int(match[1], 16)
    return value >> _NUMBER_BITS, value & ((1 << _NUMBER_BITS) - 1)


def _opens_no_file(pid: int, number: int) -> bool:
    try:
        target = os.readlink(f"/proc/{pid}/fd/{number}")
    except (FileNotFoundError, ProcessLookupError):
        return True  # the driver finds nothing there, either
    return target.startswith(("pipe:[", "socket:[", "anon_inode:"))


def _string(chars: Any) -> str:
    text = _C.ffi.string(chars)
    return text.decode("utf-8", "replace") if isinstance(text, bytes) else text
