# SPDX-License-Identifier: Apache-2.0
"""The Debian roots that ci/test-root makes, and programs of this package in them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpustasis.errors import UnsupportedError

_PACKAGE = Path(__file__).resolve().parent
_FOLDER = "/mnt/folder"
# Words: root, package, folder, the program's. Nothing in the root changes: what is mounted there is
# mounted in a namespace of its own.
_ENTER = """
root=$0 package=$1 folder=$2
mount -t proc proc "$root/proc"
mount -t tmpfs tmpfs "$root/tmp"
mount -t tmpfs tmpfs "$root/mnt"
mkdir -p "$root/mnt/packages/gpustasis_bench" "$root/mnt/folder"
mount --bind "$package" "$root/mnt/packages/gpustasis_bench"
mount -o remount,bind,ro "$root/mnt/packages/gpustasis_bench"
mount --bind "$folder" "$root/mnt/folder"
shift 2
exec chroot "$root" /usr/bin/env -i PATH=/usr/bin:/bin HOME=/tmp LC_ALL=C.UTF-8 \\
    PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=/mnt/packages "$@"
"""


def roots_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Where ci/test-root keeps them."""
    cache = environ.get("GPUSTASIS_CACHE")
    if cache:
        return Path(cache) / "roots"
    return Path(environ.get("XDG_CACHE_HOME") or "/var/cache") / "gpustasis" / "roots"


def require_root(name: str, environ: Mapping[str, str] = os.environ) -> Path:
    """The root of that name. Raises UnsupportedError if it was not made."""
    root = roots_directory(environ) / name
    if not root.is_dir():
        raise UnsupportedError(f"there is no root {root}; ci/test-root {name} makes it")
    return root


def command_in(root: Path, folder: Path, words: Sequence[str]) -> list[str]:
    """What runs a program in `root`, as root, with this package in Python's path. It can write to
    `folder`, whose path in there takes the place of "{folder}" in `words`."""
    inside = [_FOLDER if word == "{folder}" else word for word in words]
    enter = ["sh", "-ec", _ENTER, str(root), str(_PACKAGE), str(folder.absolute()), *inside]
    return [
        *("unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child"),
        *enter,
    ]
