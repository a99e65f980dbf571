# SPDX-License-Identifier: Apache-2.0
"""What ci/bench-podman measures and writes: memory that changes by a known share between
exports."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from campaigns import podman_export, podman_page
from gpustasis_bench.bench.markdown import require_place
from gpustasis_bench.bench.programs import compile_program
from gpustasis_bench.bench.target import Target
from gpustasis_bench.contents.layout import ContentWriter
from gpustasis_bench.errors import BenchError

MIB = 1 << 20
SIZE = 64 * MIB  # 32 blocks of 2 MiB
BLOCK = 2 * MIB


@pytest.fixture
def target(emulator_environ: dict[str, str], tmp_path: Path) -> Iterator[Target]:
    folder = tmp_path / "content"
    folder.mkdir()
    writer = ContentWriter(folder)
    for index in range(2):  # the share is of both together
        writer.add(f"tensor {index}", "zeros", bytes(SIZE // 2))
    writer.finish("sample", folder)
    made = Target(compile_program("target", tmp_path), tmp_path / "job", emulator_environ)
    try:
        made.load(folder / "state-0.layout")
        yield made
    finally:
        made.kill()


@pytest.mark.parametrize(
    ("percent", "blocks"), [(0, 0), (10, 3), (25, 8), (50, 16), (99, 31), (100, 32)]
)
def test_a_known_share_is_changed(target: Target, percent: int, blocks: int) -> None:
    before = target.digest()
    assert target.change(percent, 1) == blocks * BLOCK
    first = target.digest()
    assert (first != before) == (blocks > 0)
    target.change(percent, 2)
    assert (target.digest() != first) == (blocks > 0)
    target.change(percent, 1)
    assert target.digest() == first, "other blocks were changed"


def test_more_than_all_is_refused(target: Target) -> None:
    with pytest.raises(BenchError, match="cannot change 101 percent"):
        target.change(101, 1)


def export(contender: str, stored: int, changed: int) -> dict[str, Any]:
    return {
        "incremental": contender == podman_export.INCREMENTAL,
        "stored_plain_bytes": stored,
        "changed_bytes": changed,
    }


@pytest.mark.parametrize("stored", [0, 99 * MIB, 200 * MIB])
def test_an_incremental_export_of_other_than_the_changes_ends_the_run(stored: int) -> None:
    one = export(podman_export.INCREMENTAL, stored, 100 * MIB)
    with pytest.raises(AssertionError, match="bytes stored"):
        podman_export.require_honest(podman_export.INCREMENTAL, one)
    podman_export.require_honest(podman_export.INCREMENTAL, one | {"stored_plain_bytes": 101 * MIB})
    with pytest.raises(AssertionError):
        podman_export.require_honest("ours", one)


def test_the_page_says_which_share(repository: Path) -> None:
    results = [
        {
            "contender": contender,
            "compress": compress,
            "seconds": 2.0,
            "driver_seconds": 0.4,
            "bytes": 5_000_000,
            "seconds_of_stock": 0.5,
            "bytes_of_stock": 0.25,
        }
        for contender in podman_export.CONTENDERS
        for compress in podman_export.COMPRESSIONS
    ]
    text = podman_page.page_text(
        {
            "gpu_bytes": 1 << 30,
            "workload": "inference",
            "changed_percent": 17,
            "changed_bytes": 174 * MIB,
            "pairs": 3,
            "load_average": 0.5,
            "versions": ["podman version 5"],
            "base": {"contender": "stock", "compress": "zstd"},
            "results": results,
        }
    )
    assert "overwrites 17 % of it (174 MiB)" in text
    rows = [line for line in text.splitlines() if line.startswith("| with it, incremental")]
    assert rows == [
        "| with it, incremental, 17 % changed since the last | 2.0 s, 5 MB | 2.0 s, 5 MB |"
    ]
    assert "17 % changed since the last: 0.50 of the time and 0.25 of the space" in text
    # The page in the tree has its place, and no other page has figures of its own.
    page = repository / "docs/performance.md"
    require_place(page, podman_page.BEGIN, podman_page.END)
    assert "10 % changed since the last" in page.read_text(encoding="utf-8")
