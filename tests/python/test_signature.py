# SPDX-License-Identifier: Apache-2.0
"""Signatures of statements: by those who are trusted, over just these bytes."""

from __future__ import annotations

import subprocess
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import ExtendedKeyUsageOID

from gpustasis._core import CorruptDataError, sign_statement, verify_statement
from support.certificates import Pair
from support.recipients import DAY, make_recipient
from support.signatures import issued_by, make_signer, verify_cms

KINDS = ["rsa", "SECP256R1", "SECP384R1", "SECP521R1"]
CONTENT_TYPE = bytes.fromhex("06092a864886f70d010903")
MESSAGE_DIGEST = bytes.fromhex("06092a864886f70d010904")
TEXT = b"gpustasis statement 1\nparent none\nfiles 0\n"


def sign(pair: Pair, text: bytes = TEXT) -> bytes:
    return sign_statement(text, pair.key, pair.certificate)[0]


def verify(signature: bytes, *trusted: Pair, text: bytes = TEXT) -> str:
    pems = [pair.certificate.read_bytes() for pair in trusted]
    return verify_statement(text, signature, pems).subject


@pytest.mark.parametrize("kind", KINDS)
def test_who_is_trusted(kind: str, tmp_path: Path) -> None:
    me, other = make_signer(tmp_path, "me", kind), make_signer(tmp_path, "other", kind)
    signature = sign(me)
    assert verify(signature, me) == "CN=me"
    assert verify(signature, other, me) == "CN=me"
    for trusted in ([], [other]):
        with pytest.raises(CorruptDataError, match="not trusted"):
            verify(signature, *trusted)
    for text in (b"", TEXT[:-1], TEXT + b"\n", b"G" + TEXT[1:]):
        with pytest.raises(CorruptDataError, match="not that of this statement"):
            verify(signature, me, text=text)
    with pytest.raises(CorruptDataError):
        verify(sign(other), me)


