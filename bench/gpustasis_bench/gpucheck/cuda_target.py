# SPDX-License-Identifier: Apache-2.0
"""A CUDA process to experiment on, with GPU memory whose content it can prove.

`python -m gpustasis_bench.gpucheck.cuda_target KIND --bytes N --folder DIR`: it fills N bytes of
GPU memory with known words, holds what KIND says besides, writes DIR/mark and works until it is
killed. DIR/counter is the number of its rounds. At SIGUSR1 it looks at all its memory and writes
DIR/verdict: "intact N bytes", or what is wrong. `CudaTarget` in `cuda_process` is its other end.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KINDS = (
    "plain",
    "managed",
    "vmm",
    "pool",
    "registered",
    "pinned",
    "ipc exporter",
    "ipc importer",
    "kernel",
    "sync",
)

PIECE = 2 << 20  # bytes that are filled with one word
EXTRA = 64 << 20  # bytes of the kind's own memory, at most
CHUNK = 256 << 20  # bytes of one allocation, at most

_LOOK = 4096  # bytes that are looked at in each round
_ROUND_SECONDS = 0.02
_SYNC_SECONDS = 0.001
_EXIT_CUDA = 3

# Spins until that many nanoseconds have passed.
_SPIN = b"""
.version 7.0
.target sm_75
.address_size 64
.visible .entry spin(.param .u64 nanoseconds)
{
    .reg .pred %p<2>;
    .reg .b64 %rd<5>;
    ld.param.u64 %rd1, [nanoseconds];
    mov.u64 %rd2, %globaltimer;
again:
    mov.u64 %rd3, %globaltimer;
    sub.u64 %rd4, %rd3, %rd2;
    setp.lt.u64 %p1, %rd4, %rd1;
    @%p1 bra again;
    ret;
}
\0"""

_Pointer = ctypes.c_uint64
_Size = ctypes.c_size_t


class CudaError(Exception):
    """A CUDA call was refused; the message is its name and the error's."""


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * 64),)


class _AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp, with its location in place."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location_type", ctypes.c_int),
        ("location_id", ctypes.c_int),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_uint8 * 8),
    )


class _AccessDescription(ctypes.Structure):
    _fields_ = (
        ("location_type", ctypes.c_int),
        ("location_id", ctypes.c_int),
        ("flags", ctypes.c_int),
    )


