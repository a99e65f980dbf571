# SPDX-License-Identifier: Apache-2.0
"""`python3 heap_target.py BYTES THREADS TASKS SEED`: holds CPU memory in small objects.

The program that the benchmark dumps and restores for its workload cpu, and in trees; it is spoken
to as target.c is, and knows of its requests hash, watch and gap. Half of the bytes are noise, half
compress. Each thread holds its share, and reads of it without end. A tree of TASKS processes; each
but the first works in a folder of its own, task-1 and so on. It imports nothing of this package.
"""

import hashlib
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

_BLOCK = 64 << 10  # less than what malloc maps on its own: the heap grows
_WATCH_S = 0.0005


def make_blocks(size: int, seed: int) -> list[bytearray]:
    """Noise and what compresses, by turns; no two blocks are the same."""
    numbers = random.Random(seed)  # noqa: S311 - contents, no secret
    blocks = []
    for index in range(size // _BLOCK):
        noise = index % 2 == 0
        word = numbers.randbytes(_BLOCK if noise else 16)
        blocks.append(bytearray(word * (_BLOCK // len(word))))
    return blocks


def read_on(blocks: list[bytearray]) -> None:
    """What each thread does."""
    index = 0
    while True:
        index = (index + 1) % len(blocks)
        blocks[index].count(0)
        time.sleep(0.01)


def answer(text: str) -> None:
    """In one step, as whoever asked waits for the file."""
    part = Path("answer.part")
    part.write_text(text + "\n", encoding="utf-8")
    part.rename("answer")


def digest(blocks: list[bytearray]) -> str:
    """A hash of all of them, and their size."""
    whole = hashlib.blake2b(digest_size=16)
    for block in blocks:
        whole.update(block)
    return f"{whole.hexdigest()} {len(blocks) * _BLOCK}"


def serve(blocks: list[bytearray]) -> None:
    """Answer requests for ever."""
    place = Path("request")
    watching, last, greatest = False, 0, 0
    while True:
        if watching:
            asked = signal.sigtimedwait({signal.SIGUSR1}, _WATCH_S) is not None
            now = time.monotonic_ns()
            last, greatest = now, max(greatest, now - last)
            if not asked:
                continue
        else:
            signal.sigwait({signal.SIGUSR1})
        # Interrupted for longer than its timeout, as by a dump, Python's sigtimedwait returns a
        # signal that never came. So there is a request only once.
        try:
            request = place.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            continue
        place.unlink()
        if request == "hash":
            answer("ok " + digest(blocks))
        elif request == "watch":
            watching, last, greatest = True, time.monotonic_ns(), 0
            answer("ok watching")
        elif request == "gap":
            watching = False
            answer(f"ok {greatest}")
        else:
            answer("error unknown request")


def main() -> None:
    """Make what it holds, then serve."""
    size, threads, tasks, seed = (int(word) for word in sys.argv[1:])
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    for task in range(1, tasks):
        folder = Path(f"task-{task}")
        folder.mkdir(mode=0o700)
        if os.fork() == 0:
            os.chdir(folder)
            seed += task
            break
    blocks = make_blocks(size, seed)
    for number in range(threads):
        share = blocks[number::threads]
        threading.Thread(target=read_on, args=(share,), daemon=True).start()
    answer(f"ok ready {os.getpid()}")
    serve(blocks)


if __name__ == "__main__":
    main()
