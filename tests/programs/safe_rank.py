# SPDX-License-Identifier: Apache-2.0
"""One rank of a ring of processes, as ring_rank.c, that cannot be dumped with its connections:
it closes all of its sockets before it stands at a safe point, and makes them anew afterwards.

    safe_rank.py RANK STEPS ADDRESS:PORT...

It prints what ring_rank does, and "down" and "up". Its memory on a GPU is the emulator's. With
SAFE_RANK_FORGETS=RANK:STEP that rank calls no safe point from that step on; with
SAFE_RANK_FAILS=RANK what it does before one raises an exception, and with SAFE_RANK_HELD=RANK:FILE
waits while there is such a file. SAFE_RANK_HANGS=RANK:FILE has that rank hang while there is one.
SAFE_RANK_MAPS names a file to map. Its connections are numbered:
one that leads to an older set than its own ends it with status 1.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import struct
import sys
import time

from gpustasis.job import safe_point

WORDS, EVERY, PAUSE_S = 1 << 12, 20, 0.002
MASK = (1 << 64) - 1


class Ring:
    """The connections to the next rank and from the one before."""

    def __init__(self, rank: int, places: list[tuple[str, int]]) -> None:
        self.own = places[rank]
        self.next = places[(rank + 1) % len(places)]
        self.made = 0
        self.make()

    def make(self) -> None:
        self.listening = socket.create_server(self.own)
        self.made += 1
        while True:
            try:
                self.to = socket.create_connection(self.next, timeout=60)
                break
            except ConnectionRefusedError:
                time.sleep(0.01)
        self.from_, _ = self.listening.accept()
        self.send(self.made)
        if (other := self.receive()) != self.made:
            raise SystemExit(f"its connections are number {self.made}, the others' {other}")

    def close(self) -> None:
        for one in (self.listening, self.to, self.from_):
            one.close()

    def send(self, word: int) -> None:
        self.to.sendall(struct.pack("<Q", word))

    def receive(self) -> int:
        data = b""
        while len(data) < 8:
            part = self.from_.recv(8 - len(data))
            if not part:
                raise SystemExit("the rank before has closed its connection")
            data += part
        return int(struct.unpack("<Q", data)[0])


class Memory:
    """Of a GPU."""

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        self.call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(8 * WORDS))
        self.at = memory.value
        self.words = (ctypes.c_uint64 * WORDS)()
        self.call("cuMemcpyHtoD_v2", memory, self.words, ctypes.c_size_t(8 * WORDS))

    def call(self, name: str, *words: object) -> None:
        if status := getattr(self.cuda, name)(*words):
            raise SystemExit(f"{name}: error {status}")

    def put(self, step: int, state: int) -> None:
        at = step % WORDS
        self.words[at] = state
        one = ctypes.c_uint64(state)
        self.call(
            "cuMemcpyHtoD_v2",
            ctypes.c_uint64(self.at + 8 * at),
            ctypes.byref(one),
            ctypes.c_size_t(8),
        )

    def require(self) -> None:
        read = (ctypes.c_uint64 * WORDS)()
        self.call("cuMemcpyDtoH_v2", read, ctypes.c_uint64(self.at), ctypes.c_size_t(8 * WORDS))
        if bytes(read) != bytes(self.words):
            raise SystemExit("GPU memory is not what was written")


def main() -> None:
    rank, steps = int(sys.argv[1]), int(sys.argv[2])
    places = [(host, int(port)) for host, port in (word.rsplit(":", 1) for word in sys.argv[3:])]
    forgets = [int(word) for word in os.environ.get("SAFE_RANK_FORGETS", "-1:0").split(":")]
    fails = int(os.environ.get("SAFE_RANK_FAILS", "-1")) == rank
    held = os.environ.get("SAFE_RANK_HELD", "-1:").split(":", 1)
    hangs = os.environ.get("SAFE_RANK_HANGS", "-1:").split(":", 1)
    if path := os.environ.get("SAFE_RANK_MAPS"):
        with open(path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            assert len(mapped) > 0
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    ring = Ring(rank, places)
    memory = Memory()

    def down() -> None:
        if fails:
            raise SystemExit("it cannot be taken down")
        while held[0] == str(rank) and os.path.exists(held[1]):
            time.sleep(0.01)
        ring.close()
        print(f"down {ring.made}")

    def up() -> None:
        ring.make()
        print(f"up {ring.made}")

    state = 1
    for step in range(steps):
        if rank != forgets[0] or step < forgets[1]:
            safe_point(before=down, after=up)
        while hangs[0] == str(rank) and os.path.exists(hangs[1]):
            time.sleep(0.2)
        passed = (state ^ step) * (rank + 1) & MASK
        total = passed
        for _ in places[1:]:
            ring.send(passed)
            passed = ring.receive()
            total += passed
        state = (state * 6364136223846793005 + total) & MASK
        memory.put(step, state)
        if step % EVERY == 0:
            memory.require()
            print(f"step {step} {state:016x}")
        time.sleep(PAUSE_S)
    print(f"done {state:016x}")


if __name__ == "__main__":
    main()