class Cuda:
    """libcuda, with the first GPU's primary context current."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuInit", ctypes.c_uint(0))
        self.call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(0))
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *arguments: Any) -> None:
        """Call it. Raises CudaError if there is none or it is refused."""
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise CudaError(f"{name}: this driver has none") from None
        result = function(*arguments)
        if result != 0:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(ctypes.c_int(result), ctypes.byref(text))
            error = text.value.decode("ascii") if text.value else f"error {result}"
            raise CudaError(f"{name}: {error}")

    def allocate(self, size: int) -> int:
        """The address of `size` bytes more."""
        pointer = _Pointer()
        self.call("cuMemAlloc_v2", ctypes.byref(pointer), _Size(size))
        return pointer.value

    def fill(self, address: int, word: int, size: int) -> None:
        """Set `size` bytes at `address` to a 32-bit word, again and again."""
        count = _Size(size // 4)
        self.call("cuMemsetD32_v2", _Pointer(address), ctypes.c_uint(word), count)


@dataclass(frozen=True, slots=True)
class Piece:
    """PIECE bytes at `address` that are to hold `word`. is_host: of the CPU's memory."""

    address: int
    word: int
    is_host: bool = False

    def content(self, size: int = PIECE) -> bytes:
        """What its first `size` bytes are to be."""
        return self.word.to_bytes(4, "little") * (size // 4)


class Memory:
    """All pieces that the process answers for."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._pieces: list[Piece] = []
        self._copy = bytearray(PIECE)
        self._copy_address = (ctypes.c_char * PIECE).from_buffer(self._copy)
        self._scratch = cuda.allocate(PIECE)

    def word(self) -> int:
        """The next piece's word: another one for each, and never 0."""
        return (0x9E3779B1 * (len(self._pieces) + 1)) & 0xFFFFFFFF | 1

    def fill_gpu(self, address: int, size: int, zero_percent: int = 0) -> None:
        """Write `size` bytes of GPU memory, and answer for them."""
        for offset in range(0, size, PIECE):
            word = 0 if len(self._pieces) % 100 < zero_percent else self.word()
            self._cuda.fill(address + offset, word, PIECE)
            self._pieces.append(Piece(address + offset, word))
        self._cuda.call("cuCtxSynchronize")

    def fill_host(self, address: int, size: int) -> None:
        """Write `size` bytes of host memory with the CPU, and answer for them."""
        for offset in range(0, size, PIECE):
            piece = Piece(address + offset, self.word(), is_host=True)
            ctypes.memmove(piece.address, piece.content(), PIECE)
            self._pieces.append(piece)

    def expect(self, address: int, size: int, words: list[int]) -> None:
        """Answer for `size` bytes of GPU memory that another process has written."""
        for offset, word in zip(range(0, size, PIECE), words, strict=True):
            self._pieces.append(Piece(address + offset, word))

    def words(self, address: int, size: int) -> list[int]:
        """What its pieces hold there."""
        return [p.word for p in self._pieces if address <= p.address < address + size]

    def look(self, index: int) -> bool:
        """Whether the first 4 KiB of one piece, by a number of any size, are right."""
        piece = self._pieces[index % len(self._pieces)]
        if piece.is_host:
            return True
        self._cuda.call(
            "cuMemcpyDtoH_v2", self._copy_address, _Pointer(piece.address), _Size(_LOOK)
        )
        return self._copy[:_LOOK] == piece.content(_LOOK)

    def verdict(self) -> str:
        """Look at all of it. Host memory is read by the CPU, and through the GPU as well."""
        for piece in self._pieces:
            address = _Pointer(piece.address)
            if piece.is_host:
                if ctypes.string_at(piece.address, PIECE) != piece.content():
                    return f"wrong at {piece.address:#x} of host memory"
                address = _Pointer(self._scratch)
                host = ctypes.c_void_p(piece.address)
                self._cuda.call("cuMemcpyHtoD_v2", address, host, _Size(PIECE))
            self._cuda.call("cuMemcpyDtoH_v2", self._copy_address, address, _Size(PIECE))
            if self._copy != piece.content():
                return f"wrong at {piece.address:#x}"
        return f"intact {len(self._pieces) * PIECE} bytes"


def _add_managed(cuda: Cuda, memory: Memory, size: int, folder: Path) -> None:
    pointer = _Pointer()
    attach_global = ctypes.c_uint(1)
    cuda.call("cuMemAllocManaged", ctypes.byref(pointer), _Size(size), attach_global)
    memory.fill_host(pointer.value, size)


def _add_vmm(cuda: Cuda, memory: Memory, size: int, folder: Path) -> None:
    handle, pointer, none = ctypes.c_uint64(), _Pointer(), ctypes.c_ulonglong(0)
    properties = _AllocationProperties(type=1, location_type=1)  # pinned, on a device
    access = _AccessDescription(location_type=1, flags=3)  # read and write
    cuda.call("cuMemCreate", ctypes.byref(handle), _Size(size), ctypes.byref(properties), none)
    cuda.call(
        "cuMemAddressReserve", ctypes.byref(pointer), _Size(size), _Size(0), _Pointer(0), none
    )
    cuda.call("cuMemMap", pointer, _Size(size), _Size(0), handle, none)
    cuda.call("cuMemSetAccess", pointer, _Size(size), ctypes.byref(access), _Size(1))
    memory.fill_gpu(pointer.value, size)


def _add_pool(cuda: Cuda, memory: Memory, size: int, folder: Path) -> None:
    pointer = _Pointer()
    cuda.call("cuMemAllocAsync", ctypes.byref(pointer), _Size(size), ctypes.c_void_p(None))
    cuda.call("cuCtxSynchronize")
    memory.fill_gpu(pointer.value, size)


def _add_registered(cuda: Cuda, memory: Memory, size: int, folder: Path) -> None:
    block = mmap.mmap(-1, size)
    address = ctypes.addressof((ctypes.c_char * size).from_buffer(block))
    memory.fill_host(address, size)
    _kept.append(block)
    cuda.call("cuMemHostRegister_v2", ctypes.c_void_p(address), _Size(size), ctypes.c_uint(0))


def _add_pinned(cuda: Cuda, memory: Memory, size: int, folder: Path) -> None:
    pointer = ctypes.c_void_p()
    cuda.call("cuMemHostAlloc", ctypes.byref(pointer), _Size(size), ctypes.c_uint(0))
    memory.fill_host(pointer.value or 0, size)


def _add_exporter(cuda: Cuda, memory: Memory, size: int, folder: Path) -> None:
    address, handle = cuda.allocate(size), _IpcHandle()
    memory.fill_gpu(address, size)
    cuda.call("cuIpcGetMemHandle", ctypes.byref(handle), _Pointer(address))
    words = ",".join(map(str, memory.words(address, size)))
    (folder / "words").write_text(words, encoding="ascii")
    (folder / "handle").write_bytes(bytes(handle))


def _add_importer(cuda: Cuda, memory: Memory, size: int, folder: Path) -> None:
    """The exporter's folder is beside this one's, and named "exporter"."""
    theirs, pointer = folder.parent / "exporter", _Pointer()
    handle = _IpcHandle.from_buffer_copy((theirs / "handle").read_bytes())
    cuda.call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), handle, ctypes.c_uint(1))
    words = [int(word) for word in (theirs / "words").read_text(encoding="ascii").split(",")]
    memory.expect(pointer.value, size, words)


