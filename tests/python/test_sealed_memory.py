# SPDX-License-Identifier: Apache-2.0
"""Where data keys lie in the memory of a process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gpustasis._core import ENVELOPE_NAME
from gpustasis.sealing.recipients import read_recipients
from gpustasis.sealing.seal import seal
from support.inventory import write_inventory
from support.recipients import make_recipient

# argv: an envelope, a private key, a certificate, where to write another envelope. Unwraps, wraps,
# and waits.
HOLDER = """
import sys
from pathlib import Path
from gpustasis._core import DataKey, FreshKey
envelope = Path(sys.argv[1]).read_bytes()
certificate = Path(sys.argv[3]).read_bytes()
key = DataKey.unwrap(envelope, sys.argv[2])
key.check(key.wrap([certificate]))
fresh = FreshKey()
Path(sys.argv[4]).write_bytes(fresh.key.wrap([certificate]))
print("ready", flush=True)
sys.stdin.read()
"""


def found_in(pid: int, needles: list[bytes]) -> tuple[int, int]:
    """How often these are in the memory of a process: in locked mappings, and in others."""
    counts = [0, 0]
    with open(f"/proc/{pid}/smaps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as memory:
        place = (0, 0)
        for line in maps:
            first, _, rest = line.partition(" ")
            if "-" in first and not first.endswith(":"):
                low, high = (int(part, 16) for part in first.split("-"))
                place = (low, high) if rest.startswith("r") and "[v" not in rest else (0, 0)
            elif first == "VmFlags:" and place[1]:
                memory.seek(place[0])
                raw = memory.read(place[1] - place[0])
                locked = "lo" in rest.split()
                counts[0 if locked else 1] += sum(raw.count(needle) for needle in needles)
    return counts[0], counts[1]


@pytest.mark.parametrize("kind", ["rsa", "SECP256R1"])
def test_data_keys_are_in_locked_pages_only(kind: str, tmp_path: Path) -> None:
    """Also after a key was taken out of an envelope, and put into another one."""
    pair = make_recipient(tmp_path, kind=kind)
    (tmp_path / "plain").mkdir()
    write_inventory(tmp_path / "plain")
    sealed = tmp_path / "sealed"
    seal(tmp_path / "plain", read_recipients([pair.certificate]), sealed)

    def record(envelope: Path) -> bytes:
        argv = ["openssl", "cms", "-decrypt", "-inform", "DER", "-in", envelope]
        argv += ["-inkey", pair.key, "-recip", pair.certificate]
        return subprocess.run(argv, check=True, capture_output=True, timeout=60).stdout

    envelope, fresh = sealed / ENVELOPE_NAME, tmp_path / "fresh"
    argv = [sys.executable, "-c", HOLDER, envelope, pair.key, pair.certificate, fresh]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"ready\n"
        for made in (envelope, fresh):
            key = record(made)[32:]
            locked, elsewhere = found_in(holder.pid, [key[:16], key[16:]])
            assert locked >= 2
            assert elsewhere == 0
