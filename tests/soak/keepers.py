# SPDX-License-Identifier: Apache-2.0
"""Every case of the tests of keepers, as a campaign."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from campaigns.tally import Tally
from soak.bench import Bench

_REPOSITORY = Path(__file__).resolve().parent.parent.parent
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.*)$", re.MULTILINE)
_COUNT = re.compile(r"(\d+) (passed|failed|error)")


def run(_: Bench) -> Iterator[tuple[str, Tally]]:
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "tests/jobs/test_member.py",
        ],
        cwd=_REPOSITORY,
        env=os.environ | {"GPUSTASIS_KEEPERS": "whole"},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    tally = Tally()
    for number, what in _COUNT.findall(ended.stdout.rpartition("\n=")[2] or ended.stdout):
        tally.counts["trials"] += int(number)
        tally.counts[what] += int(number)
    tally.failures += _FAILED.findall(ended.stdout)
    if ended.returncode != 0 and not tally.failures:
        tally.failures.append(f"pytest ended with {ended.returncode}: {ended.stdout[-300:]}")
    yield "4 ranks, etcd and the local store", tally
