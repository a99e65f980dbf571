# SPDX-License-Identifier: Apache-2.0
"""What three programs make of a tar archive: our reader, GNU tar and Go's archive/tar."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpustasis.archive.stream import DEFAULT_LIMITS, Compression, Limits, UnpackedStream
from gpustasis.archive.tar import Kind, TarReader

SOURCE = Path(__file__).resolve().parent.parent / "programs" / "tar_list.go"
_LINE = re.compile(rb'(.)\S{9} \d+/\d+ +(\d+|\d+,\d+) \S+ \S+ "((?:[^"\\]|\\.)*)"(.*)')
_LINKED = re.compile(rb'(?: -> | link to )"((?:[^"\\]|\\.)*)"')
_QUOTED = re.compile(rb"\\([0-7]{3}|.)")
_LETTERS = {b"a": 7, b"b": 8, b"t": 9, b"n": 10, b"v": 11, b"f": 12, b"r": 13}
_KINDS = {"-": "file", "d": "directory", "l": "symlink", "h": "hardlink", "p": "fifo"} | {
    "c": "character device",
    "b": "block device",
}
_OURS = {
    Kind.FILE: "file",
    Kind.DIRECTORY: "directory",
    Kind.SYMLINK: "symlink",
    Kind.HARDLINK: "hardlink",
    Kind.FIFO: "fifo",
    Kind.CHARACTER_DEVICE: "character device",
    Kind.BLOCK_DEVICE: "block device",
}
_GO = {"0": "file", "5": "directory", "2": "symlink", "1": "hardlink", "6": "fifo"} | {
    "3": "character device",
    "4": "block device",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One member. name: without what means nothing in a path. size: bytes of content. digest: of
    that, SHA-256. target: of a link, else empty."""

    name: bytes
    kind: str
    size: int
    digest: str
    target: bytes


class DisagreementError(Exception):
    """A reader refuses, or reads otherwise, what ours accepts."""


def build_go_reader(directory: Path) -> Path:
    """Compile tests/programs/tar_list.go into `directory`; the program."""
    compiler = shutil.which("go")
    assert compiler is not None, "no Go compiler; run ci/setup"
    program = directory / "tar_list"
    environ = os.environ | {"GOCACHE": str(directory / "go-cache"), "GOTOOLCHAIN": "local"}
    subprocess.run([compiler, "build", "-o", program, SOURCE], env=environ, check=True)
    return program


def ours(path: Path, limits: Limits = DEFAULT_LIMITS) -> list[Listed]:
    """Raises ArchiveError for what our reader refuses. `path` is not compressed."""
    found = []
    with path.open("rb") as file:
        stream = UnpackedStream(file, Compression.NONE, limits, str(path))
        reader = TarReader(stream, limits)
        for member in reader:
            content = reader.read(member.size)
            found.append(
                Listed(
                    name=os.fsencode(member.name),
                    kind=_OURS[member.kind],
                    size=len(content),
                    digest=hashlib.sha256(content).hexdigest(),
                    target=os.fsencode(member.target),
                )
            )
    return found


def of_go(program: Path, paths: Sequence[Path]) -> list[list[Listed] | str]:
    """For each path its members, or the error."""
    ended = subprocess.run([program, *paths], capture_output=True, check=True)
    found: list[list[Listed] | str] = []
    for line in ended.stdout.splitlines():
        listing = json.loads(line)
        if listing["error"]:
            found.append(listing["error"])
            continue
        found.append(
            [
                Listed(
                    name=_plain(bytes.fromhex(member["name"])),
                    kind=_GO.get(member["type"], f"type {member['type']!r}"),
                    size=member["size"],
                    digest=member["digest"],
                    target=bytes.fromhex(member["target"]) if member["type"] in ("1", "2") else b"",
                )
                for member in listing["members"] or []
            ]
        )
    return found


def of_gnu(path: Path) -> list[Listed]:
    """Raises DisagreementError if GNU tar has anything to say against the archive."""
    words = ("--absolute-names", "--warning=no-unknown-keyword", "--file", str(path))
    listed = _gnu("--list", "--verbose", "--numeric-owner", "--quoting-style=c", *words)
    contents = _gnu("--extract", "--to-stdout", *words)
    found, offset = [], 0
    for line in listed.splitlines():
        match = _LINE.fullmatch(line)
        if match is None:
            raise DisagreementError(f"GNU tar prints {line!r}")
        kind = _KINDS.get(match[1].decode(), f"type {match[1]!r}")
        size = int(match[2]) if kind == "file" else 0
        content = contents[offset : offset + size]
        offset += size
        target = _LINKED.fullmatch(match[4])
        found.append(
            Listed(
                name=_plain(_unquoted(match[3])),
                kind=kind,
                size=len(content),
                digest=hashlib.sha256(content).hexdigest(),
                target=b"" if target is None else _unquoted(target[1]),
            )
        )
    if offset != len(contents):
        raise DisagreementError(f"GNU tar has {len(contents) - offset} more bytes of content")
    return found


def _gnu(*words: str) -> bytes:
    environ = os.environ | {"LC_ALL": "C.UTF-8", "TZ": "UTC", "TAR_OPTIONS": ""}
    ended = subprocess.run(["tar", *words], env=environ, capture_output=True, check=False)
    if ended.returncode != 0 or ended.stderr:
        raise DisagreementError(f"GNU tar: {ended.stderr.decode(errors='replace')}")
    return ended.stdout


def _unquoted(text: bytes) -> bytes:
    def byte(found: re.Match[bytes]) -> bytes:
        escape = found[1]
        if len(escape) == 3:
            return bytes([int(escape, 8)])
        return bytes([_LETTERS[escape]]) if escape in _LETTERS else escape

    return _QUOTED.sub(byte, text)


def _plain(name: bytes) -> bytes:
    return b"/".join(part for part in name.split(b"/") if part not in (b"", b"."))
