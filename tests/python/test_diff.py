# SPDX-License-Identifier: Apache-2.0
"""`gpustasis diff`: what changed, to the byte, told from the indexes alone."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpustasis._core import Manifest, ManifestTask, image_name, write_manifest
from gpustasis.cli import cli
from gpustasis.errors import ImageError
from gpustasis.image.difference import Amounts, compare
from support.chains import BASE, make_chain, make_link, memory_of, page_of
from support.image_samples import PAGE, Memory

FIRST = 1_800_000_000.0


def pair(tmp_path: Path, a: dict[int, Memory], b: dict[int, Memory]) -> tuple[Path, Path]:
    make_link(tmp_path / "a", a, taken=FIRST)
    make_link(tmp_path / "b", b, taken=FIRST + 2)
    return tmp_path / "a", tmp_path / "b"


def amounts(a: list[str], b: list[str], tmp_path: Path, shift: int = 0) -> Amounts:
    """In pages."""
    places = pair(tmp_path, {7: memory_of(a)}, {7: memory_of(b, BASE + shift * PAGE)})
    found = compare(*places).amounts
    return Amounts(
        same=found.same // PAGE,
        changed=found.changed // PAGE,
        moved=found.moved // PAGE,
        only_in_a=found.only_in_a // PAGE,
        only_in_b=found.only_in_b // PAGE,
    )


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ("A B c", "A B c", Amounts(same=3)),
        ("A B c", "A X c", Amounts(same=2, changed=1)),
        ("A B c", "B A c", Amounts(same=1, moved=2)),
        ("A B", "A B c", Amounts(same=2, only_in_b=1)),
        ("A B", "A B A", Amounts(same=2, moved=1)),
        ("A B c", "A", Amounts(same=1, only_in_a=2)),
        ("A 0", "0 0", Amounts(same=1, changed=1)),  # zeroed, though there are zeros in A
        ("A 0", "A 0 0", Amounts(same=2, moved=1)),
        ("A B", "X", Amounts(changed=1, only_in_a=1)),
    ],
)
def test_pages(a: str, b: str, expected: Amounts, tmp_path: Path) -> None:
    assert amounts(a.split(), b.split(), tmp_path) == expected


def test_memory_that_lies_elsewhere_now_has_moved(tmp_path: Path) -> None:
    """As with every dump: the driver stages where it likes."""
    found = amounts(["A", "b", "0"], ["A", "b", "0", "C"], tmp_path, shift=100)
    assert found == Amounts(moved=3, only_in_b=1)


def test_tasks_and_regions(tmp_path: Path) -> None:
    a: dict[int, Memory] = {7: [*memory_of(["A", "B"]), *memory_of(["c"], BASE + 50 * PAGE)]}
    b: dict[int, Memory] = {7: memory_of(["A", "X"]), 9: memory_of(["c", "D"])}
    found = compare(*pair(tmp_path, a, b))
    seven, nine = found.tasks
    assert (seven.in_a, seven.in_b, nine.in_a, nine.in_b) == (True, True, False, True)
    assert [(r.address, r.length) for r in seven.regions] == [(BASE, 2 * PAGE)]
    # Of task 7 "c" is gone, but not from B.
    assert seven.amounts == Amounts(same=PAGE, changed=PAGE)
    assert nine.amounts == Amounts(moved=PAGE, only_in_b=PAGE)
    assert found.seconds == 2.0


def test_a_region_that_only_a_has_is_shown(tmp_path: Path) -> None:
    a: dict[int, Memory] = {7: [*memory_of(["A"]), *memory_of(["c"], BASE + 50 * PAGE)]}
    (task,) = compare(*pair(tmp_path, a, {7: memory_of(["A"])})).tasks
    assert [(r.address, r.amounts) for r in task.regions] == [
        (BASE, Amounts(same=PAGE)),
        (BASE + 50 * PAGE, Amounts(only_in_a=PAGE)),
    ]


def test_earlier_checkpoints_need_not_be_there(tmp_path: Path) -> None:
    chain = make_chain(tmp_path, 4)
    for directory in chain[:3]:
        shutil.rmtree(directory)
    found = compare(chain[3], chain[4]).amounts
    assert (found.same, found.fresh) == (7 * PAGE, PAGE)


def test_chunks_of_different_sizes_are_refused(tmp_path: Path) -> None:
    make_link(tmp_path / "a", {7: memory_of(["A", "B"])})
    make_link(tmp_path / "b", {7: memory_of(["A", "B"])}, chunk_size=2 * PAGE)
    with pytest.raises(ImageError, match=r"a: chunks of 4096 bytes.*b: chunks of 8192"):
        compare(tmp_path / "a", tmp_path / "b")


def test_chunks_larger_than_a_page(tmp_path: Path) -> None:
    for name, words in (("a", ["A", "B", "c"]), ("b", ["A", "B", "d"])):
        make_link(tmp_path / name, {7: memory_of(words)}, chunk_size=2 * PAGE)
    assert compare(tmp_path / "a", tmp_path / "b").amounts == Amounts(same=2 * PAGE, changed=PAGE)


@pytest.mark.parametrize("without", ["manifest", "images"])
def test_nothing_to_compare_is_an_error(tmp_path: Path, without: str) -> None:
    make_link(tmp_path / "a", {7: memory_of(["A"])})
    (tmp_path / "b").mkdir()
    if without == "images":
        tasks = [ManifestTask(pid=7)]
        write_manifest(tmp_path / "b", Manifest(checkpoint_id=b"b" * 16, tasks=tasks))
    with pytest.raises(ImageError, match=f"{tmp_path}/b: "):
        compare(tmp_path / "a", tmp_path / "b")


def test_a_damaged_image_is_an_error(tmp_path: Path) -> None:
    a, b = pair(tmp_path, {7: memory_of(["A"])}, {7: memory_of(["A"])})
    (b / image_name(7)).write_bytes(b"")
    with pytest.raises(ImageError, match=r"gpustasis-7\.img"):
        compare(a, b)


regions = st.lists(
    st.tuples(st.integers(0, 3), st.lists(st.sampled_from("0ABc"), min_size=1, max_size=4)),
    max_size=3,
)


def memory(plan: list[tuple[int, list[str]]]) -> Memory:
    parts: Memory = []
    address = BASE
    for gap, words in plan:
        address += gap * PAGE
        parts += memory_of(words, address)
        address += len(words) * PAGE
    return parts


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(a=regions, b=regions)
def test_against_a_comparison_page_by_page(
    tmp_path: Path, a: list[tuple[int, list[str]]], b: list[tuple[int, list[str]]]
) -> None:
    place = Path(tempfile.mkdtemp(dir=tmp_path))
    found = compare(*pair(place, {7: memory(a)}, {7: memory(b)}))
    shutil.rmtree(place)

    def pages(plan: list[tuple[int, list[str]]]) -> dict[int, bytes]:
        return {
            address + at: content[at : at + PAGE]
            for address, content in memory(plan)
            for at in range(0, len(content), PAGE)
        }

    old, new = pages(a), pages(b)
    expected = Amounts()
    for address, page in new.items():
        if old.get(address) == page:
            expected.same += PAGE
        elif page in old.values() and not (address in old and page == page_of("0")):
            expected.moved += PAGE
        elif address in old:
            expected.changed += PAGE
        else:
            expected.only_in_b += PAGE
    for address, page in old.items():
        if address not in new and page not in new.values():
            expected.only_in_a += PAGE
    assert found.amounts == expected
    assert found.amounts.in_b == PAGE * len(new)
    parts = [region.amounts for task in found.tasks for region in task.regions]
    assert sum(part.in_b + part.only_in_a for part in parts) == expected.in_b + expected.only_in_a


class TestCommand:
    def run(self, *words: str | Path) -> Any:
        result = CliRunner().invoke(cli, ["diff", *map(str, words)])
        assert result.exception is None, result.exception
        return result.output

    def test_table(self, tmp_path: Path) -> None:
        a, b = pair(
            tmp_path, {7: memory_of(["A", "B"] * 128)}, {7: memory_of(["A", "B"] * 127 + ["X"])}
        )
        output = self.run(a, b)
        assert "task 7" in output
        assert f"{BASE:x}-{BASE + 255 * PAGE:x}" in output
        assert "99 %" in output or "100 %" in output
        assert "2.0 s between the two" in output
        assert "MiB/s" in output

    def test_json(self, tmp_path: Path) -> None:
        a, b = pair(tmp_path, {7: memory_of(["A", "B"])}, {7: memory_of(["A", "X"])})
        found = json.loads(self.run("--json", a, b))
        assert (found["version"], found["chunk_bytes"], found["seconds"]) == (1, PAGE, 2.0)
        assert found["fresh_mib_per_s"] == PAGE / 2**20 / 2
        assert found["total"]["changed_bytes"] == PAGE
        assert found["total"]["changed_share"] == 0.5
        (task,) = found["tasks"]
        assert task["regions"][0]["address"] == BASE

    def test_no_time_is_told_backwards(self, tmp_path: Path) -> None:
        a, b = pair(tmp_path, {7: memory_of(["A"])}, {7: memory_of(["A"])})
        assert "MiB/s" not in self.run(b, a)
        assert json.loads(self.run("--json", b, a))["fresh_mib_per_s"] is None
