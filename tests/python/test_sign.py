# SPDX-License-Identifier: Apache-2.0
"""`gpustasis sign` and `verify --trusted`: what is built on what, programs that sign, streams."""

from __future__ import annotations

import io
import json
import shlex
import shutil
import socket
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from gpustasis.cli.stream_checks import require_signed as require_signed_stream
from gpustasis.errors import SealError
from gpustasis.sealing.signing import SignerCommand, SignerFile, sign, verify_signed
from gpustasis.streaming.answers import Replies
from gpustasis.streaming.channel import Descriptor
from gpustasis.streaming.receive import Source, receive
from gpustasis.streaming.records import Kind
from support.certificates import Pair
from support.chains import make_link, memory_of
from support.command import call
from support.json_output import check_document
from support.recipients import DAY, make_recipient
from support.signatures import (
    SIGNATURE,
    STATEMENT,
    digest_of,
    make_signer,
    require_signed,
    signed_directory,
)
from support.streams import FILES, a_run, stream_of

MEMORY = [memory_of(["a1", "0", "A2", last] * 4) for last in ("b1", "b2", "b3")]


@pytest.fixture
def me(tmp_path: Path) -> Pair:
    return make_signer(tmp_path, "me")


@pytest.fixture
def signed(tmp_path: Path, me: Pair) -> Path:
    return signed_directory(tmp_path / "checkpoint", me)


@pytest.fixture
def small_checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    make_link(tmp_path / "store" / "one", {7: MEMORY[0]})
    return tmp_path / "store" / "one"


@pytest.fixture
def chain(tmp_path: Path, me: Pair) -> list[Path]:
    """Three, each built on the one before, and signed."""
    directories: list[Path] = []
    (tmp_path / "store").mkdir()
    for number, memory in enumerate(MEMORY):
        directories.append(tmp_path / "store" / str(number))
        make_link(directories[-1], {7: memory}, parent=directories[-2] if number else None)
        sign(directories[-1], SignerFile(me.key, me.certificate))
    return directories


def test_a_chain(chain: list[Path], me: Pair) -> None:
    found = verify_signed(chain[2], [me.certificate])
    assert [one.directory.name for one in found] == ["2", "1", "0"]
    for directory, parent in zip(chain[1:], chain, strict=False):
        stated = require_signed(directory, me.certificate).parent
        assert stated == digest_of(parent / STATEMENT)
    done = call("verify", chain[2], "--trusted", me.certificate)
    assert done.exit_code == 0 and done.stdout.count("signed by CN=me") == 3, done.output


CHAIN_DAMAGE: dict[str, tuple[Callable[[list[Path], Pair], object], str]] = {
    "an image of the first": (
        lambda chain, me: _append(chain[0] / "gpustasis-7.img"),
        "gpustasis-7.img has",
    ),
    "a manifest between": (
        lambda chain, me: _flip(chain[1] / "gpustasis-manifest.img"),
        "gpustasis-manifest.img is not the file",
    ),
    "an image more": (
        lambda chain, me: (chain[0] / "gpustasis-8.img").touch(),
        "gpustasis-8.img was added",
    ),
    "a parent without a signature": (
        lambda chain, me: (chain[1] / SIGNATURE).unlink(),
        "is not signed",
    ),
    "a parent signed anew": (
        lambda chain, me: (
            (chain[1] / "new").touch(),
            sign(chain[1], SignerFile(me.key, me.certificate)),
        ),
        "another one, or an older one",
    ),
    "a first one in the place of the parent": (
        lambda chain, me: _take_place(chain[0], chain[1]),
        "another one, or an older one",
    ),
    "no link": (lambda chain, me: (chain[1] / "gpustasis-parent").unlink(), "names a parent"),
}


@pytest.mark.parametrize("case", CHAIN_DAMAGE)
def test_a_chain_that_is_not_as_it_was_signed(case: str, chain: list[Path], me: Pair) -> None:
    do, said = CHAIN_DAMAGE[case]
    do(chain, me)
    with pytest.raises(SealError) as raised:
        verify_signed(chain[2], [me.certificate])
    assert said in str(raised.value)


