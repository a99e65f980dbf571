# SPDX-License-Identifier: Apache-2.0
"""Sealed checkpoints on top of each other, made without a dump: envelopes by OpenSSL's program, as
docs/format.md says."""

from __future__ import annotations

import hashlib
import hmac
import os
import shutil
import struct
import subprocess
from pathlib import Path

from gpustasis._core import ENVELOPE_NAME, PARENT_LINK, SEALED_NAME, FreshKey, write_sealed
from support.certificates import Pair
from support.chains import make_link, memory_of
from support.plain_sealed import derive, open_envelope

_OAEP = ("-keyopt", "rsa_padding_mode:oaep", "-keyopt", "rsa_oaep_md:sha256")


def make_sealed(
    store: Path, plain: Path, name: str, pair: Pair, *, parent: str = "", taken: float = 0.0
) -> Path:
    """A checkpoint of that name in `store`, whose only recipient has an RSA key. plain: a directory
    for it, and for what it is built on, in the clear. taken: its time."""
    plain.mkdir(exist_ok=True)
    below = plain / parent if parent else None
    make_link(plain / name, {7: memory_of(["A", "b", "0", name])}, parent=below)
    place = store / name
    place.mkdir()
    fresh = FreshKey()
    content = [path.name for path in (plain / name).iterdir() if path.is_file()]
    write_sealed(fresh, plain / name, content, place)
    record = open_envelope(fresh.key.wrap([pair.certificate.read_bytes()]), pair.key.read_bytes())
    if parent:
        above = open_envelope((store / parent / ENVELOPE_NAME).read_bytes(), pair.key.read_bytes())
        ancestors = above[16:]
        count = struct.pack("<II", 2, len(ancestors) // 48)
        record = record[:8] + count + record[16:] + ancestors
        (place / PARENT_LINK).symlink_to(f"../{parent}")
    (place / ENVELOPE_NAME).write_bytes(_envelope(record, pair))
    shutil.copy2(plain / name / "inventory.img", place)
    os.utime(place / SEALED_NAME, (taken, taken))
    return place


def _envelope(record: bytes, pair: Pair) -> bytes:
    argv = ["openssl", "cms", "-encrypt", "-binary", "-outform", "DER", "-aes-256-gcm", "-recip"]
    cms = subprocess.run(
        [*argv, pair.certificate, *_OAEP], input=record, check=True, capture_output=True, timeout=60
    ).stdout
    key = derive(record[32:64], record[16:32], b"gpustasis envelope", b"")
    return cms + hmac.digest(key, cms, hashlib.sha256)
