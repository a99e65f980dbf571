# SPDX-License-Identifier: Apache-2.0
"""Signatures of byte strings: by those who are trusted, over just these bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa

from gpustasis._core import CorruptDataError, UnsupportedDataError, sign, verify_signature
from support.recipients import make_recipient

KINDS = ["rsa", "SECP256R1", "SECP384R1", "SECP521R1", "ed25519"]
PURPOSE = b"gpustasis signature\0"
MESSAGE = b"the manifest"
DIGESTS = {256: hashes.SHA256(), 384: hashes.SHA384(), 521: hashes.SHA512()}


@pytest.mark.parametrize("kind", KINDS)
def test_who_is_trusted(kind: str, tmp_path: Path) -> None:
    me, other = make_recipient(tmp_path, "me", kind), make_recipient(tmp_path, "other", kind)
    mine, others = me.certificate.read_bytes(), other.certificate.read_bytes()
    record = sign(MESSAGE, me.key)
    assert verify_signature(MESSAGE, record, [mine]) == 0
    assert verify_signature(MESSAGE, record, [others, mine]) == 1
    for trusted in ([], [others]):
        with pytest.raises(CorruptDataError, match="not trusted"):
            verify_signature(MESSAGE, record, trusted)
    for message in (b"", MESSAGE[:-1], MESSAGE + b"\0", b"The manifest"):
        with pytest.raises(CorruptDataError, match="not that of these bytes"):
            verify_signature(message, record, [mine])


@pytest.mark.parametrize("kind", KINDS)
def test_every_byte_of_a_record_counts(kind: str, tmp_path: Path) -> None:
    me = make_recipient(tmp_path, "me", kind)
    trusted = [me.certificate.read_bytes()]
    record = sign(MESSAGE, me.key)
    for at in range(len(record)):
        changed = bytearray(record)
        changed[at] ^= 1
        with pytest.raises((CorruptDataError, UnsupportedDataError)):
            verify_signature(MESSAGE, bytes(changed), trusted)
    for size in range(len(record)):
        with pytest.raises(CorruptDataError):
            verify_signature(MESSAGE, record[:size], trusted)
    with pytest.raises(CorruptDataError):
        verify_signature(MESSAGE, record + b"\0", trusted)
    with pytest.raises(CorruptDataError, match="longer than any"):
        verify_signature(MESSAGE, record + bytes(5000), trusted)


@pytest.mark.parametrize("kind", KINDS)
def test_another_program_verifies_it(kind: str, tmp_path: Path) -> None:
    """As docs/format.md says, with Python's cryptography."""
    me = make_recipient(tmp_path, "me", kind)
    private = serialization.load_pem_private_key(me.key.read_bytes(), None)
    record = sign(MESSAGE, me.key)
    public = private.public_key()
    der = public.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    digest = hashes.Hash(hashes.SHA256())
    digest.update(der)
    assert record[:12] == b"GPUSSIG\n\1\0\0\0"
    assert record[16:48] == digest.finalize()
    algorithm = int.from_bytes(record[12:16], "little")
    signature, signed = record[48:], PURPOSE + MESSAGE
    if isinstance(public, ed25519.Ed25519PublicKey):
        assert algorithm == 1
        public.verify(signature, signed)
    elif isinstance(public, ec.EllipticCurvePublicKey):
        assert algorithm == 2
        public.verify(signature, signed, ec.ECDSA(DIGESTS[public.curve.key_size]))
        with pytest.raises(InvalidSignature):
            public.verify(signature, MESSAGE, ec.ECDSA(DIGESTS[public.curve.key_size]))
    else:
        assert isinstance(public, rsa.RSAPublicKey)
        assert algorithm == 3
        pss = padding.PSS(padding.MGF1(hashes.SHA256()), 32)
        public.verify(signature, signed, pss, hashes.SHA256())


def test_a_public_key_is_trusted_as_a_certificate_is(tmp_path: Path) -> None:
    me = make_recipient(tmp_path, "me", "ed25519")
    private = serialization.load_pem_private_key(me.key.read_bytes(), None)
    pem = private.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    assert verify_signature(MESSAGE, sign(MESSAGE, me.key), [pem]) == 0


def test_who_may_not_sign(tmp_path: Path) -> None:
    me = make_recipient(tmp_path, "me", uses=("key_encipherment",))
    with pytest.raises(ValueError, match="lacks digitalSignature"):
        verify_signature(MESSAGE, sign(MESSAGE, me.key), [me.certificate.read_bytes()])
    for trusted in (b"", b"none", me.key.read_bytes(), bytes(100_000)):
        with pytest.raises(ValueError, match="trusted key"):
            verify_signature(MESSAGE, sign(MESSAGE, me.key), [trusted])
