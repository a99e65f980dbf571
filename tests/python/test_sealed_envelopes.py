# SPDX-License-Identifier: Apache-2.0
"""Envelopes as OpenSSL could make them, with the right key and code: only those of docs/format.md
are opened, or given to a key command."""

from __future__ import annotations

import hashlib
import hmac
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from gpustasis._core import ENVELOPE_NAME
from gpustasis.errors import SealError, UnsupportedError
from gpustasis.sealing.keys import KeyCommand, KeyFile
from gpustasis.sealing.recipients import read_recipients
from gpustasis.sealing.seal import seal
from gpustasis.sealing.unseal import unseal
from support.certificates import Pair
from support.inventory import write_inventory
from support.plain_sealed import derive
from support.recipients import make_recipient

Run = Callable[..., bytes]
OAEP = ["rsa_padding_mode:oaep", "rsa_oaep_md:sha256"]
ECDH = ["ecdh_kdf_md:sha256"]
NONCE_AND_TAG = b"\x30\x11\x04\x0c"  # SEQUENCE, OCTET STRING of 12; then INTEGER 16


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    directory = tmp_path_factory.mktemp("pairs")
    return {kind: make_recipient(directory, kind, kind) for kind in ("rsa", "SECP256R1")}


@pytest.fixture
def sealed(tmp_path: Path, pairs: dict[str, Pair]) -> Path:
    directory = tmp_path / "one"
    directory.mkdir()
    write_inventory(directory)
    recipients = read_recipients([pair.certificate for pair in pairs.values()])
    seal(directory, recipients, tmp_path / "sealed")
    return tmp_path / "sealed"


@pytest.fixture
def record(sealed: Path, pairs: dict[str, Pair]) -> bytes:
    pair = pairs["rsa"]
    words = ["-decrypt", "-in", sealed / ENVELOPE_NAME, "-inkey", pair.key]
    return openssl_cms(*words, "-recip", pair.certificate, "-inform", "DER")


def openssl_cms(*words: str | Path, given: bytes = b"") -> bytes:
    argv = ["openssl", "cms", *words]
    return subprocess.run(argv, input=given, check=True, capture_output=True, timeout=60).stdout


def put(sealed: Path, record: bytes, cms: bytes) -> None:
    """Make it the envelope, with the code that goes with it."""
    key = derive(record[32:], record[16:32], b"gpustasis envelope", b"")
    (sealed / ENVELOPE_NAME).write_bytes(cms + hmac.digest(key, cms, hashlib.sha256))


def made(record: bytes, pair: Pair, options: list[str], *words: str) -> bytes:
    """CMS with the record, by OpenSSL's own program. options: of how the key is wrapped."""
    given = [word for option in options for word in ("-keyopt", option)]
    cipher = [] if any(word.startswith("-aes-") for word in words) else ["-aes-256-gcm"]
    argv = ["-encrypt", "-binary", "-outform", "DER", *cipher, *words]
    return openssl_cms(*argv, "-recip", pair.certificate, *given, given=record)


@pytest.mark.parametrize(("kind", "options"), [("rsa", OAEP), ("SECP256R1", ECDH)])
def test_what_another_program_makes_by_the_format_is_opened(
    sealed: Path,
    record: bytes,
    pairs: dict[str, Pair],
    kind: str,
    options: list[str],
    tmp_path: Path,
) -> None:
    put(sealed, record, made(record, pairs[kind], options))
    assert unseal(sealed, KeyFile(pairs[kind].key), tmp_path / "out").files == 1


