# SPDX-License-Identifier: Apache-2.0
"""`gpustasis prune` of sealed checkpoints: they count, their chains stay whole, and where a chain
cannot be told without the key nothing is removed."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from pathlib import Path

import pytest

from gpustasis import oci_hook, policy
from gpustasis._core import (
    ENVELOPE_NAME,
    PARENT_LINK,
    SEALED_NAME,
    CorruptDataError,
    DataKey,
    ancestors_of,
)
from gpustasis.errors import CheckpointError
from gpustasis.image import prune as prune_module
from gpustasis.image.directory import share, try_exclude
from gpustasis.image.prune import Rules, prune
from gpustasis.sealing.files import manifest_opener
from gpustasis.sealing.keys import KeyFile
from support.certificates import Pair
from support.chains import make_link, memory_of
from support.command import call
from support.json_output import check_document
from support.recipients import make_recipient
from support.sealed_chains import make_sealed

FIRST = 1_800_000_000.0
LAST_ONE = Rules(last=1)


@pytest.fixture(scope="module")
def me(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_recipient(tmp_path_factory.mktemp("me"))


@pytest.fixture
def store(tmp_path: Path, me: Pair) -> Path:
    """a-full <- a-more <- a-most, then b-full <- b-more."""
    place = tmp_path / "store"
    place.mkdir()
    chain = (("a-full", ""), ("a-more", "a-full"), ("a-most", "a-more"), ("b-full", ""))
    for number, (name, parent) in enumerate((*chain, ("b-more", "b-full"))):
        make_sealed(place, tmp_path / "plain", name, me, parent=parent, taken=FIRST + 60 * number)
    return place


def names(store: Path) -> list[str]:
    return sorted(path.name for path in store.iterdir())


def reasons(store: Path, rules: Rules = LAST_ONE) -> dict[str, tuple[str, ...]]:
    return {verdict.entry.name: verdict.reasons for verdict in prune(store, rules).verdicts}


def with_key(store: Path, pair: Pair) -> dict[str, tuple[str, ...]]:
    done = prune(store, LAST_ONE, open_sealed=manifest_opener(KeyFile(pair.key)))
    return {verdict.entry.name: verdict.reasons for verdict in done.verdicts}


def refused(store: Path, why: str) -> None:
    """Nothing is removed."""
    before = names(store)
    with pytest.raises(CheckpointError, match=why) as caught:
        prune(store, LAST_ONE)
    assert "nothing was removed" in str(caught.value)
    assert names(store) == before


def opens(directory: Path, pair: Pair) -> int:
    """How many it is built on, by its own envelope."""
    return DataKey.unwrap((directory / ENVELOPE_NAME).read_bytes(), pair.key).ancestor_count


def test_chains_are_kept_whole(store: Path, me: Pair) -> None:
    found = reasons(store)
    assert names(store) == ["b-full", "b-more"]
    assert (found["b-full"], found["b-more"]) == (("needed by b-more",), ("last",))
    assert opens(store / "b-more", me) == 1


def test_a_chain_of_three_is_kept_whole(store: Path) -> None:
    for name in ("b-full", "b-more"):
        shutil.rmtree(store / name)
    found = reasons(store)
    assert names(store) == ["a-full", "a-more", "a-most"]
    assert found["a-full"] == ("needed by a-more",)


def test_beside_those_in_the_clear(store: Path) -> None:
    make_link(store / "open", {7: memory_of(["x"])}, taken=FIRST + 150)
    make_link(store / "open-more", {7: memory_of(["x"])}, parent=store / "open", taken=FIRST + 999)
    prune(store, Rules(last=2))
    assert names(store) == ["b-full", "b-more", "open", "open-more"]


def test_how_many_it_is_built_on_is_told_by_the_envelope_alone(store: Path) -> None:
    found = {
        path.name: ancestors_of((path / ENVELOPE_NAME).read_bytes()) for path in store.iterdir()
    }
    assert found == {"a-full": 0, "a-more": 1, "a-most": 2, "b-full": 0, "b-more": 1}
    envelope = (store / "a-most" / ENVELOPE_NAME).read_bytes()
    for wrong in (b"", b"x" * 99, envelope[:-33], envelope[1:], b"\x30\x80" + envelope):
        with pytest.raises(CorruptDataError):
            ancestors_of(wrong)


def unlink(store: Path, name: str) -> None:
    (store / name / PARENT_LINK).unlink()


def relink(store: Path, name: str, target: str) -> None:
    unlink(store, name)
    (store / name / PARENT_LINK).symlink_to(target)


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("", "leads nowhere"),
        ("../nowhere", "leads to none that fits"),
        ("../a-more", "leads to none that fits"),  # which is built on one itself
        ("../../plain/b-full", "leads to none that fits"),  # in the clear
        ("..", "leads to none that fits"),
    ],
)
def test_a_link_that_tells_nothing(store: Path, me: Pair, target: str, why: str) -> None:
    """Then the key does: the manifest has the parent's id."""
    unlink(store, "b-more")
    if target:
        (store / "b-more" / PARENT_LINK).symlink_to(target)
    refused(store, f"b-more is built on cannot be told: it is sealed, on 1 earlier .* {why}")
    with_key(store, me)
    assert {"b-full", "b-more"} <= set(names(store))
    assert ("a-most" in names(store)) is False


