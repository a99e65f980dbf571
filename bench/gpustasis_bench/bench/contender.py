"""Who is compared: ways to dump and restore the same process."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from gpustasis import process
from gpustasis.criu.find import Criu
from gpustasis.criu.plugin import Scalar
from gpustasis_bench.bench.codec import LZ4, ZSTD, Codec

OURS = "ours"
STOCK = "stock"
STOCK_SYNCED = "stock+sync"  # the same dump as STOCK, and a sync after it
_COMPRESS_VERSION = (4, 3)  # the first criu with --compress


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """plugin: keys of the plugin's configuration. dump_options, restore_options: criu's.
    codec: what follows the dump and goes before the restore. synced: the name under which the dump
    counts again, with a sync after it."""

    name: str
    plugin: dict[str, Scalar] = field(default_factory=dict)
    dump_options: tuple[str, ...] = ()
    restore_options: tuple[str, ...] = ()
    codec: Codec | None = None
    synced: str | None = None


_STOCK_PLUGIN: dict[str, Scalar] = {"externalize": "off"}
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
