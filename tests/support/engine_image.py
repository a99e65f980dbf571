# SPDX-License-Identifier: Apache-2.0
"""The container image of the tests: busybox, a C library, and the programs under test."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Sequence
from pathlib import Path

from support.engine_root import EngineRoot

IMAGE = "localhost/gpustasis-test:latest"
_LOADER = "/lib64/ld-linux-x86-64.so.2"
_LIBRARIES = ("libc.so.6", "libm.so.6", "libgcc_s.so.1", "libstdc++.so.6")
_APPLETS = ("sh", "sleep", "cat", "ls", "mount", "mkfifo", "kill", "ps")


def make_archive(root: EngineRoot, programs: Sequence[Path] = ()) -> bytes:
    """The tar archive of the image's files: programs are in its /bin, by their names."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for directory in ("bin", "lib64", "lib", "tmp", "proc", "sys", "dev", "etc", "data"):
            entry = tarfile.TarInfo(directory)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if directory == "tmp" else 0o755
            tar.addfile(entry)
        libraries = Path("/usr/lib/x86_64-linux-gnu")
        _add(tar, "bin/busybox", root.path("/usr/bin/busybox"))
        _add(tar, _LOADER[1:], root.path(libraries / "ld-linux-x86-64.so.2"))
        for name in _LIBRARIES:
            _add(tar, f"lib/{name}", root.path(libraries / name))
        for name in _APPLETS:
            entry = tarfile.TarInfo(f"bin/{name}")
            entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(entry)
        for program in programs:
            _add(tar, f"bin/{program.name}", program)
    return buffer.getvalue()


def import_image(root: EngineRoot, programs: Sequence[Path] = ()) -> str:
    """Make the image known to Podman in `root`; returns its name, IMAGE."""
    archive = root.path("/tmp/image.tar")
    archive.write_bytes(make_archive(root, programs))
    root.run("podman", "import", "/tmp/image.tar", IMAGE)
    archive.unlink()
    return IMAGE


def _add(tar: tarfile.TarFile, name: str, source: Path) -> None:
    content = source.read_bytes()  # of a link: what it leads to, which lies in the same directory
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), 0o755
    tar.addfile(entry, io.BytesIO(content))