def test_a_parent_that_was_moved_is_known_by_its_id(store: Path, me: Pair) -> None:
    (store / "b-full").rename(store / "0-moved")
    refused(store, "b-more is built on cannot be told")
    found = with_key(store, me)
    assert names(store) == ["0-moved", "b-more"]
    assert found["0-moved"] == ("needed by b-more",)


def test_one_in_the_middle_whose_envelope_is_gone(store: Path) -> None:
    """It is not needed for those that are built on it; its link is."""
    for name in ("b-full", "b-more"):
        shutil.rmtree(store / name)
    (store / "a-more" / ENVELOPE_NAME).unlink()
    found = reasons(store)
    assert f"{ENVELOPE_NAME} is missing" in found["a-more"][0]
    assert names(store) == ["a-full", "a-more", "a-most"]
    unlink(store, "a-more")
    refused(store, "a-more is built on cannot be told: it is sealed, on an unknown number")


def test_a_key_that_opens_none(store: Path, tmp_path: Path) -> None:
    """Who has another key removes nothing; what they are built on is told by the links."""
    other = make_recipient(tmp_path, "other")
    before = names(store)
    found = with_key(store, other)
    assert names(store) == before
    assert all("for another key" in why[0] for why in found.values())
    unlink(store, "b-more")
    with pytest.raises(CheckpointError, match="b-more is built on cannot be told"):
        with_key(store, other)


def test_what_cannot_be_opened_is_left_alone(store: Path, me: Pair) -> None:
    path = store / "a-more" / SEALED_NAME
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    os.utime(path, (FIRST + 60, FIRST + 60))
    found = with_key(store, me)
    assert str(path) in found["a-more"][0]
    assert names(store) == ["a-full", "a-more", "b-full", "b-more"]


def test_what_is_not_done_or_not_ours_stays(store: Path) -> None:
    (store / "a-most" / "inventory.img").unlink()
    (store / "b-full" / "below").mkdir()
    (store / "latest").symlink_to("b-more")
    done = prune(store, LAST_ONE)
    assert names(store) == ["a-full", "a-more", "a-most", "b-full", "b-more", "latest"]
    found = {
        verdict.entry.name: (str(verdict.action), verdict.reasons) for verdict in done.verdicts
    }
    assert found["a-most"][1] == ("no inventory.img: a dump that is not done or was broken off",)
    assert found["latest"] == ("ignored", (f"a link to {store / 'b-more'}",))


def test_one_in_use_stays_with_what_it_needs(store: Path) -> None:
    with share(store / "a-most"):
        assert reasons(store)["a-most"] == ("in use",)
    assert len(names(store)) == 5


def test_what_a_killed_prune_left_is_finished_however_much_is_left(store: Path) -> None:
    for number, name in enumerate(("a-full", "a-most")):
        (store / name).rename(store / f".gpustasis-trash-{number:032}")
    (store / f".gpustasis-trash-{1:032}" / PARENT_LINK).unlink()
    shutil.rmtree(store / "a-more")
    prune(store, LAST_ONE)
    assert names(store) == ["b-full", "b-more"]


def test_another_one_in_its_place_stays(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    def replace_and_lock(directory: Path) -> object:
        if directory.name == "a-most":
            shutil.rmtree(directory)
            (store / "b-full").rename(directory)
            shutil.rmtree(store / "b-more")
        return try_exclude(directory)

    monkeypatch.setattr(prune_module, "try_exclude", replace_and_lock)
    assert reasons(store)["a-most"] == ("changed meanwhile",)
    assert names(store) == ["a-most"]


class TestCommand:
    def test_with_a_key(self, store: Path, me: Pair) -> None:
        relink(store, "b-more", "../nowhere")
        done = call("prune", store, "--keep-last", "1")
        assert (done.exit_code, "--key" in done.output) == (3, True)
        words = ("prune", store, "--keep-last", "1", "--json", "--key", me.key)
        found = check_document(call(*words).stdout, "prune")["entries"]
        by_name = {entry["name"]: entry for entry in found}
        assert by_name["b-more"]["parent_id"] == by_name["b-full"]["checkpoint_id"] is not None
        assert by_name["a-full"]["action"] == "removed"
        assert names(store) == ["b-full", "b-more"]

    def test_with_a_key_command(self, store: Path, me: Pair) -> None:
        relink(store, "b-more", "../nowhere")
        words = ("openssl", "cms", "-decrypt", "-inform", "DER", "-inkey", str(me.key))
        key = ("--key-command", shlex.join(words))
        done = call("prune", store, "--keep-last", "1", "--dry-run", *key)
        assert "2 kept, 3 would be removed" in done.output
        assert len(names(store)) == 5

    def test_list_and_verify_say_that_they_are_sealed(self, store: Path) -> None:
        (found, *_) = json.loads(call("list", store, "--json").stdout)["entries"]
        assert (found["complete"], found["checkpoint_id"]) == (False, None)
        assert "is sealed: its files are encrypted" in found["problem"]
        assert found["taken"] is not None
        done = call("verify", store)
        assert (done.exit_code, "every checkpoint in it is sealed" in done.output) == (14, True)


def test_keep_of_a_policy(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the hook applies it, without a key."""
    identity = "ab" * 32
    store.rename(store.with_name(identity))
    for path in (store.parent, store.with_name(identity)):
        path.chmod(0o700)
    monkeypatch.setattr(policy, "STORE_DIRECTORY", str(store.parent))
    oci_hook.apply_retention(identity, 1)
    assert names(store.with_name(identity)) == ["b-full", "b-more"]
