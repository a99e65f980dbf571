# SPDX-License-Identifier: Apache-2.0
"""`gpustasis prune`: what no rule keeps goes, and no chain is ever broken."""

from __future__ import annotations

import json
import shutil
import subprocess
from datetime import timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpustasis._core import ARENA_MARKER, PARENT_LINK
from gpustasis.cli import cli
from gpustasis.errors import CheckpointError
from gpustasis.image import prune as prune_module
from gpustasis.image.directory import share, try_exclude
from gpustasis.image.prune import Action, Rules, prune
from support.arena_by_hand import write_marker
from support.chains import is_whole, make_chain, make_link, memory_of

FIRST = 1_800_000_000.0
LAST_ONE = Rules(last=1)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    place = tmp_path / "store"
    place.mkdir()
    return place


def two_chains(store: Path) -> None:
    """a-full <- a-more, then b-full <- b-more."""
    for number, (name, parent) in enumerate(
        [("a-full", None), ("a-more", "a-full"), ("b-full", None), ("b-more", "b-full")]
    ):
        below = None if parent is None else store / parent
        words = ["A", "b", "0", name]
        make_link(store / name, {7: memory_of(words)}, parent=below, taken=FIRST + number * 60)


def names(store: Path) -> list[str]:
    return sorted(path.name for path in store.iterdir())


def actions(store: Path, rules: Rules, *, dry_run: bool = False) -> dict[str, str]:
    verdicts = prune(store, rules, dry_run=dry_run).verdicts
    return {verdict.entry.name: str(verdict.action) for verdict in verdicts}


def reasons(store: Path, rules: Rules) -> dict[str, tuple[str, ...]]:
    return {verdict.entry.name: verdict.reasons for verdict in prune(store, rules).verdicts}


def test_beside_a_marker_of_a_later_version_nothing_is_removed(store: Path, tmp_path: Path) -> None:
    """What such a checkpoint is built on is not known here."""
    two_chains(store)
    later = store / "later"
    later.mkdir()
    write_marker(later, bytes(16), tmp_path / "arena")
    marker = later / ARENA_MARKER
    marker.write_text(marker.read_text().replace("gpustasis-arena 1", "gpustasis-arena 2"))
    before = names(store)
    with pytest.raises(CheckpointError, match=r"later is built on cannot be told: .*version 2"):
        prune(store, LAST_ONE)
    assert names(store) == before


def test_a_chain_is_kept_whole(store: Path) -> None:
    two_chains(store)
    found = reasons(store, LAST_ONE)
    assert names(store) == ["b-full", "b-more"]
    assert found["b-full"] == ("needed by b-more",)
    assert found["b-more"] == ("last",)
    assert is_whole(store / "b-more")


def test_a_long_chain_goes_or_stays_as_one(store: Path) -> None:
    make_chain(store, 12)
    assert set(actions(store, LAST_ONE).values()) == {"kept"}
    make_link(store / "new", {7: memory_of(["x"])}, taken=FIRST + 1e6)
    prune(store, LAST_ONE)
    assert names(store) == ["new"]


def test_a_parent_is_known_by_its_id_wherever_it_lies(store: Path) -> None:
    two_chains(store)
    (store / "b-full").rename(store / "0-moved")
    prune(store, LAST_ONE)
    assert names(store) == ["0-moved", "b-more"]


def test_copies_of_a_parent_are_all_kept(store: Path) -> None:
    """They have the same id; which of them a child needs is not for prune to find out."""
    two_chains(store)
    shutil.copytree(store / "b-full", store / "copy", symlinks=True)
    prune(store, LAST_ONE)
    assert names(store) == ["b-full", "b-more", "copy"]


def test_a_dry_run_does_nothing(store: Path) -> None:
    two_chains(store)
    found = actions(store, LAST_ONE, dry_run=True)
    assert found == {"a-full": "removed", "a-more": "removed", "b-full": "kept", "b-more": "kept"}
    assert len(names(store)) == 4


def test_what_is_in_use_stays_with_what_it_needs(store: Path) -> None:
    two_chains(store)
    with share(store / "a-more"):
        found = reasons(store, LAST_ONE)
    assert found["a-more"] == ("in use",)
    assert found["a-full"] == ("needed by a-more",)
    assert len(names(store)) == 4
    prune(store, LAST_ONE)
    assert names(store) == ["b-full", "b-more"]


