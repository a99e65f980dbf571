# SPDX-License-Identifier: Apache-2.0
"""Whatever is changed in a sealed checkpoint's directory, `unseal` refuses it, and leaves
nothing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gpustasis._core import ENVELOPE_NAME, MAX_ENVELOPE_SIZE, SEALED_NAME
from gpustasis.errors import ImageError, SealError, UnsupportedError
from gpustasis.sealing.keys import KeyFile
from gpustasis.sealing.recipients import read_recipients
from gpustasis.sealing.seal import seal
from gpustasis.sealing.unseal import rewrap, unseal
from support.certificates import Pair
from support.inventory import write_inventory
from support.recipients import make_recipient

INVENTORY = "inventory.img"
FRAME = 4096
Make = Callable[[str], Path]


@pytest.fixture(scope="module", params=["rsa", "SECP256R1"])
def me(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_recipient(tmp_path_factory.mktemp("me"), kind=request.param)


@pytest.fixture
def make(tmp_path: Path, me: Pair) -> Make:
    """make(name): a sealed checkpoint of the same job."""

    def make_one(name: str) -> Path:
        directory = tmp_path / f"{name}-plain"
        directory.mkdir()
        write_inventory(directory)
        (directory / "core-1.img").write_bytes(b"core of the job")
        (directory / "pages-1.img").write_bytes(bytes(range(256)) * 20)
        seal(directory, read_recipients([me.certificate]), tmp_path / name, frame_size=FRAME)
        return tmp_path / name

    return make_one


def refused(sealed: Path, me: Pair, out: Path) -> None:
    with pytest.raises((SealError, UnsupportedError)):
        unseal(sealed, KeyFile(me.key), out)
    assert not out.exists()
    assert not out.with_name(f".{out.name}.part").exists()


@pytest.mark.parametrize("name", [INVENTORY, ENVELOPE_NAME, SEALED_NAME])
def test_every_byte_counts(make: Make, me: Pair, name: str, tmp_path: Path) -> None:
    sealed = make("one")
    out = tmp_path / "out"
    unseal(sealed, KeyFile(me.key), out)
    shutil.rmtree(out)
    raw = (sealed / name).read_bytes()
    # tests/cpp/seal goes through each byte of a sealed file: here, all at its ends, some between.
    places = [at for at in range(len(raw)) if at < 300 or at > len(raw) - 300 or at % 97 == 0]
    for at in places:
        changed = bytearray(raw)
        changed[at] ^= 1 << at % 8
        (sealed / name).write_bytes(changed)
        refused(sealed, me, out)


@pytest.mark.parametrize("name", [INVENTORY, ENVELOPE_NAME, SEALED_NAME])
def test_every_length_counts(make: Make, me: Pair, name: str, tmp_path: Path) -> None:
    sealed = make("one")
    raw = (sealed / name).read_bytes()
    for size in [*range(min(len(raw), 600)), len(raw) - 1]:
        (sealed / name).write_bytes(raw[:size])
        refused(sealed, me, tmp_path / "out")
    (sealed / name).write_bytes(raw + b"\0")
    refused(sealed, me, tmp_path / "out")
    (sealed / name).unlink()
    refused(sealed, me, tmp_path / "out")


@pytest.mark.parametrize("names", [{ENVELOPE_NAME}, {SEALED_NAME}])
def test_files_of_another_checkpoint_of_the_same_job(
    make: Make, me: Pair, names: set[str], tmp_path: Path
) -> None:
    one, two = make("one"), make("two")
    for name in names:
        shutil.copy(two / name, one / name)
    refused(one, me, tmp_path / "out")


def test_another_inventory(make: Make, me: Pair, tmp_path: Path) -> None:
    sealed = make("one")
    (sealed / INVENTORY).write_bytes(b"Inventory")
    with pytest.raises(SealError, match="not the one that was sealed"):
        unseal(sealed, KeyFile(me.key), tmp_path / "out")
    (sealed / INVENTORY).unlink()
    (sealed / INVENTORY).symlink_to("/etc/hostname")
    refused(sealed, me, tmp_path / "out")


def test_files_that_were_added_are_not_taken(make: Make, me: Pair, tmp_path: Path) -> None:
    sealed = make("one")
    (sealed / "core-2.img").write_bytes(b"code of somebody else")
    unseal(sealed, KeyFile(me.key), tmp_path / "out")
    assert sorted(os.listdir(tmp_path / "out")) == ["core-1.img", INVENTORY, "pages-1.img"]


def test_hostile_envelopes(make: Make, me: Pair, tmp_path: Path) -> None:
    sealed = make("one")
    envelope = sealed / ENVELOPE_NAME
    for raw in (
        bytes(MAX_ENVELOPE_SIZE + 1),
        b"\x30\x80" * 100_000,  # depth
        b"\x30\x84\xff\xff\xff\xff" + bytes(100),  # a length beyond the end
        b"\x30\x82\x01\x00" + os.urandom(300),
        bytes(33),
    ):
        envelope.write_bytes(raw)
        refused(sealed, me, tmp_path / "out")
    envelope.unlink()
    os.mkfifo(envelope)
    refused(sealed, me, tmp_path / "out")
    envelope.unlink()
    envelope.symlink_to("/dev/zero")
    refused(sealed, me, tmp_path / "out")


def test_a_sealed_file_that_is_none(make: Make, me: Pair, tmp_path: Path) -> None:
    sealed = make("one")
    place = sealed / SEALED_NAME
    place.unlink()
    os.mkfifo(place)
    refused(sealed, me, tmp_path / "out")
    place.unlink()
    place.mkdir()
    with pytest.raises(ImageError):
        unseal(sealed, KeyFile(me.key), tmp_path / "out")


@pytest.mark.parametrize("name", [ENVELOPE_NAME, INVENTORY])
def test_links_are_not_followed(make: Make, me: Pair, name: str, tmp_path: Path) -> None:
    """Also where they lead to the right file: whoever made one can make it lead elsewhere."""
    sealed = make("one")
    (sealed / name).rename(tmp_path / "moved")
    (sealed / name).symlink_to(tmp_path / "moved")
    refused(sealed, me, tmp_path / "out")


def test_rewrap_gives_no_key_to_what_it_does_not_open(make: Make, me: Pair) -> None:
    one, two = make("one"), make("two")
    shutil.copy(two / SEALED_NAME, one / SEALED_NAME)
    before = (one / ENVELOPE_NAME).read_bytes()
    with pytest.raises(SealError, match="another sealed checkpoint"):
        rewrap(one, KeyFile(me.key), read_recipients([me.certificate]))
    assert (one / ENVELOPE_NAME).read_bytes() == before
