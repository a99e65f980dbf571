# SPDX-License-Identifier: Apache-2.0
"""A second reader of sealed checkpoints, written from docs/format.md alone, with the Python package
cryptography: none of the code that writes them is used. It reads from the front, as the first one
does not. It opens envelopes for RSA keys only, and takes them apart itself."""

from __future__ import annotations

import hmac
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

_MAGIC = b"\x93GPUSSL\n"
_RECORD_MAGIC = b"GPUSKEY\n"
_SINGLE, _OTHERS = 1 << 4, 1 << 5  # required features
_AUTH_ENVELOPED_DATA = bytes.fromhex("060b2a864886f70d0109100117")  # 1.2.840.113549.1.9.16.1.23
_RSAES_OAEP = bytes.fromhex("06092a864886f70d010107")
_AES_256_GCM = bytes.fromhex("060960864801650304012e")
_SEQUENCE, _SET, _OCTETS, _EXPLICIT_0, _IMPLICIT_0 = 0x30, 0x31, 0x04, 0xA0, 0x80


@dataclass(frozen=True)
class PlainFile:
    """One file that was sealed."""

    name: bytes
    mode: int
    mtime_ns: int
    content: bytes


def open_directory(directory: Path, key_file: Path) -> list[PlainFile]:
    """All files of a sealed checkpoint; asserts all that the format promises."""
    record = open_envelope((directory / "gpustasis-sealed.cms").read_bytes(), key_file.read_bytes())
    files, others = open_sealed((directory / "gpustasis-sealed.img").read_bytes(), record)
    for number, end_tag in others.items():
        raw = (directory / f"gpustasis-sealed-{number}.img").read_bytes()
        assert raw[-16:] == end_tag
        more, none = open_sealed(raw, record, number)
        assert not none
        files += more
    listed = {f"gpustasis-sealed-{number}.img" for number in others}
    assert {path.name for path in directory.glob("gpustasis-sealed-*.img")} == listed
    names = [file.name for file in files]
    assert len(set(names)) == len(names)
    for inventory in (file for file in files if file.name == b"inventory.img"):
        assert inventory.content == (directory / "inventory.img").read_bytes()
    return sorted(files, key=lambda file: file.name)


def open_sealed(
    raw: bytes, record: bytes, number: int = 1
) -> tuple[list[PlainFile], dict[int, bytes]]:
    """The files in the sealed file `number`, by the key record, and the other sealed files that
    it lists."""
    sealed_id, data_key = record[16:32], record[32:64]
    header = raw[:128]
    assert header[:8] == _MAGIC
    version, size, required, _ = struct.unpack("<IIQQ", header[8:32])
    assert (version, size) == (1, 128)
    assert required & ~(_SINGLE | _OTHERS) == 0
    single, lists_others = bool(required & _SINGLE), bool(required & _OTHERS)
    assert number == 1 or (single and not lists_others)
    assert header[32:48] == sealed_id
    frame_size, file_id = struct.unpack("<II", header[48:56])
    assert 4096 <= frame_size <= 4 << 20
    assert frame_size & (frame_size - 1) == 0
    assert file_id == number
    assert header[56:112] == bytes(56)
    assert header[112:] == xxhash.xxh3_128(header[:112]).digest()

    key = derive(data_key, sealed_id, b"gpustasis frames", struct.pack("<I", file_id) + header)
    plain: dict[int, list[bytes]] = {0: [], 1: [], 2: []}
    at, last_kind = 128, 0
    for frame, kind, text, end in _frames(raw, at, key):
        assert kind >= last_kind, f"frame {frame}"
        if kind < 2:
            assert all(len(piece) == frame_size for piece in plain[kind])
            assert 1 <= len(text) <= frame_size
        plain[kind].append(text)
        at, last_kind = end, kind
        if kind == 2:
            break
    assert last_kind == 2
    assert at == len(raw)
    content, index = b"".join(plain[0]), b"".join(plain[1])
    content_size, index_size, file_count, file_size, other_count = struct.unpack(
        "<5Q", plain[2][0][:40]
    )
    assert plain[2][0][40:] == bytes(24)
    assert (content_size, index_size, file_size) == (len(content), len(index), len(raw))
    assert lists_others or other_count == 0
    assert not single or file_count == 1
    cut = len(index) - 24 * other_count
    return _files(content, index[:cut], file_count, single), _others(index[cut:])


def _others(index: bytes) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    for at in range(0, len(index), 24):
        number, reserved = struct.unpack("<II", index[at : at + 8])
        assert reserved == 0
        assert max(found, default=1) < number <= 1 << 18
        found[number] = index[at + 8 : at + 24]
    return found