def test_on_top_of_what_nobody_has_signed(tmp_path: Path, chain: list[Path], me: Pair) -> None:
    (chain[2] / SIGNATURE).unlink()
    last = tmp_path / "store" / "last"
    make_link(last, {7: MEMORY[0]}, parent=chain[2])
    with pytest.raises(SealError, match="is not signed"):
        sign(last, SignerFile(me.key, me.certificate))
    assert not (last / STATEMENT).exists()


def _append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _take_place(source: Path, target: Path) -> None:
    shutil.rmtree(target)
    shutil.copytree(source, target, symlinks=True)


def test_the_command(signed: Path, tmp_path: Path, me: Pair) -> None:
    other = make_signer(tmp_path, "other", end=-DAY, begin=-2 * DAY)
    words = ("sign", signed, "--key", other.key, "--certificate", other.certificate)
    done = call(*words)
    assert done.exit_code == 0, done.output
    assert "2 files signed by CN=other" in done.stdout
    assert "warning: the certificate of CN=other has expired" in done.output
    document = check_document(call(*words, "--json").stdout, "sign")
    assert document["signature"]["subject"] == "CN=other" and document["signature"]["files"] == 2
    require_signed(signed, other.certificate)
    refused = call("verify", signed, "--trusted", me.certificate)
    assert refused.exit_code == 14 and "CN=other, who is not trusted" in refused.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "name one private key"),
        (["--key", "{key}", "--key-command", "x"], "name one private key"),
        (["--key-command", "x"], "needs --certificate"),
        (["--key-command", "'x", "--certificate", "{certificate}"], "cannot be split"),
        (["--key-command", " ", "--certificate", "{certificate}"], "is empty"),
    ],
)
def test_options_that_do_not_go_together(
    words: list[str], said: str, signed: Path, me: Pair
) -> None:
    before = (signed / SIGNATURE).read_bytes()
    named = [word.format(key=me.key, certificate=me.certificate) for word in words]
    done = call("sign", signed, *named)
    assert done.exit_code == 2 and said in done.output
    assert (signed / SIGNATURE).read_bytes() == before


def test_what_is_no_checkpoint(tmp_path: Path, me: Pair) -> None:
    with pytest.raises(SealError, match=r"no inventory.img"):
        sign(tmp_path, SignerFile(me.key, me.certificate))


def command(pair: Pair, *more: str) -> str:
    words = ("openssl", "cms", "-sign", "-binary", "-outform", "DER")
    return shlex.join([*words, "-signer", str(pair.certificate), "-inkey", str(pair.key), *more])


def test_a_program_that_signs(signed: Path, me: Pair, tmp_path: Path) -> None:
    other = make_signer(tmp_path, "other")
    words = ("--certificate", other.certificate)
    done = call("sign", signed, "--key-command", command(other), *words)
    assert done.exit_code == 0, done.output
    assert verify_signed(signed, [other.certificate])[0].subject == "CN=other"
    refused = {
        command(me): "not trusted",
        command(other, "-nodetach"): "no detached",
        "false": "false did not sign (exit 1)",
        "true": "no CMS",
        "no-such-program-1": "cannot run no-such-program-1",
        "head -c 400000 /dev/zero": "longer than",
    }
    before = (signed / SIGNATURE).read_bytes()
    for program, said in refused.items():
        with pytest.raises(SealError) as raised:
            sign(signed, SignerCommand(shlex.split(program), other.certificate))
        assert said in str(raised.value)
        assert (signed / SIGNATURE).read_bytes() == before


