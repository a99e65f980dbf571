# SPDX-License-Identifier: Apache-2.0
"""Signed checkpoints, read by what docs/format.md says and with Python's cryptography alone."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from gpustasis.sealing.signing import SignerFile, sign
from support.certificates import Pair
from support.recipients import DAY, Key, make_key, private_pem

STATEMENT = "gpustasis-statement.txt"
SIGNATURE = "gpustasis-signature.cms"
PIECE = 64 << 20
# Not signed: what is written later.
LEFT = ["dump.log", "criu.pid", "stats-dump", "gpustasis-restore.json", "gpustasis-sealed.cms"]
_SIGNED_DATA = bytes.fromhex("2a864886f70d010702")
_DATA = bytes.fromhex("2a864886f70d010701")
_MESSAGE_DIGEST = bytes.fromhex("2a864886f70d010904")
_HASHES: dict[bytes, hashes.HashAlgorithm] = {
    bytes.fromhex("608648016503040201"): hashes.SHA256(),
    bytes.fromhex("608648016503040202"): hashes.SHA384(),
    bytes.fromhex("608648016503040203"): hashes.SHA512(),
}
_PSS = bytes.fromhex("2a864886f70d01010a")


@dataclass(frozen=True, slots=True)
class Statement:
    """parent: in hex; None: there is none. files: digest in hex and size, by name."""

    parent: str | None
    files: dict[str, tuple[str, int]]


def parse_statement(text: bytes) -> Statement:
    title, parent, count, *files = text.decode("ascii").removesuffix("\n").split("\n")
    assert title == "gpustasis statement 1"
    assert parent.startswith("parent ") and count == f"files {len(files)}"
    named = parent.removeprefix("parent ")
    found = {}
    for line in files:
        digest, size, name = line.split(" ")
        found[name] = (digest, int(size))
    assert list(found) == sorted(found) and len(found) == len(files)
    return Statement(None if named == "none" else named, found)


def digest_of(path: Path, piece: int = PIECE) -> str:
    """Of a file, as a statement has it."""
    with path.open("rb") as file:
        pieces = [hashlib.sha256(part) for part in iter(lambda: file.read(piece), b"")]
    if len(pieces) < 2:
        return (pieces or [hashlib.sha256()])[0].hexdigest()
    return hashlib.sha256(b"".join(one.digest() for one in pieces)).hexdigest()


def require_signed(directory: Path, certificate: Path) -> Statement:
    """That the owner of `certificate` has signed what is there."""
    text = (directory / STATEMENT).read_bytes()
    verify_cms((directory / SIGNATURE).read_bytes(), text, certificate)
    statement = parse_statement(text)
    for name, (digest, size) in statement.files.items():
        assert (directory / name).stat().st_size == size
        assert digest_of(directory / name) == digest
    return statement


@dataclass(frozen=True, slots=True)
class _Value:
    tag: int
    whole: bytes
    content: bytes

    def __iter__(self) -> Iterator[_Value]:
        return iter(_values(self.content))


def _values(der: bytes) -> list[_Value]:
    found = []
    while der:
        size, begin = der[1], 2
        if size >= 0x80:
            begin += size - 0x80
            size = int.from_bytes(der[2:begin], "big")
        assert begin + size <= len(der)
        found.append(_Value(der[0], der[: begin + size], der[begin : begin + size]))
        der = der[begin + size :]
    return found


def verify_cms(der: bytes, content: bytes, certificate: Path) -> None:
    """RFC 5652: SignedData without its content, one signer, with signed attributes."""
    (outer,) = _values(der)
    kind, explicit = outer
    assert kind.content == _SIGNED_DATA
    (data,) = explicit
    parts = list(data)
    (encapsulated,) = parts[2]  # its type, and no content
    assert encapsulated.content == _DATA
    (info,) = parts[-1]
    _, _, digest_kind, attributes, signature_kind, signature = info
    assert attributes.tag == 0xA0
    digest = _HASHES[next(iter(digest_kind)).content]
    hashed = hashes.Hash(digest)
    hashed.update(content)
    named = {next(iter(one)).content: list(one)[1] for one in attributes}
    assert next(iter(named[_MESSAGE_DIGEST])).content == hashed.finalize()
    signed = b"\x31" + attributes.whole[1:]  # as SET OF
    key = x509.load_pem_x509_certificate(certificate.read_bytes()).public_key()
    if isinstance(key, ec.EllipticCurvePublicKey):
        key.verify(signature.content, signed, ec.ECDSA(digest))
    else:
        assert isinstance(key, rsa.RSAPublicKey)
        pss = next(iter(signature_kind)).content == _PSS  # else as programs for tokens sign
        scheme: padding.AsymmetricPadding = padding.PKCS1v15()
        if pss:
            scheme = padding.PSS(padding.MGF1(digest), digest.digest_size)
        key.verify(signature.content, signed, scheme, digest)


def make_signer(
    directory: Path,
    name: str = "signer",
    kind: str = "SECP256R1",
    *,
    issuer: tuple[x509.Certificate, Key] | None = None,
    is_ca: bool = False,
    begin: timedelta = -DAY,
    end: timedelta = DAY,
    purpose: x509.ObjectIdentifier | None = ExtendedKeyUsageOID.CODE_SIGNING,
) -> Pair:
    """NAME.pem and NAME.key. issuer: None: it has issued itself."""
    key = make_key(kind)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer[0].subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + begin)
        .not_valid_after(now + end)
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
    )
    if purpose is not None and not is_ca:
        builder = builder.add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
    by = key if issuer is None else issuer[1]
    pair = Pair(directory / f"{name}.pem", directory / f"{name}.key")
    pem = builder.sign(by, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    pair.certificate.write_bytes(pem)
    pair.key.touch(mode=0o600)
    pair.key.write_bytes(private_pem(key))
    return pair


def issued_by(pair: Pair) -> tuple[x509.Certificate, Key]:
    certificate = x509.load_pem_x509_certificate(pair.certificate.read_bytes())
    key = serialization.load_pem_private_key(pair.key.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey)
    return certificate, key


def signed_directory(directory: Path, pair: Pair) -> Path:
    """What looks like a checkpoint of CRIU's, signed."""
    directory.mkdir()
    for name, content in {"inventory.img": b"inventory", "pages-1.img": b"pages"}.items():
        (directory / name).write_bytes(content)
    for name in LEFT:
        (directory / name).write_text("as it was")
    sign(directory, SignerFile(pair.key, pair.certificate))
    return directory
