# SPDX-License-Identifier: Apache-2.0
"""Counts up in the first 8 bytes of a file: job_task.py FILE."""

import mmap
import sys
import time

with open(sys.argv[1], "w+b") as file:
    file.truncate(4096)
    with mmap.mmap(file.fileno(), 4096) as memory:
        count = 0
        while True:
            count += 1
            memory[:8] = count.to_bytes(8, "little")
            time.sleep(0.002)
