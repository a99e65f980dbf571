# SPDX-License-Identifier: Apache-2.0
"""Who can open a sealed checkpoint: those it was sealed for, with their keys as they keep them."""

from __future__ import annotations

import os
import subprocess
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from gpustasis import files
from gpustasis._core import ENVELOPE_NAME, SEALED_NAME, DataKey
from gpustasis.errors import CheckpointError, SealError
from gpustasis.sealing import unseal as unseal_module
from gpustasis.sealing.keys import KeyFile, KeySource
from gpustasis.sealing.recipients import read_recipients
from gpustasis.sealing.seal import seal
from gpustasis.sealing.unseal import rewrap, unseal
from support.certificates import Pair
from support.command import call
from support.inventory import write_inventory
from support.json_output import check_document
from support.recipients import DAY, make_key, make_recipient, private_pem

KINDS = ["rsa", "rsa3072", "SECP256R1", "SECP384R1", "SECP521R1"]
RECORD_SIZE = 64


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "one"
    directory.mkdir()
    write_inventory(directory)
    (directory / "core-1.img").write_bytes(b"core" * 100)
    return directory


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    directory = tmp_path_factory.mktemp("pairs")
    return {kind: make_recipient(directory, kind, kind) for kind in KINDS}


@pytest.fixture
def sealed(checkpoint: Path, pairs: dict[str, Pair]) -> Path:
    """For all of the kinds."""
    out = checkpoint.with_name("sealed")
    seal(checkpoint, read_recipients([pair.certificate for pair in pairs.values()]), out)
    return out


def opens(sealed: Path, source: KeySource, out: Path) -> bool:
    """Raises SealError; nothing is at `out` then."""
    try:
        unseal(sealed, source, out)
    except SealError:
        assert not out.exists()
        raise
    return (out / "core-1.img").read_bytes() == b"core" * 100


@pytest.mark.parametrize("kind", KINDS)
def test_every_recipient_can_open(
    sealed: Path, pairs: dict[str, Pair], kind: str, tmp_path: Path
) -> None:
    assert opens(sealed, KeyFile(pairs[kind].key), tmp_path / "out")


@pytest.mark.parametrize("kind", KINDS)
def test_openssl_opens_the_envelope(sealed: Path, pairs: dict[str, Pair], kind: str) -> None:
    pair = pairs[kind]
    done = subprocess.run(
        [
            *("openssl", "cms", "-decrypt", "-inform", "DER", "-in", sealed / ENVELOPE_NAME),
            *("-inkey", pair.key, "-recip", pair.certificate),
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )
    assert len(done.stdout) == RECORD_SIZE
    assert done.stdout.startswith(b"GPUSKEY\n")


@pytest.mark.parametrize("kind", ["rsa", "rsa3072", "SECP256R1", "SECP521R1", "ed25519"])
def test_another_key_opens_nothing(sealed: Path, kind: str, tmp_path: Path) -> None:
    stranger = make_recipient(tmp_path, "stranger", kind)
    with pytest.raises(SealError, match=r"another key|opens no envelopes"):
        opens(sealed, KeyFile(stranger.key), tmp_path / "out")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610])
