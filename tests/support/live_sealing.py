# SPDX-License-Identifier: Apache-2.0
"""Dumps that are sealed while they are made, and what is in them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from campaigns.rig import Rig
from gpustasis._core import DataKey, Encoding, ImageReader, SealedReader
from gpustasis.criu.plugin import Scalar
from support.certificates import Pair

_NEEDLE = 64  # bytes


def sealed_for(*pairs: Pair, **more: Scalar) -> dict[str, Scalar]:
    return {
        "recipients": [str(pair.certificate) for pair in pairs],
        "risk": ["clear-images"],
        **more,
    }


def opened_by(pair: Pair) -> dict[str, Scalar]:
    return {"private_key": str(pair.key)}


def key_of(images: Path, pair: Pair) -> DataKey:
    return DataKey.unwrap((images / "gpustasis-sealed.cms").read_bytes(), pair.key)


def ours(images: Path) -> set[str]:
    return {path.name for path in images.glob("gpustasis*") if path.suffix in (".img", ".cms")}


def needles(images: Path, pair: Pair) -> list[bytes]:
    """Pieces of the memory that the sealed images hold, as they were in the job."""
    key = key_of(images, pair)
    found = []
    for entry in SealedReader.open(images, key).entries:
        if entry.name == "gpustasis-manifest.img" or not entry.name.startswith("gpustasis-"):
            continue  # CRIU's
        if not entry.name.endswith(".img"):
            continue  # statistics
        image = ImageReader.find_sealed(images, entry.name, key)
        image.attach_sources()
        for index in range(len(image)):
            if image.chunk(index).encoding == Encoding.RAW:
                chunk = image.read_chunk(index)
                pieces = (chunk[at : at + _NEEDLE] for at in range(0, len(chunk), _NEEDLE))
                found.append(max(pieces, key=lambda piece: len(set(piece))))
    return [piece for piece in found if len(set(piece)) > _NEEDLE // 2][:8]


def require_nowhere(images: Path, pair: Pair) -> None:
    """What of the job's memory is sealed is in no file of the directory."""
    wanted = needles(images, pair)
    assert wanted
    for path in images.iterdir():
        content = path.read_bytes()
        for needle in wanted:
            assert needle not in content, path.name


def gpustasis(rig: Rig, *words: str | int | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gpustasis", *map(str, words)],
        env=dict(rig.environ),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
