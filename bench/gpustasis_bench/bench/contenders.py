# SPDX-License-Identifier: Apache-2.0
"""Who is compared: ways to dump and restore the same process, some with a tool that compresses."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gpustasis import process
from gpustasis.criu.find import Criu
from gpustasis.criu.plugin import Setting
from gpustasis.errors import UnsupportedError
from gpustasis_bench.bench.ciphers import Cipher
from gpustasis_bench.bench.model import GB, Rates
from gpustasis_bench.bench.timing import TimedRun, run_timed

OURS = "ours"
STOCK = "stock"
STOCK_SYNCED = "stock+sync"  # the same dump as STOCK, and a sync after it
_COMPRESS_VERSION = (4, 3)  # the first criu with --compress
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """plugin: keys of the plugin's configuration; with_plugin False: criu loads none.
    dump_options, restore_options: criu's. codec: what follows the dump and goes before the restore.
    synced: the name under which the dump counts again, with a sync after it."""

    name: str
    plugin: Mapping[str, Setting] = field(default_factory=dict)
    with_plugin: bool = True
    dump_options: tuple[str, ...] = ()
    restore_options: tuple[str, ...] = ()
    codec: Codec | Cipher | None = None
    synced: str | None = None


_STOCK_PLUGIN: dict[str, Setting] = {"externalize": "off", "parallel_gpus": 1}
CONTENDERS = {
    each.name: each
    for each in (
        Contender(name=OURS),
        Contender(name=STOCK, plugin=_STOCK_PLUGIN, synced=STOCK_SYNCED),
        Contender(name="stock+lz4", plugin=_STOCK_PLUGIN, codec=LZ4),
        Contender(name="stock+zstd", plugin=_STOCK_PLUGIN, codec=ZSTD),
        Contender(
            name="criu --compress",
            plugin=_STOCK_PLUGIN,
            dump_options=("--compress",),
            restore_options=("--decompress-threads", "0"),
        ),
    )
}


def same_dumps() -> dict[str, str]:
    """Contenders that make the same dump as another one -> that one. What follows the dump
    differs."""
    return {
        each.name: STOCK
        for each in CONTENDERS.values()
        if each.codec is not None and not each.dump_options
    }


def why_absent(contender: Contender, criu: Criu) -> str | None:
    """Why this criu cannot do it, in half a sentence; None: it can."""
    if "--compress" not in contender.dump_options:
        return None
    if criu.version < _COMPRESS_VERSION:
        return f"not in criu {criu.version_text}, which is older than 4.3"
    words = [*criu.command(os.environ), "check", "--feature", "compress"]
    if process.run(words, timeout_s=60).status != 0:
        return f"not in this binary: criu {criu.version_text} was built without LZ4"
    return None


STAGED, DIRECT, OFF = "staged", "direct", "off"
# Published for an A100 (docs/performance.md names the sources). Of each GPU, all side by side.
RATES = {
    STAGED: Rates(down=2 * GB, up=7 * GB),
    DIRECT: Rates(down=9 * GB, up=11 * GB),
}
RATE_SETS = (*RATES, OFF)  # off: as fast as this machine's memory
OURS_RAM, OURS_DIRECT, OURS_BOTH = "ours ram", "ours direct", "ours direct+ram"
OURS_KEPT = "ours, staging kept"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """contender: under its name in reports. rates: of which set. in_memory: its images go to a
    tmpfs, and to the disk by a drain."""

    contender: Contender
    rates: str
    in_memory: bool = False

    @property
    def name(self) -> str:
        return self.contender.name


def second_variants(present: Sequence[Variant]) -> list[Variant]:
    """Of those, who makes the second checkpoints: ours with staging. To the disk at once both with
    the staging dropped and put back, and with all of it kept: what a job that runs on waits for
    differs most."""
    found = []
    for each in present:
        if each.name == STOCK or each.rates != STAGED:
            continue
        found.append(each)
        if not each.in_memory:
            plugin = {**each.contender.plugin, "staging": "keep"}
            kept = replace(each.contender, name=OURS_KEPT, plugin=plugin)
            found.append(replace(each, contender=kept))
    return found


def variants(arena: Path) -> list[Variant]:
    """All of them. arena: a folder on a tmpfs."""
    ram: dict[str, Setting] = {"tier": "ram", "arena": str(arena)}
    stock = CONTENDERS[STOCK].plugin
    return [
        Variant(contender=Contender(name=STOCK, plugin=stock), rates=STAGED),
        Variant(contender=Contender(name=OURS), rates=STAGED),
        Variant(
            contender=Contender(name=OURS_RAM, plugin={**ram, "staging": "auto"}),
            rates=STAGED,
            in_memory=True,
        ),
        Variant(
            contender=Contender(name=OURS_DIRECT, plugin={"gpu_memory": "direct"}), rates=DIRECT
        ),
        Variant(
            contender=Contender(name=OURS_BOTH, plugin={**ram, "gpu_memory": "direct"}),
            rates=DIRECT,
            in_memory=True,
        ),
    ]
