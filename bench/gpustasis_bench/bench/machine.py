"""The machine and the versions that figures belong to."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gpustasis
from gpustasis.criu.find import Criu
from gpustasis_bench.bench.codec import Codec
from gpustasis_bench.bench.medium import Medium

_THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def describe_machine(gpu: str, media: Sequence[Medium]) -> dict[str, Any]:
    """Sizes in bytes."""
    pages = os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "transparent_huge_pages": _chosen(_THP),
        "gpu": gpu,
        "media": {medium.name: medium.filesystem for medium in media},
    }


def describe_versions(criu: Criu, codecs: Sequence[Codec]) -> dict[str, str]:
    versions = {
        "gpustasis": gpustasis.__version__,
        "criu": f"{criu.version_text} ({criu.origin})",
        "python": platform.python_version(),
    }
    for codec in codecs:
        versions[codec.program] = codec.version()
    for name in ("torch", "matplotlib"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _chosen(path: Path) -> str:
    """The word in brackets."""
    try:
        text = path.read_text()
    except OSError:
        return "unknown"
    return text[text.find("[") + 1 : text.find("]")]
