# SPDX-License-Identifier: Apache-2.0
"""A store is checked whole: each image once, and what depends on damage is named."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpustasis._core import (
    Encoding,
    ImageReader,
    Manifest,
    ParentIndex,
    image_name,
    write_image,
    write_manifest,
)
from gpustasis.cli import cli
from gpustasis.errors import ImageError
from gpustasis.image import directory
from gpustasis.image.flatten import flatten
from gpustasis.image.store_verification import StoreVerification, is_store, verify_store
from gpustasis.image.verification import verify_directory
from support.chains import checkpoint_id, make_chain, make_link, memory_of
from support.command import call
from support.deadlines import run_with_deadline
from support.image_samples import PAGE, info_of, noise
from support.inventory import NAMES_IMAGES, images_name, write_inventory
from support.json_output import check_document

IMAGE = image_name(7)


def flip(place: Path, number: int) -> None:
    """One bit of a chunk that the image of pid 7 in `place` holds."""
    path = place / IMAGE
    chunk = ImageReader.open(path).chunk(number)
    assert chunk.source == 0
    assert chunk.encoding != Encoding.ZERO
    raw = bytearray(path.read_bytes())
    raw[chunk.offset + chunk.stored_size // 2] ^= 0x10
    path.write_bytes(raw)


def damaged(found: StoreVerification) -> dict[str, tuple[int, int]]:
    return {v.name: (v.damaged_chunks, v.damaged_elsewhere) for v in found.damaged}


def own_bytes(store: Path) -> int:
    """Stored bytes of all chunks, each counted in the image that holds it."""
    return sum(
        chunk.stored_size
        for path in store.glob(f"*/{IMAGE}")
        for image in [ImageReader.open(path)]
        for chunk in map(image.chunk, range(len(image)))
        if chunk.source == 0
    )


def test_each_image_of_a_chain_is_read_once(tmp_path: Path) -> None:
    make_chain(tmp_path, 5)
    found = verify_store(tmp_path)
    assert [v.name for v in found.verdicts] == [f"c{number:03}" for number in range(6)]
    assert found.damaged == []
    assert found.read_bytes == own_bytes(tmp_path)


def test_what_depends_on_a_damaged_chunk_is_named(tmp_path: Path) -> None:
    """Chunks 0 and 5 of the full one are in all; chunk 2 is c002's own from there on."""
    chain = make_chain(tmp_path, 4)
    flip(chain[0], 0)
    flip(chain[0], 5)
    flip(chain[2], 2)
    found = verify_store(tmp_path)
    assert damaged(found) == {
        "c000": (2, 0),
        "c001": (2, 2),
        "c002": (3, 2),
        "c003": (3, 3),
        "c004": (3, 3),
    }
    (first, *_) = [p for v in found.verdicts if v.name == "c001" for p in v.problems]
    assert first.startswith(f"{chain[1] / IMAGE}: chunk 0 at 0x7f0000000000 is damaged")
    assert str(chain[0] / IMAGE) in first
    assert found.read_bytes == own_bytes(tmp_path)


@pytest.mark.parametrize("name", ["a-copy", "z-copy"])
@pytest.mark.parametrize("spoilt", [False, True])
def test_a_copy_is_checked_by_itself(tmp_path: Path, name: str, *, spoilt: bool) -> None:
    """A flattened copy has the digest of its original, and may be read before or after it."""
    chain = make_chain(tmp_path, 1)
    flatten(chain[0], tmp_path / name)
    assert (
        ImageReader.open(tmp_path / name / IMAGE).digest
        == ImageReader.open(chain[0] / IMAGE).digest
    )
    flip(tmp_path / name if spoilt else chain[0], 0)
    expected = {name: (1, 0)} if spoilt else {"c000": (1, 0), "c001": (1, 1)}
    found = verify_store(tmp_path)
    assert damaged(found) == expected
    assert found.read_bytes == own_bytes(tmp_path)