@pytest.mark.parametrize(
    ("kind", "options", "words", "says"),
    [
        ("rsa", [], [], "RSAES-OAEP"),  # PKCS #1 v1.5
        ("rsa", OAEP[:1], [], "RSAES-OAEP"),  # SHA-1
        ("rsa", [*OAEP[:1], "rsa_oaep_md:sha512"], [], "RSAES-OAEP"),
        ("rsa", [*OAEP, "rsa_mgf1_md:sha1"], [], "RSAES-OAEP"),
        ("rsa", [*OAEP, "rsa_oaep_label:00"], [], "RSAES-OAEP"),
        ("SECP256R1", [], [], "ECDH"),  # SHA-1
        ("SECP256R1", ["ecdh_kdf_md:sha512"], [], "ECDH"),
        ("SECP256R1", [*ECDH, "ecdh_cofactor_mode:1"], [], "ECDH"),
        ("SECP256R1", ECDH, ["-aes128-wrap"], "ECDH"),
        ("rsa", OAEP, ["-aes-128-gcm"], "AES-256-GCM"),
        ("rsa", OAEP, ["-aes-192-gcm"], "AES-256-GCM"),
        ("SECP256R1", ECDH, ["-aes-128-gcm"], "AES-256-GCM"),
        ("rsa", OAEP, ["-secretkey", "00" * 32, "-secretkeyid", "01"], "neither of RSA nor of EC"),
    ],
)
def test_other_algorithms_are_not_used(
    sealed: Path,
    record: bytes,
    pairs: dict[str, Pair],
    kind: str,
    options: list[str],
    words: list[str],
    says: str,
    tmp_path: Path,
) -> None:
    put(sealed, record, made(record, pairs[kind], options, *words))
    refused(sealed, pairs[kind], says, tmp_path)


def refused(sealed: Path, pair: Pair, says: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=f"{ENVELOPE_NAME}: .*{says}"):
        unseal(sealed, KeyFile(pair.key), tmp_path / "out")
    ran = tmp_path / "ran"
    with pytest.raises(UnsupportedError, match=says):
        unseal(sealed, KeyCommand(["touch", str(ran)]), tmp_path / "out")
    assert not ran.exists()
    assert not (tmp_path / "out").exists()


def test_other_nonces_and_tags_are_not_used(
    sealed: Path, record: bytes, pairs: dict[str, Pair], tmp_path: Path
) -> None:
    """A nonce longer than OpenSSL had room for was CVE-2025-15467; a short tag can be guessed."""
    cms = made(record, pairs["rsa"], OAEP)
    assert cms.count(NONCE_AND_TAG) == 1
    at = cms.index(NONCE_AND_TAG) + 2
    assert cms[at + 14 : at + 17] == b"\x02\x01\x10"
    nonce = cms[at + 2 : at + 14]
    for parameters, says in (
        (b"\x04\x0f" + nonce + b"abc", "nonce of 15 bytes"),
        (b"\x04\x0b" + nonce[:11] + b"\x02\x02\x00\x10", "nonce of 11 bytes"),
        (b"\x04\x0c" + nonce + b"\x02\x01\x0c", "no tag of 16"),
        (b"\x04\x0c" + nonce + b"\x05\x01\x00", "no tag of 16"),
    ):
        put(sealed, record, cms[:at] + parameters + cms[at + 17 :])
        refused(sealed, pairs["rsa"], says, tmp_path)

    cut = bytearray(cms[:-4])  # of the tag itself, which is last
    assert cut[-14:-12] == b"\x04\x10"
    cut[-13] = 12
    for place in (2, 19, 23):  # lengths of what it is in
        (length,) = struct.unpack_from(">H", cut, place)
        struct.pack_into(">H", cut, place, length - 4)
    put(sealed, record, bytes(cut))
    refused(sealed, pairs["rsa"], "no tag of 16", tmp_path)


def test_what_is_no_der_is_not_opened(
    sealed: Path, record: bytes, pairs: dict[str, Pair], tmp_path: Path
) -> None:
    """BER that OpenSSL reads as the same: what is checked must be what is opened."""
    cms = made(record, pairs["rsa"], OAEP)
    assert cms[:2] == b"\x30\x82"
    put(sealed, record, b"\x30\x83\x00" + cms[2:])
    with pytest.raises(SealError, match="no DER"):
        unseal(sealed, KeyFile(pairs["rsa"].key), tmp_path / "out")
