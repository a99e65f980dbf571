# SPDX-License-Identifier: Apache-2.0
"""`gpustasis list`: what lies in a store, and what is wrong with it."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gpustasis._core import MANIFEST_NAME, Manifest, ManifestTask, image_name, write_manifest
from gpustasis.cli import cli
from gpustasis.errors import ImageError
from gpustasis.image.prune import Rules, prune
from gpustasis.image.store import list_store
from support.chains import checkpoint_id, make_link, memory_of
from support.image_samples import PAGE
from support.inventory import write_inventory
from support.json_output import check_document

FIRST = 1_800_000_000.0


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """second <- first, which sorts behind it; "second" has two processes."""
    place = tmp_path / "store"
    place.mkdir()
    make_link(place / "second", {7: memory_of(["A", "b"])}, taken=FIRST)
    more = {7: memory_of(["A", "B"]), 8: memory_of(["C", "0", "D"])}
    make_link(place / "first", more, parent=place / "second", taken=FIRST + 60)
    return place


def call(*words: object) -> Result:
    return CliRunner().invoke(cli, ["list", *map(str, words)])


def entries(store: Path) -> list[dict[str, Any]]:
    result = call(store, "--json")
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = check_document(result.stdout, "list")["entries"]
    return found


def test_oldest_first_with_sizes_and_parents(store: Path) -> None:
    older, newer = entries(store)
    assert (older["name"], newer["name"]) == ("second", "first")
    assert older["checkpoint_id"] == newer["parent_id"] == checkpoint_id("second").hex()
    assert older["parent_id"] is None
    assert older["taken"] < newer["taken"]
    assert (older["tasks"], newer["tasks"]) == (1, 2)
    assert (older["memory_bytes"], newer["memory_bytes"]) == (2 * PAGE, 5 * PAGE)
    sizes = [item.lstat().st_size for item in (store / "first").iterdir()]
    assert newer["stored_bytes"] == sum(sizes)
    assert older["complete"]
    assert newer["complete"]


def test_the_table(store: Path) -> None:
    result = call(store)
    assert result.exit_code == 0, result.output
    titles, older, newer = result.output.splitlines()
    assert titles.split()[:5] == ["NAME", "TAKEN", "ID", "PARENT", "TASKS"]
    first, second = checkpoint_id("first").hex()[:12], checkpoint_id("second").hex()[:12]
    assert older.split()[0] == "second"
    assert older.split()[3:6] == [second, "-", "1"]
    assert newer.split()[3:6] == [first, second, "2"]
    assert newer.split()[-1] == "complete"


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda place: (place / "inventory.img").unlink(), "no inventory.img"),
        (lambda place: (place / "inventory.img").write_bytes(b""), "inventory.img is empty"),
        (lambda place: (place / "inventory.img").write_bytes(bytes(64)), "is not an inventory"),
        (lambda place: write_inventory(place, "gpustasis"), "inventory.img is not of"),
        (
            lambda place: write_inventory(place, f"checkpoint-{'ee' * 16}"),
            "inventory.img is not of",
        ),
        (lambda place: (place / MANIFEST_NAME).unlink(), "a checkpoint of CRIU alone"),
        (lambda place: (place / MANIFEST_NAME).write_bytes(b"?" * 400), "manifest"),
        (lambda place: (place / image_name(8)).unlink(), f"{image_name(8)} is missing"),
        (lambda place: (place / image_name(8)).write_bytes(b"?" * 800), image_name(8)),
    ],
)
def test_what_is_not_whole_is_named(store: Path, spoil: Any, why: str) -> None:
    spoil(store / "first")
    found = {one["name"]: one for one in entries(store)}
    assert found["second"]["complete"]
    assert not found["first"]["complete"]
    assert why in found["first"]["problem"]
    assert why in call(store).output


@pytest.mark.parametrize(("error", "whole"), [(errno.EIO, True), (errno.ELOOP, False)])
def test_an_inventory_that_cannot_be_read_now_is_not_taken_for_anothers(
    store: Path, monkeypatch: pytest.MonkeyPatch, error: int, whole: bool
) -> None:
    def fail(*_: Any) -> bool:
        refusal = OSError(error, os.strerror(error))
        raise ImageError(str(refusal)) from refusal

    monkeypatch.setattr("gpustasis.image.store.is_inventory_of", fail)
    assert [one.problem == "" for one in list_store(store)] == [whole, whole]


def test_an_inventory_that_names_none(store: Path) -> None:
    """Of a dump that has stored nothing: CRIU has all, and the stock plugin could restore it. Its
    manifest says what the tasks were."""
    place = store / "stock"
    place.mkdir()
    stock = Manifest(checkpoint_id=checkpoint_id("stock"), tasks=[ManifestTask(pid=7)])
    write_manifest(place, stock)
    write_inventory(place, "cuda_plugin")
    assert {one["name"]: one["problem"] for one in entries(store)}["stock"] == ""
    (place / "inventory.img").write_bytes(b"")
    assert "is empty" in {one["name"]: one["problem"] for one in entries(store)}["stock"]


def test_what_a_loss_of_power_has_left_is_none_for_which_others_go(store: Path) -> None:
    make_link(store / "newest", {7: memory_of(["A"])}, taken=FIRST + 99)
    (store / "newest" / "inventory.img").write_bytes(b"")
    prune(store, Rules(last=1))
    assert sorted(path.name for path in store.iterdir()) == ["first", "newest", "second"]


def test_an_image_of_another_checkpoint_is_told(store: Path) -> None:
    make_link(store.parent / "other", {8: memory_of(["C", "0", "D"])})
    image = (store.parent / "other" / image_name(8)).read_bytes()
    (store / "first" / image_name(8)).write_bytes(image)
    newer = next(one for one in entries(store) if one["name"] == "first")
    assert newer["memory_bytes"] is None
    assert "belongs to another checkpoint" in newer["problem"]


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda store: shutil.rmtree(store / "second"), "is missing"),
        (lambda store: (store / "second").rename(store.parent / "elsewhere"), "is missing"),
        (lambda store: (store / "second" / image_name(7)).unlink(), "is missing"),
        (lambda store: (store / "second" / image_name(7)).write_bytes(b"?" * 400), "is replaced"),
    ],
)
def test_one_whose_parent_is_gone_is_not_complete(store: Path, spoil: Any, why: str) -> None:
    spoil(store)
    newer = next(one for one in entries(store) if one["name"] == "first")
    assert not newer["complete"]
    parent = f"{image_name(7)} of checkpoint {checkpoint_id('second').hex()}, 1 before this one"
    assert newer["problem"] == f"{parent}, {why}"
    assert newer["memory_bytes"] == 5 * PAGE


def test_a_link_to_a_checkpoint_is_named(store: Path) -> None:
    (store / "latest").symlink_to("first")
    (store / "nowhere").symlink_to("none")
    (store / "file").write_text("something")
    (store / "to-the-file").symlink_to("file")
    found = {one["name"]: one for one in entries(store)}
    assert sorted(found) == ["first", "latest", "second"]
    assert found["latest"]["problem"] == f"a link to {store / 'first'}"
    assert found["latest"]["checkpoint_id"] == found["first"]["checkpoint_id"]


def test_an_empty_store_and_none(tmp_path: Path) -> None:
    assert entries(tmp_path) == []
    assert call(tmp_path / "none").exit_code == 2
