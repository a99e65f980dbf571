# SPDX-License-Identifier: Apache-2.0
"""Certificates for a TLS server and its clients, made when they are needed, valid for a day."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_HOUR = timedelta(hours=1)
_DAY = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its key, both PEM files."""

    certificate: Path
    key: Path


class Authority:
    """A CA whose files go to `directory`, which is there."""

    def __init__(self, directory: Path, name: str = "ca") -> None:
        self._directory = directory
        self._name = name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._certificate = self._sign(name, self._key.public_key(), [], is_ca=True)
        self.certificate = directory / f"{name}.pem"
        self.certificate.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    def server(self, *addresses: str, names: Sequence[str] = ()) -> Pair:
        """For a server at these IP addresses and host names."""
        listed: list[x509.GeneralName] = [x509.DNSName(name) for name in names]
        listed += [x509.IPAddress(ipaddress.ip_address(address)) for address in addresses]
        extension = x509.SubjectAlternativeName(listed)
        return self._pair("-".join(["server", *addresses]), [extension])

    def client(self, user: str, *groups: str) -> Pair:
        """For a client that Kubernetes is to know as `user`, a member of `groups`."""
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])
        return self._pair(user, [usage], groups)

    def _pair(
        self, name: str, extensions: list[x509.ExtensionType], groups: Sequence[str] = ()
    ) -> Pair:
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(name, key.public_key(), extensions, groups)
        stem = f"{self._name}-{name.replace(':', '-')}"
        paths = [self._directory / f"{stem}.{kind}" for kind in ("pem", "key")]
        paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        paths[1].touch(mode=0o600)
        paths[1].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return Pair(*paths)

    def _sign(
        self,
        name: str,
        key: ec.EllipticCurvePublicKey,
        extensions: list[x509.ExtensionType],
        groups: Sequence[str] = (),
        *,
        is_ca: bool = False,
    ) -> x509.Certificate:
        now = datetime.now(UTC)
        words = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
        subject = x509.Name([*words, x509.NameAttribute(NameOID.COMMON_NAME, name)])
        issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self._name)])
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _HOUR)
            .not_valid_after(now + _DAY)
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
        )
        if is_ca:
            usage = x509.KeyUsage(
                digital_signature=True,
                key_cert_sign=True,
                crl_sign=True,
                content_commitment=False,
                key_encipherment=False,
                data_encipherment=False,
                key_agreement=False,
                encipher_only=False,
                decipher_only=False,
            )
            builder = builder.add_extension(usage, critical=True)
        for extension in extensions:
            builder = builder.add_extension(extension, critical=False)
        return builder.sign(self._key, hashes.SHA256())
