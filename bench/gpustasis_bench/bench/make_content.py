"""`python -m gpustasis_bench.bench.make_content WORKLOAD SIZE SEED CACHE`: make one content.

In a process of its own, so that what computes it takes no part in what is measured.
"""

from __future__ import annotations

import sys
from pathlib import Path

from gpustasis.errors import CheckpointError
from gpustasis_bench.bench.workload import WORKLOADS, content_of

if __name__ == "__main__":
    try:
        name, size, seed, cache = sys.argv[1:]
        content_of(WORKLOADS[name], int(size), int(seed), Path(cache))
    except CheckpointError as error:
        print(f"bench: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
