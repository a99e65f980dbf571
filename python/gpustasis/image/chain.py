# SPDX-License-Identifier: Apache-2.0
"""The chain below a checkpoint: directories of its parents, and the files that hold its chunks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from gpustasis._core import PARENT_LINK, Manifest, Source, image_name
from gpustasis.errors import ImageError, UnsupportedError
from gpustasis.image.checkpoint import find_manifest

NO_PARENT = bytes(16)
MAX_DEPTH = 65535  # docs/format.md, "Limits"
STORE_ROOT = Path("/var/lib/gpustasis")  # src/core/lineage.hpp
_DIGEST_SIZE = 16  # bytes at the end of an image


class State(StrEnum):
    """What is found where an earlier checkpoint should be. OUTSIDE: nowhere to look for it."""

    RIGHT = "right"
    MISSING = "missing"
    REPLACED = "replaced"
    OUTSIDE = "outside"


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSource:
    """A source of an image and what is there. directory: None if the links do not lead so far; of an archive
    that was named as a parent, the archive."""

    source: Source
    directory: Path | None
    state: State


def parent_directory(directory: Path) -> Path | None:
    """Where the link in `directory` leads, existing or not, without links; None: there is none.

    Raises ImageError.
    """
    link = directory / PARENT_LINK
    try:
        os.readlink(link)
        return link.resolve()
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError) as exc:  # RuntimeError: a loop, before Python 3.13
        raise ImageError(f"{link} is no link that can be followed: {exc}") from exc


def find_parent(directory: Path) -> Path | None:
    """Where the parent of the checkpoint in `directory` is: where its link leads; else where
    docs/format.md, "Links", says to look for its id; None if it is nowhere."""
    try:
        linked = parent_directory(directory)
    except ImageError:
        linked = None
    if linked is not None and linked.is_dir():
        return linked
    try:
        manifest = find_manifest(directory)
    except (ImageError, UnsupportedError):
        return None
    if manifest is None or manifest.parent_id == NO_PARENT:
        return None
    return find_checkpoint(manifest.parent_id)


def find_checkpoint(checkpoint_id: bytes) -> Path | None:
    """A directory below STORE_ROOT with that checkpoint."""
    name = checkpoint_id.hex()
    places = [STORE_ROOT / "checkpoints"]
    try:
        places += sorted((STORE_ROOT / "containers").iterdir())
    except OSError:  # there are none, or not for us
        pass
    for place in places:
        try:
            found = find_manifest(place / name)
        except (ImageError, UnsupportedError, OSError):
            continue
        if found is not None and found.checkpoint_id == checkpoint_id:
            return (place / name).resolve()
    return None


def chain_directories(directory: Path, depth: int) -> list[Path]:
    """`directory` and those that it is built on, at most `depth` of them, as far as they are
    there."""
    found = [directory]
    while len(found) <= depth:
        parent = find_parent(found[-1])
        if parent is None:
            break
        found.append(parent)
    return found


def parent_state(directory: Path, manifest: Manifest) -> State:
    """Whether what is found as the parent of `directory` is the one that `manifest` names."""
    try:
        parent = find_parent(directory)
        found = None if parent is None else find_manifest(parent)
        if parent is None:
            parent_directory(directory)  # what is there may be no link at all
    except (ImageError, UnsupportedError):
        return State.REPLACED
    if found is None:
        return State.MISSING
    return State.RIGHT if found.checkpoint_id == manifest.parent_id else State.REPLACED


def find_sources(directory: Path, sources: list[Source]) -> tuple[FoundSource, ...]:
    """What is there of each source of an image in `directory`: told by size and digest."""
    deepest = max((source.depth for source in sources), default=0)
    directories = chain_directories(directory, deepest)
    return tuple(_find(source, directories) for source in sources)


def _find(source: Source, directories: list[Path]) -> FoundSource:
    if source.depth >= len(directories):
        return FoundSource(source=source, directory=None, state=State.MISSING)
    directory = directories[source.depth]
    return FoundSource(
        source=source,
        directory=directory,
        state=_state(directory / image_name(source.pid), source),
    )


def _state(path: Path, source: Source) -> State:
    try:
        with path.open("rb") as file:
            if file.seek(0, os.SEEK_END) != source.file_size:
                return State.REPLACED
            file.seek(source.file_size - _DIGEST_SIZE)
            return State.RIGHT if file.read() == source.digest else State.REPLACED
    except FileNotFoundError:
        return State.MISSING
    except OSError:
        return State.REPLACED