def _frames(raw: bytes, at: int, key: bytes) -> Iterator[tuple[int, int, bytes, int]]:
    number = 0
    while at < len(raw):
        header = raw[at : at + 16]
        found, size, kind = struct.unpack("<QIB", header[:13])
        assert found == number
        assert header[13:] == bytes(3)
        sealed = raw[at + 16 : at + 16 + size + 16]
        assert len(sealed) == size + 16
        nonce = bytes(4) + struct.pack("<Q", number)
        at += 16 + size + 16
        yield number, kind, AESGCM(key).decrypt(nonce, sealed, header), at
        number += 1


def _files(content: bytes, index: bytes, count: int, single: bool) -> list[PlainFile]:
    files: list[PlainFile] = []
    at = 0
    while index:
        name_size, mode, reserved, size, mtime = struct.unpack("<HHIQQ", index[:24])
        entry, index = index[: 24 + name_size], index[24 + name_size :]
        name = entry[24:]
        assert reserved == 0
        assert mode <= 0o777
        assert name
        assert b"/" not in name
        assert not files or files[-1].name < name
        if not single:
            assert content[at : at + len(entry)] == entry
            at += len(entry)
        files.append(PlainFile(name, mode, mtime, content[at : at + size]))
        assert len(files[-1].content) == size
        at += size
    assert at == len(content)
    assert len(files) == count
    return files


def derive(data_key: bytes, sealed_id: bytes, label: bytes, context: bytes) -> bytes:
    """A key made of the data key."""
    return HKDF(hashes.SHA256(), 32, sealed_id, label + b"\0" + context).derive(data_key)


def open_envelope(raw: bytes, pem: bytes) -> bytes:
    """The key record, by an RSA private key in PEM."""
    cms, code = raw[:-32], raw[-32:]
    private = serialization.load_pem_private_key(pem, None)
    assert isinstance(private, rsa.RSAPrivateKey)
    kind, wrapped = _parts(cms, _SEQUENCE)
    assert kind == _AUTH_ENVELOPED_DATA
    (enveloped,) = _parts(wrapped, _EXPLICIT_0)
    _, recipients, encrypted, tag = _parts(enveloped)  # no originator, no attributes
    oaep = padding.OAEP(padding.MGF1(hashes.SHA256()), hashes.SHA256(), None)
    found = []
    for recipient in _parts(recipients, _SET):
        if recipient[0] != _SEQUENCE:
            continue  # of an EC key
        *_, algorithm, octets = _parts(recipient)
        assert _parts(algorithm, _SEQUENCE)[0] == _RSAES_OAEP
        try:
            found.append(private.decrypt(_content(octets, _OCTETS), oaep))
        except ValueError:
            continue  # of another key
    (key,) = found
    _, algorithm, text = _parts(encrypted)
    cipher, parameters = _parts(algorithm)
    assert cipher == _AES_256_GCM
    nonce, *_ = _parts(parameters)
    sealed = _content(text, _IMPLICIT_0) + _content(tag, _OCTETS)
    record = AESGCM(key).decrypt(_content(nonce, _OCTETS), sealed, None)
    ancestors = (len(record) - 64) // 48
    assert len(record) == 64 + 48 * ancestors
    assert record[:16] == _RECORD_MAGIC + struct.pack("<II", 2 if ancestors else 1, ancestors)
    ids = [record[at : at + 16] for at in (16, *range(64, len(record), 48))]
    assert len(set(ids)) == len(ids)
    expected = hmac.digest(
        derive(record[32:64], record[16:32], b"gpustasis envelope", b""), cms, "sha256"
    )
    assert hmac.compare_digest(expected, code)
    return record


def _element(raw: bytes) -> tuple[int, int]:
    """Where the content of a DER element begins, and where it ends."""
    length = raw[1]
    if length < 0x80:
        return 2, 2 + length
    count = length & 0x7F
    assert 1 <= count <= 4
    begin = 2 + count
    return begin, begin + int.from_bytes(raw[2:begin], "big")


def _content(raw: bytes, tag: int) -> bytes:
    assert raw[0] == tag
    begin, end = _element(raw)
    assert end == len(raw)
    return raw[begin:end]


def _parts(raw: bytes, tag: int | None = None) -> list[bytes]:
    """The elements within one, each whole."""
    begin, end = _element(raw)
    assert tag is None or raw[0] == tag
    assert end == len(raw)
    rest, found = raw[begin:end], []
    while rest:
        size = _element(rest)[1]
        found.append(rest[:size])
        rest = rest[size:]
    return found
