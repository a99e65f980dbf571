# SPDX-License-Identifier: Apache-2.0
"""Single bits of a checkpoint's files are flipped: `gpustasis verify` must find each of them."""

from __future__ import annotations

from pathlib import Path
from random import Random

from click.testing import CliRunner

from campaigns.tally import Tally
from gpustasis.cli.verify import command
from gpustasis.errors import ImageError


def run(images: Path, random: Random, flips: int) -> Tally:
    """One bit at a time, anywhere in our files in `images`, each byte as likely as any other."""
    tally = Tally()
    files = sorted(images.glob("gpustasis-*.img"))
    sizes = [file.stat().st_size for file in files]
    whole = CliRunner().invoke(command, [str(images)])
    assert whole.exit_code == 0, whole.output
    for _ in range(flips):
        place = random.randrange(8 * sum(sizes))
        index = 0
        while place >= 8 * sizes[index]:
            place -= 8 * sizes[index]
            index += 1
        offset, bit = divmod(place, 8)
        _flip(files[index], offset, bit)
        verified = CliRunner().invoke(command, [str(images)])
        _flip(files[index], offset, bit)
        tally.counts["trials"] += 1
        if isinstance(verified.exception, ImageError) and files[index].name in verified.output:
            tally.counts["found"] += 1
        else:
            what = f"bit {bit} of byte {offset} of {files[index].name}"
            tally.failures.append(f"{what}: {verified.output or verified.exception!r}")
    return tally


def _flip(file: Path, offset: int, bit: int) -> None:
    with file.open("r+b", buffering=0) as raw:
        raw.seek(offset)
        value = raw.read(1)[0]
        raw.seek(offset)
        raw.write(bytes([value ^ 1 << bit]))
