"""Compressing tools that follow a stock dump."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpustasis import process
from gpustasis.errors import UnsupportedError
from gpustasis_bench.bench.criu_run import TimedRun, run_timed

_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """A command-line tool. compress and decompress: its words, before the files; each replaces
    every file by its result."""

    compress: tuple[str, ...]
    decompress: tuple[str, ...]
    suffix: str

    @property
    def program(self) -> str:
        return self.compress[0]

    def require(self) -> None:
        """Raises UnsupportedError if the tool is not installed."""
        if shutil.which(self.program) is None:
            raise UnsupportedError(
                f"{self.program} is not installed: apt-get install {self.program}"
            )

    def version(self) -> str:
        """As the tool says: "1.9.4"."""
        said = process.run([self.program, "--version"], timeout_s=30).output
        found = re.search(r"\bv(\d+(?:\.\d+)+)", said)
        return found[1] if found else "unknown"

    def pack(self, images: Path, output: Path) -> TimedRun:
        """Compress the pages of a checkpoint."""
        return _run(self.compress, sorted(images.glob("pages-*.img")), output)

    def unpack(self, images: Path, output: Path) -> TimedRun:
        """Bring them back as they were."""
        return _run(self.decompress, sorted(images.glob(f"pages-*.img{self.suffix}")), output)


def _run(words: Sequence[str], files: list[Path], output: Path) -> TimedRun:
    return run_timed([*words, *map(str, files)], os.environ, output, _TIMEOUT_S)


LZ4 = Codec(
    compress=("lz4", "-1", "-q", "-f", "--rm", "-m"),
    decompress=("lz4", "-d", "-q", "-f", "--rm", "-m"),
    suffix=".lz4",
)
ZSTD = Codec(
    compress=("zstd", "-1", "-T0", "-q", "-f", "--rm"),
    decompress=("zstd", "-d", "-q", "-f", "--rm"),
    suffix=".zst",
)
