# SPDX-License-Identifier: Apache-2.0
"""Every CRIU that tests can use: this machine's own, and those of the Debian roots that
ci/test-root makes. gpustasis itself looks for no root: tests name one to it, by GPUSTASIS_CRIU or
--criu."""

from __future__ import annotations

import functools
import os

from gpustasis.criu.find import Criu, choose, find_all
from gpustasis_bench.roots import roots_directory

SUITES = ("sid", "trixie", "experimental")  # in the order in which they are preferred


@functools.cache
def usable_criu() -> tuple[Criu, ...]:
    """The preferred one first: what GPUSTASIS_CRIU names and nothing else, if it is set."""
    found = list(find_all())
    if not os.environ.get("GPUSTASIS_CRIU"):
        for suite in SUITES:
            root = roots_directory() / suite
            if (root / "usr/sbin/criu").exists():
                found += find_all(explicit=str(root))
    return tuple(criu for criu in found if criu.usable)


def preferred_criu() -> Criu:
    """Raises CriuError if there is none."""
    return choose(usable_criu())


def newest_criu() -> Criu:
    return max(usable_criu(), key=lambda criu: criu.version)


def criu_versions() -> tuple[Criu, ...]:
    """Each version once, oldest first."""
    by_version = {criu.version: criu for criu in reversed(usable_criu())}
    return tuple(by_version[version] for version in sorted(by_version))


def criu_place(criu: Criu) -> str:
    """What names it to gpustasis: for GPUSTASIS_CRIU and --criu."""
    return str(criu.root or criu.program)
