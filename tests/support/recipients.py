# SPDX-License-Identifier: Apache-2.0
"""Those who may open sealed checkpoints, for tests: a certificate for each, and its key."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import NameOID

from support.certificates import Pair

DAY = timedelta(days=1)
Key = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey
_NO_USES = dict.fromkeys(
    (
        *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment"),
        *("key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
    ),
    False,
)


def make_key(kind: str) -> Key:
    """kind: "rsa" (of 2048 bits), "rsa1024", "ed25519", or a curve of cryptography's."""
    if kind.startswith("rsa"):
        return rsa.generate_private_key(65537, int(kind[3:] or 2048))
    if kind == "ed25519":
        return ed25519.Ed25519PrivateKey.generate()
    curve: type[ec.EllipticCurve] = getattr(ec, kind)
    return ec.generate_private_key(curve())


def make_recipient(
    directory: Path,
    name: str = "me",
    kind: str = "rsa",
    *,
    begin: timedelta = -DAY,
    end: timedelta = DAY,
    uses: tuple[str, ...] = (),
) -> Pair:
    """Files NAME.pem and NAME.key. begin, end: of its validity, from now. uses: of its key; none:
    the certificate does not say."""
    key = make_key(kind)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + begin)
        .not_valid_after(now + end)
    )
    if uses:
        usage = x509.KeyUsage(**{**_NO_USES, **dict.fromkeys(uses, True)})
        builder = builder.add_extension(usage, critical=True)
    digest = None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    pair = Pair(directory / f"{name}.pem", directory / f"{name}.key")
    pair.certificate.write_bytes(builder.sign(key, digest).public_bytes(serialization.Encoding.PEM))
    pair.key.touch(mode=0o600)
    pair.key.write_bytes(private_pem(key))
    return pair


def private_pem(key: Key, password: bytes | None = None) -> bytes:
    lock: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if password is not None:
        lock = serialization.BestAvailableEncryption(password)
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, lock)
