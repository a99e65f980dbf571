# SPDX-License-Identifier: Apache-2.0
"""The programs of the kernel's packet filters, which this machine may lack: those of the test root
"engines" (ci/test-root)."""

from __future__ import annotations

import shlex
from pathlib import Path

from gpustasis_bench.roots import roots_directory


def put_nft(directory: Path) -> None:
    """nftables' program."""
    _put(directory, "nft", "nft")


def put_iptables(directory: Path) -> None:
    """What CRIU locks a network with by itself, for IPv4 and IPv6."""
    for name in ("iptables-restore", "ip6tables-restore"):
        _put(directory, name, "xtables-nft-multi", name)


def _put(directory: Path, name: str, program: str, *arguments: str) -> None:
    root = roots_directory() / "engines"
    libraries = root / "usr/lib/x86_64-linux-gnu"
    words = [str(root / "lib64/ld-linux-x86-64.so.2"), "--library-path", str(libraries)]
    words += [str(root / "usr/sbin" / program), *arguments]
    directory.mkdir(exist_ok=True)
    script = directory / name
    script.write_text(
        f"#!/bin/sh\nexport XTABLES_LIBDIR={shlex.quote(str(libraries / 'xtables'))}\n"
        f'exec {shlex.join(words)} "$@"\n'
    )
    script.chmod(0o755)
