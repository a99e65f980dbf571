"""What an administrator should know about a root before containers are checkpointed there.

Programs of the root are looked at, not run: it may be another system's.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from gpustasis.criu.configuration import CRUN_FILE
from gpustasis.errors import InstallError
from gpustasis.install import layout
from gpustasis.install.root import Root

CRUN_PLACES = ("/usr/bin/crun", "/usr/sbin/crun", "/usr/local/bin/crun", "/usr/local/sbin/crun")

# Where distributions' criu looks if no libdir is set.
STOCK_DIRECTORIES = ("/usr/lib/criu", "/usr/lib64/criu", "/usr/lib/x86_64-linux-gnu/criu")


def advice(root: Root, python: str) -> Iterator[str]:
    """Sentences. python: the hook's interpreter, as a path in the root."""
    for place in CRUN_PLACES:
        try:
            found = root.read(place)
        except InstallError:
            continue
        if found is not None:
            yield from crun_advice(place, found.data)
    for directory in STOCK_DIRECTORIES:
        try:
            plugins = [name for name in root.listing(directory) if name.endswith(".so")]
        except InstallError:  # links to nowhere: criu finds nothing there either
            continue
        if plugins:
            yield (
                f"criu does not load {', '.join(plugins)} from {directory} any more: it has one "
                "plugin directory, now ours"
            )
    for path in (python, f"{layout.packages()}/gpustasis"):
        if not root.exists(path):
            yield (
                f"{path} is not there, and {layout.HOOK} needs it: containers with annotations "
                "io.gpustasis.* will not start"
            )
    if os.path.samefile(root.directory, "/"):
        for part in writable_by_others(Path(layout.packages()) / "gpustasis"):
            yield (
                f"{part} can be written by others than root, and {layout.HOOK} runs what is in it "
                "as root; install gpustasis where only root can write"
            )


def crun_advice(place: str, program: bytes) -> Iterator[str]:
    """What this build of crun cannot do. program: its bytes."""
    if b"libcriu.so" not in program:
        yield f"{place} was built without CRIU: it can neither checkpoint nor restore; use runc"
    elif CRUN_FILE.encode() not in program:
        yield (
            f"{place} is older than 1.26: it reads neither {CRUN_FILE} nor runc.conf, nor follows "
            "the annotation org.criu.config. It finds the plugin through /etc/criu/default.conf; "
            "options such as ghost-limit have to stand there too, and tcp-established has no effect"
        )


def writable_by_others(path: Path) -> Iterator[Path]:
    """Parts of a path, from its end on, that others than root could put something else into."""
    for part in (path, *path.parents):
        found = part.stat()
        shared = found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX
        if found.st_uid != 0 or shared:
            yield part