def test_a_copy_outside_of_the_store_is_checked_by_itself(tmp_path: Path) -> None:
    store, old = tmp_path / "store", tmp_path / "old"
    store.mkdir()
    old.mkdir()
    (full,) = make_chain(old, 0)
    flatten(full, store / "copy")
    words = {7: memory_of(["A0", "a1", "x"])}
    make_link(store / "more", words, parent=full)
    flip(full, 0)
    assert damaged(verify_store(store)) == {"more": (1, 1)}


def test_links_to_checkpoints_are_followed_out_of_the_store(tmp_path: Path) -> None:
    store, old = tmp_path / "store", tmp_path / "old"
    store.mkdir()
    old.mkdir()
    chain = make_chain(old, 1)
    for link in chain:
        (store / link.name).symlink_to(link)
    assert is_store(store)
    found = verify_store(store)
    assert [v.name for v in found.verdicts] == ["c000", "c001"]
    assert found.read_bytes == own_bytes(old)
    flip(chain[0], 0)
    assert damaged(verify_store(store)) == {"c000": (1, 0), "c001": (1, 1)}
    result = CliRunner().invoke(cli, ["verify", str(store)])
    assert isinstance(result.exception, ImageError)


def test_a_link_within_the_store_is_named(tmp_path: Path) -> None:
    make_chain(tmp_path, 1)
    (tmp_path / "latest").symlink_to("c001")
    found = verify_store(tmp_path)
    assert [v.name for v in found.verdicts] == ["c000", "c001"]
    assert found.ignored == {"latest": "a link to c001, which is checked itself"}


def test_a_link_to_what_is_not_checked_by_its_name_is_followed(tmp_path: Path) -> None:
    """A hidden one is ignored: nobody else would look at it."""
    chain = make_chain(tmp_path, 1)
    chain[1].rename(tmp_path / ".a")
    (tmp_path / "latest").symlink_to(".a")
    found = verify_store(tmp_path)
    assert [v.name for v in found.verdicts] == ["c000", "latest"]
    assert list(found.ignored) == [".a"]
    flip(tmp_path / ".a", 1)
    assert damaged(verify_store(tmp_path)) == {"latest": (1, 0)}


@pytest.mark.parametrize("name", [IMAGE, "gpustasis-manifest.img"])
def test_a_fifo_in_a_parent_is_a_problem(tmp_path: Path, name: str) -> None:
    """Nobody writes to it: it must not be waited for."""
    chain = make_chain(tmp_path, 1)
    (chain[0] / name).unlink()
    os.mkfifo(chain[0] / name)
    found = run_with_deadline(lambda: verify_store(tmp_path))
    assert "c000" in {v.name for v in found.damaged}
    assert ("c001" in {v.name for v in found.damaged}) == (name == IMAGE)


def test_what_somebody_keeps_locked_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "PATIENCE_S", 0.2)
    chain = make_chain(tmp_path, 1)
    held = directory.try_exclude(chain[0])
    assert held is not None
    with held:
        found = run_with_deadline(lambda: verify_store(tmp_path))
    assert [v.name for v in found.damaged] == ["c000", "c001"]
    for verdict in found.damaged:
        assert f"{chain[0]} has been locked for 0.2 s" in verdict.problems[0]


def test_the_command_says_what_is_damaged(tmp_path: Path) -> None:
    store, state = tmp_path / "store", tmp_path / "state"
    store.mkdir()
    chain = make_chain(store, 2)
    whole = CliRunner().invoke(cli, ["verify", str(store), "--state", str(state), "--rate", "1GiB"])
    assert whole.exit_code == 0, whole.output
    assert "3 checkpoints whole" in whole.output
    assert not state.exists()
    flip(chain[1], 1)
    result = CliRunner().invoke(cli, ["verify", str(store)])
    assert isinstance(result.exception, ImageError)
    assert result.exception.exit_code == 10
    assert "2 of 3 checkpoints are damaged: c001, c002" in str(result.exception)
    answered = CliRunner().invoke(cli, ["verify", str(store), "--json"])
    found = check_document(answered.stdout, "verify")
    assert [c["damaged_chunks"] for c in found["checkpoints"]] == [0, 1, 1]
    assert isinstance(answered.exception, ImageError)