def test_sealed_and_signed(small_checkpoint: Path, tmp_path: Path, me: Pair) -> None:
    """What was signed before it was sealed is signed again when it is unsealed, and what is
    sealed can be signed as it is; new recipients change nothing of it."""
    reader, signer = make_recipient(tmp_path, "reader"), SignerFile(me.key, me.certificate)
    sign(small_checkpoint, signer)
    out, opened = tmp_path / "out", tmp_path / "opened"
    words = ("seal", small_checkpoint, "--to", reader.certificate, "-o", out, "--json")
    done = call(*words, "--sign", me.key, "--sign-certificate", me.certificate)
    assert done.exit_code == 0, done.output
    assert check_document(done.stdout, "seal")["signature"]["directory"] == str(out)
    require_signed(out, me.certificate)
    keyed = ("--key", reader.key)
    assert call("rewrap", out, *keyed, "--to", reader.certificate).exit_code == 0
    found = check_document(
        call("verify", out, "--trusted", me.certificate, "--json").stdout, "verify"
    )
    assert [one["subject"] for one in found["signatures"]] == ["CN=me"]
    assert call("unseal", out, *keyed, "-o", opened).exit_code == 0
    assert verify_signed(opened, [me.certificate])[0].files > 1
    whole = call("verify", opened, "--trusted", me.certificate)
    assert whole.exit_code == 0 and "signed by CN=me" in whole.stdout
    sealed = out / "gpustasis-sealed.img"
    sealed.write_bytes(sealed.read_bytes()[:-1] + b"\0")
    with pytest.raises(SealError, match=r"gpustasis-sealed.img is not the file"):
        verify_signed(out, [me.certificate])


def test_a_flat_copy_is_not_signed(small_checkpoint: Path, tmp_path: Path, me: Pair) -> None:
    sign(small_checkpoint, SignerFile(me.key, me.certificate))
    flat = tmp_path / "flat"
    assert call("flatten", small_checkpoint, "-o", flat).exit_code == 0
    assert not (flat / STATEMENT).exists() and not (flat / SIGNATURE).exists()
    refused = call("verify", flat, "--trusted", me.certificate)
    assert refused.exit_code == 14 and "is not signed" in refused.output


def test_options_of_verify(small_checkpoint: Path, tmp_path: Path, me: Pair) -> None:
    plain = json.loads(call("verify", small_checkpoint, "--json").stdout)
    assert plain["signatures"] == []
    store = tmp_path / "other"
    store.mkdir()
    shutil.copytree(small_checkpoint, store / "one")
    refused = call("verify", store, "--trusted", me.certificate)
    assert refused.exit_code == 2 and "not a store" in refused.output


@pytest.mark.parametrize("case", ["as it was signed", "a file more", "no signature", "by another"])
def test_a_stream_is_checked_before_the_receiver_is_ready(
    case: str, signed: Path, tmp_path: Path, me: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender ends its job only once it is."""
    other = make_signer(tmp_path, "other")
    config = tmp_path / "config.toml"
    trusted = other.certificate if case == "by another" else me.certificate
    config.write_text(f'trusted = ["{trusted}"]\n')
    monkeypatch.setenv("GPUSTASIS_CONFIG", str(config))
    (signed / "inventory.img").write_bytes(FILES["inventory.img"])
    (signed / "pstree.img").write_bytes(FILES["pstree.img"])
    sign(signed, SignerFile(me.key, me.certificate))
    names = ["pages-1.img", "pstree.img", SIGNATURE, STATEMENT, "inventory.img"]
    files = {name: (signed / name).read_bytes() for name in names}
    if case == "a file more":
        files = {"core-1.img": b"core", **files}
    if case == "no signature":
        del files[SIGNATURE]
    answered = io.BytesIO()
    (tmp_path / "job.gps").write_bytes(stream_of(files, Kind.RELEASED))
    near, far = socket.socketpair()
    with (
        (tmp_path / "job.gps").open("rb") as file,
        near,
        far,
        closing(Descriptor(file.fileno(), "it", writing=False)) as stream,
        closing(Descriptor(near.fileno(), "it", writing=True)) as back,
    ):
        source = Source(
            stream=stream,
            replies=Replies(back, 5),
            program="a test",
            place=tmp_path / "in",
            timeout_s=5,
            signed=require_signed_stream,
        )
        if case == "as it was signed":
            receive(source, lambda directory: a_run(5, directory))
        else:
            with pytest.raises(SealError):
                receive(source, lambda directory: a_run(5, directory))
        near.shutdown(socket.SHUT_WR)
        while part := far.recv(1 << 16):
            answered.write(part)
    is_ready = b'"digest"' in answered.getvalue()
    assert is_ready == (tmp_path / "in").exists() == (case == "as it was signed")
