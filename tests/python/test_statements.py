# SPDX-License-Identifier: Apache-2.0
"""Statements: every file of a directory that is signed counts."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from gpustasis._core import CorruptDataError, SignedStatement, make_statement
from gpustasis.errors import SealError
from gpustasis.sealing.signing import SignerFile, sign, verify_signed
from support.certificates import Pair
from support.signatures import (
    LEFT,
    PIECE,
    SIGNATURE,
    STATEMENT,
    digest_of,
    make_signer,
    parse_statement,
    require_signed,
    signed_directory,
)

GOLDEN_DATE = "2026-11-23 23:12:46 UTC"
GOLDEN_DIGEST = "d414b085826eb06778483ba35564dc849e643359f69ed9747878ba6e54985bed"
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "changed": (lambda d: (d / "pages-1.img").write_bytes(b"PAGES"), "pages-1.img is not the file"),
    "longer": (lambda d: (d / "pages-1.img").write_bytes(b"pages."), "5 were signed"),
    "removed": (lambda d: (d / "pages-1.img").unlink(), "pages-1.img is missing"),
    "added": (lambda d: (d / "pages-2.img").touch(), "pages-2.img was added"),
    "hidden": (lambda d: (d / ".x.part").touch(), ".x.part was added"),
    "renamed": (lambda d: (d / "pages-1.img").rename(d / "pages-2.img"), "pages-2.img was added"),
    "a link": (lambda d: (d / "parent").symlink_to("..", True), "parent was added"),
    "a directory": (lambda d: (d / "parent").mkdir(), "parent was added"),
    "linked": (
        lambda d: (
            (d / "pages-1.img").rename(d.parent / "x"),
            (d / "pages-1.img").symlink_to("../x"),
        ),
        "pages-1.img: Too many levels",
    ),
    "a FIFO": (
        lambda d: ((d / "pages-1.img").unlink(), os.mkfifo(d / "pages-1.img")),
        "pages-1.img is no ordinary file",
    ),
    "no statement": (lambda d: (d / STATEMENT).unlink(), "is not signed"),
    "no signature": (lambda d: (d / SIGNATURE).unlink(), "is not signed"),
    "an empty signature": (lambda d: (d / SIGNATURE).write_bytes(b""), "no CMS"),
    "another statement": (
        lambda d: (d / STATEMENT).write_bytes((d / STATEMENT).read_bytes().replace(b" 5 ", b" 6 ")),
        "not that of this statement",
    ),
}


@pytest.fixture
def me(tmp_path: Path) -> Pair:
    return make_signer(tmp_path, "me")


@pytest.fixture
def signed(tmp_path: Path, me: Pair) -> Path:
    return signed_directory(tmp_path / "checkpoint", me)


def test_what_is_signed(signed: Path, me: Pair) -> None:
    statement = require_signed(signed, me.certificate)
    assert statement.parent is None
    assert list(statement.files) == ["inventory.img", "pages-1.img"]
    for name in LEFT:  # written later than the signature
        (signed / name).write_text("as it is now")
    (found,) = verify_signed(signed, [me.certificate])
    assert (found.subject, found.key, found.files, found.warning) == ("CN=me", "EC P-256", 2, "")
    for name in (STATEMENT, SIGNATURE):
        assert (signed / name).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_not_as_it_was_signed(damage: str, signed: Path, me: Pair) -> None:
    do, said = DAMAGE[damage]
    do(signed)
    with pytest.raises(SealError) as raised:
        verify_signed(signed, [me.certificate])
    assert said in str(raised.value)


def test_a_file_of_several_pieces(tmp_path: Path, me: Pair) -> None:
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    (directory / "inventory.img").touch()
    for name, size in {"one": PIECE, "two": PIECE + 1, "four": 3 * PIECE + 5}.items():
        with (directory / name).open("wb") as file:
            file.truncate(size)
            file.seek(size - 1)
            file.write(b"x")
    sign(directory, SignerFile(me.key, me.certificate), threads=3)
    statement = require_signed(directory, me.certificate)
    assert statement.files["two"][0] == digest_of(directory / "two")
    with (directory / "four").open("r+b") as file:
        file.seek(2 * PIECE)
        file.write(b"y")
    with pytest.raises(SealError, match="four is not the file that was signed"):
        verify_signed(directory, [me.certificate])


STATEMENTS = {
    "version": (b"statement 1", b"statement 2", "version '2'"),
    "title": (b"gpustasis", b"Gpustasis", "is missing"),
    "parent": (b"parent none", b"parent " + b"0" * 63, "has not 64 digits"),
    "digits": (b"parent none", b"parent " + b"g" * 64, "no digit"),
    "count": (b"files 2", b"files 3", "has not the 3 files"),
    "fewer": (b"files 2", b"files 1", "has not the 1 files"),
    "zeros": (b"files 2", b"files 02", "a number is none"),
    "sign": (b" 5 ", b" +5 ", "a number is none"),
    "huge": (b" 5 ", b" 99999999999999999999 ", "a number is none"),
    "path": (b"pages-1.img", b"../pages", "no checkpoint has"),
    "space": (b"pages-1.img", b"pages 1.img", "no checkpoint has"),
    "no name": (b" pages-1.img", b"", "not three words"),
    "order": (b"inventory.img", b"zinventory.im", "not in order"),
    "twice": (b"pages-1.img", b"inventory.img", "not in order"),
    "end": (b"pages-1.img\n", b"pages-1.img", "has no end"),
    "more": (b"pages-1.img\n", b"pages-1.img\n\n", "has not the 2 files"),
}


@pytest.mark.parametrize("case", STATEMENTS)
def test_statements_that_are_none(case: str, signed: Path, me: Pair) -> None:
    """Signed by one who is trusted, whose program is wrong."""
    before, after, said = STATEMENTS[case]
    text = (signed / STATEMENT).read_bytes()
    assert text.count(before) == 1
    (signed / STATEMENT).write_bytes(text.replace(before, after))
    words = ["openssl", "cms", "-sign", "-binary", "-outform", "DER", "-signer", me.certificate]
    (signed / SIGNATURE).write_bytes(
        subprocess.run(
            [*words, "-inkey", me.key, "-in", signed / STATEMENT], capture_output=True, check=True
        ).stdout
    )
    with pytest.raises(Exception, match=said):
        SignedStatement.read(signed, [me.certificate.read_bytes()])


@pytest.mark.parametrize("name", [".inventory.img.part", "a name.img", "a\nb", "-x", "ä.img"])
def test_names_that_are_not_signed(name: str, signed: Path) -> None:
    (signed / name).touch()
    with pytest.raises(ValueError, match="is not signed"):
        make_statement(signed)


def test_links_are_not_signed(signed: Path) -> None:
    (signed / "parent").symlink_to("..")
    with pytest.raises(ValueError, match="parent is no ordinary file"):
        make_statement(signed)


@pytest.mark.parametrize("what", ["directory", "file", "statement"])
def test_where_others_can_write(what: str, signed: Path, me: Pair) -> None:
    path = {"directory": signed, "file": signed / "pages-1.img", "statement": signed / STATEMENT}
    path[what].chmod(0o770)
    verify_signed(signed, [me.certificate])
    with pytest.raises(SealError, match="others can write there"):
        verify_signed(signed, [me.certificate], own=True)
    path[what].chmod(0o700)
    verify_signed(signed, [me.certificate], own=True)


def test_another_checkpoint_s_signature(signed: Path, tmp_path: Path, me: Pair) -> None:
    other = shutil.copytree(signed, tmp_path / "other")
    (other / "pages-1.img").write_bytes(b"older")
    sign(other, SignerFile(me.key, me.certificate))
    for name in (STATEMENT, SIGNATURE):
        shutil.copy(other / name, signed / name)
    with pytest.raises(SealError, match=r"pages-1.img is not the file that was signed"):
        verify_signed(signed, [me.certificate])


def test_statements_are_read_once(signed: Path, me: Pair) -> None:
    """A statement of one checkpoint is asked of another one's files."""
    found = SignedStatement.read(signed, [me.certificate.read_bytes()])
    assert parse_statement((signed / STATEMENT).read_bytes()).parent is None
    assert found.parent is None
    (signed / "pages-1.img").write_bytes(b"SEGAP")
    with pytest.raises(CorruptDataError, match="is not the file that was signed"):
        found.check(signed)
    found.check(signed, for_others=True)  # which read nothing of CRIU's


def test_what_was_signed_once_is_read_for_ever(repository: Path) -> None:
    """A signed chain of two in tests/data, by this reader and by what docs/format.md says."""
    place = repository / "tests" / "data" / "signed" / "v1"
    found = verify_signed(place / "second", [place / "signer.pem"])
    assert [(one.subject, one.files, one.date) for one in found] == [
        ("CN=golden", 2, GOLDEN_DATE),
        ("CN=golden", 2, GOLDEN_DATE),
    ]
    assert require_signed(place / "first", place / "signer.pem").parent is None
    statement = require_signed(place / "second", place / "signer.pem")
    assert statement.parent == digest_of(place / "first" / STATEMENT)
    assert statement.files["pages-1.img"] == (GOLDEN_DIGEST, 5 * 256)