def test_state_and_rate_are_for_stores(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (one,) = make_chain(tmp_path / "store", 0)
    for words in (["--rate", "1MiB"], ["--state", str(tmp_path / "state")]):
        result = CliRunner().invoke(cli, ["verify", str(one), *words])
        assert result.exit_code == 2
        assert "is no store" in result.output
    for rate in ("fast", "0", "-1MiB", "1TBB"):
        result = CliRunner().invoke(cli, ["verify", str(tmp_path / "store"), "--rate", rate])
        assert result.exit_code == 2


def test_a_missing_image_and_one_that_was_replaced_are_problems(tmp_path: Path) -> None:
    chain = make_chain(tmp_path, 2)
    shutil.copyfile(chain[1] / IMAGE, chain[0] / IMAGE)
    found = verify_store(tmp_path)
    assert [v.name for v in found.damaged] == ["c000", "c001", "c002"]
    assert any("is replaced" in p for v in found.damaged[1:] for p in v.problems)
    (chain[0] / IMAGE).unlink()
    found = verify_store(tmp_path)
    assert [v.name for v in found.damaged] == ["c000", "c001", "c002"]
    assert any("is missing" in p for v in found.damaged[1:] for p in v.problems)


def test_a_damaged_manifest_is_a_problem_and_others_are_ignored(tmp_path: Path) -> None:
    chain = make_chain(tmp_path, 1)
    (chain[1] / "gpustasis-manifest.img").write_bytes(b"nonsense")
    (tmp_path / "other").mkdir()
    make_link(tmp_path / "unfinished", {7: memory_of(["A"])}, finished=False)
    found = verify_store(tmp_path)
    assert [v.name for v in found.damaged] == ["c001"]
    assert sorted(found.ignored) == ["other", "unfinished"]


def test_a_source_outside_of_the_store_is_checked_there(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "store").mkdir()
    words = ["A", "b", "C"]
    make_link(tmp_path / "old" / "full", {7: memory_of(words)})
    make_link(
        tmp_path / "store" / "more",
        {7: memory_of([*words, "D"])},
        parent=tmp_path / "old" / "full",
    )
    assert verify_store(tmp_path / "store").damaged == []
    flip(tmp_path / "old" / "full", 1)
    assert damaged(verify_store(tmp_path / "store")) == {"more": (1, 1)}


def test_the_rate_is_kept(tmp_path: Path) -> None:
    make_link(tmp_path / "full", {7: [(0x7F0000000000, noise(256 * PAGE))]})
    begin = time.monotonic()
    found = verify_store(tmp_path, rate=1 << 20)
    assert found.read_bytes == 256 * PAGE == 1 << 20
    assert time.monotonic() - begin >= 0.95


def test_a_store_is_told_from_a_checkpoint(tmp_path: Path) -> None:
    assert not is_store(tmp_path)
    (chain,) = make_chain(tmp_path, 0)
    assert is_store(tmp_path)
    assert not is_store(chain)


def test_a_rotten_chunk_of_a_parent_is_stored_anew(tmp_path: Path) -> None:
    """And with the index alone it is referred to, unread."""
    parent = tmp_path / "a"
    words = ["A", "b", "0", "C"]
    make_link(parent, {7: memory_of(words)})
    flip(parent, 0)
    flip(parent, 1)
    memory = memory_of(words)
    index = ParentIndex.read(parent)
    info = info_of(memory, 7)
    for check, referred in ((False, 3), (True, 1)):
        path = tmp_path / "b.img"
        written = write_image(path, info, memory, parent=index, check_parent=check)
        assert written.totals.ref.chunks == referred
        assert written.damaged_in_parent == (2 if check else 0)
        assert (IMAGE in written.first_damage) == check
        assert (checkpoint_id("a").hex() in written.first_damage) == check
        own = [n for n in range(4) if ImageReader.open(path).chunk(n).source == 0]
        assert own == ([0, 1, 2] if check else [2])


def test_a_parent_that_is_sound_is_referred_to_after_its_check(tmp_path: Path) -> None:
    chain = make_chain(tmp_path, 3)
    memory = [(0x7F0000000000, b"".join(part for _, part in memory_of(["A0", "a1", "B3", "x"])))]
    index = ParentIndex.read(chain[-1])
    results = [
        write_image(
            tmp_path / f"{check}.img", info_of(memory, 7), memory, parent=index, check_parent=check
        )
        for check in (False, True)
    ]
    assert results[0].digest == results[1].digest
    assert results[1].totals.ref.chunks > 0
    assert results[1].damaged_in_parent == 0


def test_memory_that_a_manifest_does_not_list_is_found(tmp_path: Path) -> None:
    manifest = make_link(tmp_path / "one", {7: memory_of(["A"]), 9: memory_of(["B"])})
    write_inventory(tmp_path / "one", "gpustasis", NAMES_IMAGES, images_name(tmp_path / "one"))
    assert verify_store(tmp_path).damaged == []
    cut = Manifest(checkpoint_id=manifest.checkpoint_id, tasks=manifest.tasks[:1])
    write_manifest(tmp_path / "one", cut)
    (found,) = verify_store(tmp_path).damaged
    (problem,) = found.problems
    assert problem.startswith(f"{tmp_path / 'one'}/gpustasis-manifest.img: does not list the mem")


def test_a_manifest_that_is_gone_is_damage(tmp_path: Path) -> None:
    """By itself the checkpoint is no longer one of ours, but CRIU's inventory says that it was."""
    make_link(tmp_path / "whole", {7: memory_of(["A"])})
    for name, plugins in (("lost", ("gpustasis", NAMES_IMAGES)), ("crius", ("cuda_plugin",))):
        make_link(tmp_path / name, {7: memory_of(["B"])})
        write_inventory(tmp_path / name, *plugins)
        (tmp_path / name / "gpustasis-manifest.img").unlink()
    found = verify_store(tmp_path)
    (verdict,) = found.damaged
    assert verdict.name == "lost" and list(found.ignored) == ["crius"]
    (problem,) = verdict.problems
    assert problem.startswith(f"{tmp_path / 'lost' / 'gpustasis-manifest.img'}: missing: CRIU's in")
    done = call("verify", tmp_path)
    assert done.exit_code == ImageError.exit_code and problem in done.output


def test_a_checkpoint_of_crius_own_plugin_is_called_so(tmp_path: Path) -> None:
    def inventory(*plugins: str) -> bytes:
        entry = b"".join(b"\x62" + bytes([len(name)]) + name.encode() for name in plugins)
        message = b"\x08\x02\x62" + bytes([len(entry)]) + entry
        magic = (0x58313116).to_bytes(4, "little")  # CRIU's others begin with two words
        return magic + len(message).to_bytes(4, "little") + message

    (problem,) = verify_directory(tmp_path).problems
    assert "never finished" in problem
    (tmp_path / "inventory.img").write_bytes(inventory("cuda_plugin"))
    (problem,) = verify_directory(tmp_path).problems
    assert "CRIU's own CUDA plugin" in problem
    (tmp_path / "inventory.img").write_bytes(inventory())
    (problem,) = verify_directory(tmp_path).problems
    assert "nothing of gpustasis's to verify" in problem
    (tmp_path / "inventory.img").write_bytes(b"nonsense")
    (problem,) = verify_directory(tmp_path).problems
    assert "is not an inventory of CRIU" in problem
