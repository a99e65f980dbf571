# SPDX-License-Identifier: Apache-2.0
"""Make one call on several processes at once, from the threads of one process.

`python -m gpustasis_bench.gpucheck.thread_caller NAME PID...` prints a JSON object: "seconds" until
all were over, and "answers" in the order of the processes.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from gpustasis_bench.gpucheck.driver_calls import RawDriver


def _main() -> None:
    name, pids = sys.argv[1], [int(word) for word in sys.argv[2:]]
    driver = RawDriver()
    driver.init()
    begin = time.monotonic()
    with ThreadPoolExecutor(len(pids)) as threads:
        answers = list(threads.map(lambda pid: driver.call(name, pid), pids))
    seconds = round(time.monotonic() - begin, 6)
    sys.stdout.write(json.dumps({"seconds": seconds, "answers": answers}) + "\n")


if __name__ == "__main__":
    _main()