def test_what_one_in_use_is_built_on_is_not_even_locked(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its user, a dump or a restore, is about to lock it as well, and must not find it taken."""
    two_chains(store)
    asked: list[str] = []

    def note_and_lock(directory: Path) -> object:
        asked.append(directory.name)
        return try_exclude(directory)

    monkeypatch.setattr(prune_module, "try_exclude", note_and_lock)
    with share(store / "a-more"):
        prune(store, LAST_ONE)
    assert asked == [store.name, "a-more"]


def test_a_parent_in_use_stays_alone(store: Path) -> None:
    two_chains(store)
    with share(store / "a-full"):
        prune(store, LAST_ONE)
    assert names(store) == ["a-full", "b-full", "b-more"]


class TestWhatIsNotOurs:
    def test_is_left_alone(self, store: Path) -> None:
        two_chains(store)
        (store / "empty").mkdir()
        (store / "file").write_text("something")
        (store / "latest").symlink_to("a-full")
        hidden = {7: memory_of(["A", "b", "0", "hidden"])}
        make_link(store / ".hidden", hidden, parent=store / "a-more", taken=FIRST + 999)
        shutil.copytree(store / "a-full", store / "with-a-directory", symlinks=True)
        (store / "with-a-directory" / "below").mkdir()
        shutil.copytree(store / "a-full", store / "damaged", symlinks=True)
        (store / "damaged" / "gpustasis-manifest.img").write_bytes(b"no manifest")
        shutil.copytree(store / "a-full", store / "without-image", symlinks=True)
        (store / "without-image" / "gpustasis-7.img").unlink()
        found = actions(store, LAST_ONE)
        ignored = {"empty", "with-a-directory", "damaged", "without-image", ".hidden", "latest"}
        kept = {"b-more", "b-full", "a-full", "a-more"}  # the latter two for the hidden one
        assert {name for name, action in found.items() if action == Action.IGNORED} == ignored
        assert set(names(store)) == ignored | kept | {"file"}
        assert is_whole(store / ".hidden")

    def test_a_link_to_a_checkpoint_keeps_what_that_needs(
        self, store: Path, tmp_path: Path
    ) -> None:
        """Elsewhere or here; the link itself is no checkpoint to be counted or removed."""
        two_chains(store)
        elsewhere = tmp_path / "child"
        make_link(elsewhere, {7: memory_of(["A", "Z"])}, parent=store / "a-full", taken=FIRST)
        (store / "linked").symlink_to(elsewhere)
        done = prune(store, LAST_ONE)
        assert names(store) == ["a-full", "b-full", "b-more", "linked"]
        assert is_whole(elsewhere)
        found = {verdict.entry.name: verdict for verdict in done.verdicts}
        assert found["linked"].action == Action.IGNORED
        assert found["linked"].reasons == (f"a link to {elsewhere}",)
        assert found["a-full"].reasons == ("needed by linked",)
        assert elsewhere in done.outside["linked"]

    def test_a_link_with_the_name_of_trash_is_not_deleted(self, store: Path) -> None:
        two_chains(store)
        (store / f".gpustasis-trash-{'0' * 32}").symlink_to("b-full")
        prune(store, LAST_ONE)
        assert names(store) == [f".gpustasis-trash-{'0' * 32}", "b-full", "b-more"]

    def test_a_dump_that_is_not_done_keeps_its_parents(self, store: Path) -> None:
        two_chains(store)
        more = {7: memory_of(["A"])}
        make_link(store / "dump", more, parent=store / "a-more", taken=FIRST + 999, finished=False)
        prune(store, LAST_ONE)
        assert names(store) == ["a-full", "a-more", "b-full", "b-more", "dump"]
        assert is_whole(store / "dump")

    def test_a_dump_with_prev_images_dir_keeps_what_it_needs(self, store: Path) -> None:
        two_chains(store)
        (store / "stock").mkdir()
        (store / "stock" / "parent").symlink_to("../a-full")
        prune(store, LAST_ONE)
        assert names(store) == ["a-full", "b-full", "b-more", "stock"]

    def test_a_parent_outside_is_left_alone_and_named(self, store: Path, tmp_path: Path) -> None:
        two_chains(store)
        outside = tmp_path / "outside"
        make_link(outside, {7: memory_of(["A"])}, taken=FIRST)
        make_link(store / "new", {7: memory_of(["A"])}, parent=outside, taken=FIRST + 999)
        done = prune(store, LAST_ONE)
        assert names(store) == ["new"]
        assert done.outside == {"new": [outside]}
        assert is_whole(store / "new")

    def test_a_chain_that_leads_out_and_in_again_is_kept(self, store: Path, tmp_path: Path) -> None:
        two_chains(store)
        outside = tmp_path / "outside"
        make_link(outside, {7: memory_of(["A", "C"])}, parent=store / "a-full", taken=FIRST)
        make_link(store / "new", {7: memory_of(["A"])}, parent=outside, taken=FIRST + 999)
        prune(store, LAST_ONE)
        assert names(store) == ["a-full", "new"]
        assert is_whole(store / "new")


def test_a_circle_of_links_is_no_trap(store: Path) -> None:
    two_chains(store)
    (store / "a-full" / PARENT_LINK).symlink_to("../a-more")
    prune(store, LAST_ONE)
    assert names(store) == ["b-full", "b-more"]


def test_a_dump_that_was_faster_keeps_its_parent(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has found its parent, written its manifest and gone between prune's two looks."""
    two_chains(store)

    def dump_and_lock(directory: Path) -> object:
        if directory != store and not (store / "fast").exists():  # the first candidate
            words = {7: memory_of(["A", "b", "0", "a-more"])}
            make_link(store / "fast", words, parent=store / "a-more", taken=FIRST + 30)
        return try_exclude(directory)

    monkeypatch.setattr(prune_module, "try_exclude", dump_and_lock)
    found = reasons(store, LAST_ONE)
    assert found["fast"] == ("new",)
    assert found["a-more"] == ("needed by fast",)
    assert names(store) == ["a-full", "a-more", "b-full", "b-more", "fast"]
    assert is_whole(store / "fast")


def test_a_checkpoint_that_was_replaced_meanwhile_stays(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_chains(store)

    def replace_and_lock(directory: Path) -> object:
        if directory.name == "a-more":
            shutil.rmtree(directory)
            (store / "b-more").rename(directory)
        return try_exclude(directory)

    monkeypatch.setattr(prune_module, "try_exclude", replace_and_lock)
    assert reasons(store, LAST_ONE)["a-more"] == ("changed meanwhile",)
    assert names(store) == ["a-more", "b-full"]
    assert is_whole(store / "a-more")


def test_what_a_killed_prune_left_is_finished(store: Path) -> None:
    two_chains(store)
    trash = f".gpustasis-trash-{'0' * 32}"
    (store / "a-more").rename(store / trash)
    (store / ".gpustasis-trash-of-somebody").mkdir()
    done = prune(store, Rules(last=9))
    assert done.leftovers == [trash]
    assert names(store) == [".gpustasis-trash-of-somebody", "a-full", "b-full", "b-more"]


def test_a_dump_that_found_its_parent_in_the_trash_keeps_it(store: Path) -> None:
    """It had opened the directory before a prune that was killed then renamed it."""
    two_chains(store)
    trash = f".gpustasis-trash-{'0' * 32}"
    (store / "a-more").rename(store / trash)
    make_link(store / "new", {7: memory_of(["A"])}, parent=store / trash, taken=FIRST + 999)
    found = reasons(store, LAST_ONE)
    assert found[trash] == ("needed by new",)
    assert names(store) == [trash, "a-full", "new"]
    assert is_whole(store / "new")


def test_one_prune_at_a_time(store: Path) -> None:
    two_chains(store)
    lock = try_exclude(store)
    assert lock is not None
    with lock, pytest.raises(CheckpointError, match="another prune is at work"):
        prune(store, LAST_ONE)
    assert len(names(store)) == 4


def test_no_rule_is_refused(store: Path) -> None:
    two_chains(store)
    with pytest.raises(CheckpointError, match="needs a rule"):
        prune(store, Rules())
    result = CliRunner().invoke(cli, ["prune", str(store)])
    assert result.exit_code == 2
    assert "at least one --keep rule" in result.output
    assert len(names(store)) == 4


class TestCommand:
    def test_rules_and_lines(self, store: Path) -> None:
        two_chains(store)
        words = ["prune", str(store), "--keep-within", "90s", "--keep-hourly", "1", "--dry-run"]
        result = CliRunner().invoke(cli, words)
        assert result.exit_code == 0, result.output
        assert "a-full: would be removed" in result.output
        assert "b-full: kept (within, needed by b-more)" in result.output
        assert "2 kept, 2 would be removed" in result.output
        assert len(names(store)) == 4

    def test_json(self, store: Path) -> None:
        two_chains(store)
        size = sum(path.lstat().st_size for path in (store / "a-more").iterdir())
        words = ["prune", str(store), "--keep-last", "2", "--keep-daily", "1", "--json"]
        result = CliRunner().invoke(cli, words)
        found = json.loads(result.output)
        assert (found["version"], found["dry_run"], found["leftovers"]) == (1, False, [])
        by_name = {entry["name"]: entry for entry in found["entries"]}
        assert list(by_name) == ["a-full", "a-more", "b-full", "b-more"]
        assert by_name["a-more"]["action"] == "removed"
        assert by_name["a-more"]["bytes"] == size
        assert by_name["b-more"]["parent_id"] == by_name["b-full"]["checkpoint_id"]
        assert by_name["b-more"]["reasons"] == ["last", "daily"]
        assert names(store) == ["b-full", "b-more"]

    @pytest.mark.parametrize("option", [["--keep-last", "0"], ["--keep-within", "soon"]])
    def test_bad_rules(self, store: Path, option: list[str]) -> None:
        result = CliRunner().invoke(cli, ["prune", str(store), *option])
        assert result.exit_code == 2


def test_what_cannot_be_removed_is_an_error_and_still_whole(store: Path) -> None:
    two_chains(store)
    make_link(store / "c", {7: memory_of(["x"])}, taken=FIRST + 999)
    subprocess.run(["mount", "--bind", store / "a-more", store / "a-more"], check=True)
    try:
        with pytest.raises(CheckpointError, match=r"cannot remove .*a-more"):
            prune(store, Rules(within=timedelta(seconds=1)))
        assert is_whole(store / "a-more")
    finally:
        subprocess.run(["umount", store / "a-more"], check=True)