def test_a_key_that_others_can_use_is_refused(
    sealed: Path, pairs: dict[str, Pair], mode: int, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_bytes(pairs["rsa"].key.read_bytes())
    key.chmod(mode)
    with pytest.raises(SealError, match="others have access"):
        opens(sealed, KeyFile(key), tmp_path / "out")


def test_a_key_of_somebody_else_is_refused(
    sealed: Path, pairs: dict[str, Pair], tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_bytes(pairs["rsa"].key.read_bytes())
    key.chmod(0o600)
    os.chown(key, 12345, -1)
    with pytest.raises(SealError, match="belongs to user 12345"):
        opens(sealed, KeyFile(key), tmp_path / "out")


def test_a_link_to_a_key_is_followed_and_the_key_looked_at(
    sealed: Path, pairs: dict[str, Pair], tmp_path: Path
) -> None:
    """As Kubernetes mounts secrets."""
    link = tmp_path / "link"
    link.symlink_to(pairs["rsa"].key)
    assert opens(sealed, KeyFile(link), tmp_path / "out")
    loose = tmp_path / "loose"
    loose.write_bytes(pairs["rsa"].key.read_bytes())
    loose.chmod(0o644)
    link.unlink()
    link.symlink_to(loose)
    with pytest.raises(SealError, match="others have access"):
        opens(sealed, KeyFile(link), tmp_path / "more")


def test_what_is_no_key(sealed: Path, pairs: dict[str, Pair], tmp_path: Path) -> None:
    place = tmp_path / "key"

    def refused(content: bytes, says: str) -> None:
        place.unlink(missing_ok=True)
        place.touch(mode=0o600)
        place.write_bytes(content)
        with pytest.raises(SealError, match=says):
            opens(sealed, KeyFile(place), tmp_path / "out")

    refused(b"", "0 bytes")
    refused(b"none", "no private key")
    refused(bytes(100_000), "100000 bytes")
    refused(pairs["rsa"].certificate.read_bytes(), "no private key")
    refused(private_pem(make_key("rsa"), b"secret"), "under a password")
    refused(private_pem(make_key("rsa1024")), "1024 bits")
    refused(private_pem(make_key("SECP256K1")), "curve 'secp256k1'")
    place.unlink()
    os.mkfifo(place, 0o600)
    with pytest.raises(SealError, match="no ordinary file"):
        opens(sealed, KeyFile(place), tmp_path / "out")
    with pytest.raises(SealError, match="No such file"):
        opens(sealed, KeyFile(tmp_path / "absent"), tmp_path / "out")


def test_rewrap_changes_the_envelope_only(
    sealed: Path, pairs: dict[str, Pair], tmp_path: Path
) -> None:
    other = make_recipient(tmp_path, "other")
    before = {path.name: path.read_bytes() for path in sealed.iterdir()}
    inode = (sealed / SEALED_NAME).stat().st_ino
    done = call("rewrap", sealed, "--key", pairs["rsa"].key, "--to", other.certificate, "--json")
    assert done.exit_code == 0, done.output
    check_document(done.stdout, "rewrap")
    after = {path.name: path.read_bytes() for path in sealed.iterdir()}
    assert before.keys() == after.keys()
    assert [name for name in before if before[name] != after[name]] == [ENVELOPE_NAME]
    assert (sealed / SEALED_NAME).stat().st_ino == inode
    assert opens(sealed, KeyFile(other.key), tmp_path / "out")
    with pytest.raises(SealError, match="another key"):
        opens(sealed, KeyFile(pairs["rsa"].key), tmp_path / "more")


def test_rewrap_keeps_mode_and_owner(sealed: Path, pairs: dict[str, Pair], tmp_path: Path) -> None:
    envelope = sealed / ENVELOPE_NAME
    assert envelope.stat().st_mode & 0o7777 == 0o600
    envelope.chmod(0o640)
    os.chown(envelope, 12345, 54321)
    rewrap(sealed, KeyFile(pairs["rsa"].key), read_recipients([pairs["rsa3072"].certificate]))
    found = envelope.stat()
    assert (found.st_mode & 0o7777, found.st_uid, found.st_gid) == (0o640, 12345, 54321)
    assert opens(sealed, KeyFile(pairs["rsa3072"].key), tmp_path / "out")


def test_rewrap_makes_no_program_of_its_owner(sealed: Path, pairs: dict[str, Pair]) -> None:
    envelope = sealed / ENVELOPE_NAME
    envelope.chmod(0o6755)
    rewrap(sealed, KeyFile(pairs["rsa"].key), read_recipients([pairs["rsa"].certificate]))
    assert envelope.stat().st_mode & 0o7777 == 0o755


def test_two_rewraps_at_once(sealed: Path, pairs: dict[str, Pair]) -> None:
    """The second is refused, and what the first one writes stays."""
    recipients = read_recipients([pairs["rsa"].certificate])
    before = (sealed / ENVELOPE_NAME).read_bytes()

    class Slow(KeyFile):
        def unwrap(self, envelope: bytes, place: str) -> DataKey:
            with pytest.raises(CheckpointError, match="is in use"):
                rewrap(sealed, KeyFile(self.path), recipients)
            assert (sealed / ENVELOPE_NAME).read_bytes() == before
            return super().unwrap(envelope, place)

    rewrap(sealed, Slow(pairs["rsa"].key), recipients)
    assert (sealed / ENVELOPE_NAME).read_bytes() != before


def test_rewrap_reads_back(
    sealed: Path, pairs: dict[str, Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path.name: path.read_bytes() for path in sealed.iterdir()}
    whole = files.replace_file

    def lose(directory: int, name: str, data: bytes, mode: int, **rest: Any) -> None:
        whole(directory, name, data[:-1] + bytes([data[-1] ^ 1]), mode, **rest)

    monkeypatch.setattr(unseal_module, "replace_file", lose)
    with pytest.raises(SealError, match="was changed"):
        rewrap(sealed, KeyFile(pairs["rsa"].key), read_recipients([pairs["rsa"].certificate]))
    assert {path.name: path.read_bytes() for path in sealed.iterdir()} == before


def test_rewrap_with_a_wrong_key_changes_nothing(sealed: Path, tmp_path: Path) -> None:
    stranger = make_recipient(tmp_path, "stranger")
    before = (sealed / ENVELOPE_NAME).read_bytes()
    with pytest.raises(SealError, match="another key"):
        rewrap(sealed, KeyFile(stranger.key), read_recipients([stranger.certificate]))
    assert (sealed / ENVELOPE_NAME).read_bytes() == before


@pytest.mark.parametrize(
    ("begin", "end", "says"),
    [
        (-3 * DAY, -2 * DAY, "has expired: it was valid until 20"),
        (2 * DAY, 3 * DAY, "is not valid yet: it is from 20"),
        (-DAY, DAY, ""),
    ],
)
def test_dates_of_certificates(
    checkpoint: Path, begin: timedelta, end: timedelta, says: str, tmp_path: Path
) -> None:
    """A warning with the date; it is sealed all the same."""
    pair = make_recipient(tmp_path, "old", begin=begin, end=end)
    sealed = tmp_path / "sealed"
    done = call("seal", checkpoint, "--to", pair.certificate, "-o", sealed)
    assert done.exit_code == 0, done.output
    assert says in done.output
    assert ("warning:" in done.output) == bool(says)
    assert opens(sealed, KeyFile(pair.key), tmp_path / "out")


@pytest.mark.parametrize(
    ("kind", "uses", "says"),
    [
        ("rsa", ("digital_signature",), "lacks keyEncipherment"),
        ("SECP256R1", ("digital_signature",), "lacks keyAgreement"),
        ("SECP256R1", ("key_encipherment",), "lacks keyAgreement"),
        ("rsa", ("key_encipherment",), ""),
        ("SECP384R1", ("key_agreement",), ""),
        ("rsa1024", (), "1024 bits"),
        ("SECP256K1", (), "curve 'secp256k1'"),
        ("SECP224R1", (), "curve 'secp224r1'"),
        ("ed25519", (), "can sign only"),
    ],
)
def test_fitness_of_certificates(
    checkpoint: Path, kind: str, uses: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    pair = make_recipient(tmp_path, "me", kind, uses=uses)
    sealed = tmp_path / "sealed"
    done = call("seal", checkpoint, "--to", pair.certificate, "-o", sealed)
    if says:
        assert done.exit_code == SealError.exit_code
        assert says in done.output
        assert str(pair.certificate) in done.output
        assert not sealed.exists()
    else:
        assert done.exit_code == 0, done.output
        assert opens(sealed, KeyFile(pair.key), tmp_path / "out")


def test_what_is_no_certificate(checkpoint: Path, pairs: dict[str, Pair], tmp_path: Path) -> None:
    place = tmp_path / "certificate"
    pem = pairs["rsa"].certificate.read_bytes()
    other = pairs["SECP256R1"].certificate.read_bytes()
    body = other.splitlines()[1]
    for content, says in (
        (b"", "no certificate"),
        (pem + other, "more than one"),
        (pem + other.replace(b" CERTIFICATE", b" TRUSTED CERTIFICATE"), "'TRUSTED CERTIFICATE'"),
        (pem + other.replace(body, b"*" + body[1:]), "damaged"),
        (pem + other.replace(body, b"A" * len(body)), "damaged certificate"),
        (pem + other.replace(b"-----END", b"----END"), "damaged"),
        (pem + other[: len(other) // 2], "damaged"),
        (pem + pairs["rsa"].key.read_bytes(), "'PRIVATE KEY'"),
        (pem + b" " * 70_000, "longer than"),
        (pairs["rsa"].key.read_bytes(), "no certificate"),
    ):
        place.write_bytes(content)
        with pytest.raises(SealError, match=f"{place}: .*{says}"):
            read_recipients([place])
    with pytest.raises(SealError, match="No such file"):
        read_recipients([tmp_path / "absent"])
    with pytest.raises(SealError, match="257 recipients"):
        read_recipients([place] * 257)
