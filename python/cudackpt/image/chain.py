"""The chain below a checkpoint: directories of its parents, and the images that hold its chunks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from cudackpt._core import PARENT_LINK, Manifest, Source, image_name
from cudackpt.errors import ImageError, UnsupportedError
from cudackpt.image.checkpoint import find_manifest

NO_PARENT = bytes(16)
MAX_DEPTH = 65535  # docs/format.md, "Limits"
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


def chain_directories(directory: Path, depth: int) -> list[Path]:
    """`directory` and those that the links from it lead to, at most `depth` of them, as far as
    they are there."""
    found = [directory]
    while len(found) <= depth:
        try:
            parent = parent_directory(found[-1])
        except ImageError:
            break
        if parent is None or not parent.is_dir():
            break
        found.append(parent)
    return found


def parent_state(directory: Path, manifest: Manifest) -> State:
    """Whether the link in `directory` leads to the parent that `manifest` names."""
    try:
        parent = parent_directory(directory)
        found = None if parent is None else find_manifest(parent)
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
        source=source, directory=directory, state=_state(directory / image_name(source.pid), source)
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