@pytest.mark.parametrize("kind", KINDS)
def test_other_programs_verify_it(kind: str, tmp_path: Path) -> None:
    me = make_signer(tmp_path, "me", kind, purpose=None)
    (tmp_path / "text").write_bytes(TEXT)
    (tmp_path / "cms").write_bytes(sign(me))
    verify_cms((tmp_path / "cms").read_bytes(), TEXT, me.certificate)
    words = ["openssl", "cms", "-verify", "-binary", "-inform", "DER", "-in", tmp_path / "cms"]
    words += ["-content", tmp_path / "text", "-CAfile", me.certificate, "-out", "/dev/null"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (tmp_path / "text").write_bytes(TEXT + b"\n")
    assert subprocess.run(words, capture_output=True, check=False).returncode != 0


@pytest.mark.parametrize("more", [(), ("-keyopt", "rsa_padding_mode:pss"), ("-nocerts",)])
def test_what_openssl_signs_is_taken(more: tuple[str, ...], tmp_path: Path) -> None:
    me = make_signer(tmp_path, "me", "rsa")
    words = ["openssl", "cms", "-sign", "-binary", "-outform", "DER", "-signer", me.certificate]
    done = subprocess.run(
        [*words, "-inkey", me.key, *more], input=TEXT, capture_output=True, check=True
    )
    assert verify(done.stdout, me) == "CN=me"
    with pytest.raises(CorruptDataError, match="not that of this statement"):
        verify(done.stdout, me, text=TEXT + b"\n")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("-nodetach",), "no detached SignedData"),
        (("-md", "sha1"), "a hash other than"),
    ],
)
def test_what_openssl_signs_otherwise_is_refused(
    more: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    me = make_signer(tmp_path, "me", "rsa")
    words = ["openssl", "cms", "-sign", "-binary", "-outform", "DER", "-signer", me.certificate]
    done = subprocess.run(
        [*words, "-inkey", me.key, *more], input=TEXT, capture_output=True, check=True
    )
    with pytest.raises(CorruptDataError, match=said):
        verify(done.stdout, me)


def test_two_signers_are_refused(tmp_path: Path) -> None:
    """One of them would be left out without a word."""
    me, other = make_signer(tmp_path, "me"), make_signer(tmp_path, "other")
    words = ["openssl", "cms", "-sign", "-binary", "-outform", "DER"]
    for pair in (me, other):
        words += ["-signer", str(pair.certificate), "-inkey", str(pair.key)]
    done = subprocess.run(words, input=TEXT, capture_output=True, check=True)
    with pytest.raises(CorruptDataError, match="not just one signer"):
        verify(done.stdout, me, other)


@pytest.mark.parametrize("kind", ["rsa", "SECP256R1"])
def test_no_changed_byte_makes_another_signature(kind: str, tmp_path: Path) -> None:
    """Signed attributes and signature count to the last byte. Beside them CMS leaves some open: its
    versions, names of algorithms that come twice, and the certificate that is sent along, where a
    trusted one of that name and number is there."""
    me = make_signer(tmp_path, "me", kind)
    signature = sign(me)
    pem = x509.load_pem_x509_certificate(me.certificate.read_bytes())
    sent = pem.public_bytes(serialization.Encoding.DER)
    begin = signature.index(sent)
    taken = []
    for at in range(len(signature)):
        changed = bytearray(signature)
        changed[at] ^= 1
        try:
            assert verify(bytes(changed), me) == "CN=me"
            taken.append(at)
        except CorruptDataError:
            pass
    taken = [at for at in taken if not begin <= at < begin + len(sent)]
    assert len(taken) < 24
    attributes = signature.index(CONTENT_TYPE, begin + len(sent))
    end = signature.index(MESSAGE_DIGEST) + len(MESSAGE_DIGEST) + 4 + 32
    assert not [at for at in taken if attributes - 6 <= at < end]
    assert max(taken) < len(signature) - (256 if kind == "rsa" else 68)
    for size in range(len(signature)):
        with pytest.raises(CorruptDataError):
            verify(signature[:size], me)
    for more in (b"\0", bytes(1 << 18)):
        with pytest.raises(CorruptDataError):
            verify(signature + more, me)


def test_whom_a_trusted_authority_has_certified(tmp_path: Path) -> None:
    authority = make_signer(tmp_path, "authority", is_ca=True)
    stranger = make_signer(tmp_path, "stranger", is_ca=True)
    me = make_signer(tmp_path, "me", issuer=issued_by(authority))
    assert verify(sign(me), authority) == "CN=me"
    with pytest.raises(CorruptDataError, match="not trusted"):
        verify(sign(me), stranger)
    # Whom one has certified who may not certify.
    below = make_signer(tmp_path, "below", issuer=issued_by(me))
    for trusted in (authority, me):
        with pytest.raises(CorruptDataError, match="not trusted"):
            verify(sign(below), trusted)
    assert verify(sign(below), below) == "CN=below"


def test_who_may_not_sign(tmp_path: Path) -> None:
    server = make_signer(tmp_path, "server", purpose=ExtendedKeyUsageOID.SERVER_AUTH)
    recipient = make_recipient(tmp_path, "recipient", uses=("key_encipherment",))
    for pair, said in ((server, "extended key usage"), (recipient, "lacks digitalSignature")):
        with pytest.raises(ValueError, match=said):
            sign(pair)
        # As another program signs that does not look.
        words = ["openssl", "cms", "-sign", "-binary", "-outform", "DER", "-signer"]
        done = subprocess.run(
            [*words, pair.certificate, "-inkey", pair.key],
            input=TEXT,
            capture_output=True,
            check=True,
        )
        with pytest.raises(CorruptDataError, match=said):
            verify(done.stdout, pair)
    with pytest.raises(ValueError, match="Ed25519"):
        sign(make_recipient(tmp_path, "edwards", "ed25519"))


def test_keys_and_certificates_that_do_not_fit(tmp_path: Path) -> None:
    me, other = make_signer(tmp_path, "me"), make_signer(tmp_path, "other")
    with pytest.raises(ValueError, match="not the certificate of the private key"):
        sign_statement(TEXT, me.key, other.certificate)
    with pytest.raises(CorruptDataError, match="no certificate beside the private key"):
        sign_statement(TEXT, me.key)
    both = tmp_path / "both.pem"
    both.touch(mode=0o600)
    both.write_bytes(me.key.read_bytes() + me.certificate.read_bytes())
    signature, by = sign_statement(TEXT, both)
    assert by.subject == verify(signature, me) == "CN=me"
    both.write_bytes(both.read_bytes() + other.certificate.read_bytes())
    with pytest.raises(CorruptDataError, match="more than one certificate"):
        sign_statement(TEXT, both)
    me.key.chmod(0o640)
    with pytest.raises(OSError, match="mode 0600"):
        sign_statement(TEXT, me.key, me.certificate)
    with pytest.raises(CorruptDataError):
        verify_statement(TEXT, signature, [b"none"])


@pytest.mark.parametrize(
    ("begin", "end", "said"),
    [(-2 * DAY, -DAY, "has expired: it was valid until 20"), (DAY, 2 * DAY, "not valid yet")],
)
def test_dates_are_told(begin: timedelta, end: timedelta, said: str, tmp_path: Path) -> None:
    me = make_signer(tmp_path, "me", begin=begin, end=end)
    signature, by = sign_statement(TEXT, me.key, me.certificate)
    assert said in by.warning
    found = verify_statement(TEXT, signature, [me.certificate.read_bytes()])
    assert said in found.warning and found.date.endswith(" UTC")