_ADD: dict[str, Callable[[Cuda, Memory, int, Path], None]] = {
    "managed": _add_managed,
    "vmm": _add_vmm,
    "pool": _add_pool,
    "registered": _add_registered,
    "pinned": _add_pinned,
    "ipc exporter": _add_exporter,
    "ipc importer": _add_importer,
}

_kept: list[object] = []  # memory that must live as long as the process


def _spin_function(cuda: Cuda, seconds: float, path: Path | None) -> Callable[[], None]:
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    image = path.read_bytes() if path else _SPIN
    cuda.call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(image))
    cuda.call("cuModuleGetFunction", ctypes.byref(function), module, ctypes.c_char_p(b"spin"))
    nanoseconds = ctypes.c_uint64(int(seconds * 1e9))
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(nanoseconds))
    one, none = ctypes.c_uint(1), ctypes.c_void_p(None)
    _kept.extend((nanoseconds, parameters))

    def spin() -> None:
        shape = (one, one, one, one, one, one)
        cuda.call("cuLaunchKernel", function, *shape, ctypes.c_uint(0), none, parameters, none)
        cuda.call("cuCtxSynchronize")

    return spin


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--extra-bytes", type=int, default=EXTRA)
    parser.add_argument("--zero-percent", type=int, default=0)
    parser.add_argument("--kernel-seconds", type=float, default=3.0)
    parser.add_argument("--module", type=Path)  # for a driver that loads no PTX
    parser.add_argument("--folder", type=Path, required=True)
    return parser.parse_args()


def _set_up(given: argparse.Namespace) -> tuple[Memory, Callable[[], None]]:
    """The memory, and what is done in each round."""
    cuda = Cuda()
    memory = Memory(cuda)
    for begin in range(0, given.bytes, CHUNK):
        size = min(CHUNK, given.bytes - begin)
        memory.fill_gpu(cuda.allocate(size), size, given.zero_percent)
    if given.kind in _ADD:
        _ADD[given.kind](cuda, memory, min(given.extra_bytes, EXTRA), given.folder)
    if given.kind == "kernel":
        return memory, _spin_function(cuda, given.kernel_seconds, given.module)
    if given.kind == "sync":

        def synchronize() -> None:
            cuda.call("cuCtxSynchronize")
            time.sleep(_SYNC_SECONDS)

        return memory, synchronize
    return memory, lambda: time.sleep(_ROUND_SECONDS)


def _put(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def _work(given: argparse.Namespace) -> None:
    asked: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: asked.append(number))
    memory, do_round = _set_up(given)
    counter = os.open(given.folder / "counter", os.O_WRONLY | os.O_CREAT, 0o600)
    rounds = 0
    while True:
        os.pwrite(counter, f"{rounds:020d}".encode(), 0)
        if rounds == 0:
            _put(given.folder / "mark", "")
        do_round()
        if given.kind != "sync" and not memory.look(rounds):
            raise CudaError(f"a look at the memory in round {rounds}: {memory.verdict()}")
        if asked:
            asked.clear()
            _put(given.folder / "verdict", memory.verdict())
        rounds += 1


def _main() -> None:
    given = _parse()
    try:
        _work(given)
    except (CudaError, OSError) as exc:
        _put(given.folder / "verdict", str(exc))
        sys.stderr.write(f"{exc}\n")
        sys.exit(_EXIT_CUDA)


if __name__ == "__main__":
    _main()
