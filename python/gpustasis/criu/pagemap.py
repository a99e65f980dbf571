"""CRIU's pagemap-*.img: which pages of a checkpoint lie in an earlier one (--prev-images-dir).

Source: CRIU images/pagemap.proto, criu/include/pagemap.h and criu/include/magic.h.
"""

from __future__ import annotations

import re
from pathlib import Path

from gpustasis.criu.protobuf import fields
from gpustasis.criu.records import has_magic, records
from gpustasis.errors import ImageError

PARENT_LINK = "parent"  # CRIU's own, to the directory of --prev-images-dir
_NAME = re.compile(r"pagemap-.*\.img")
_MAGIC = 0x56084025
_NR_PAGES_32, _IN_PARENT, _FLAGS, _NR_PAGES = 2, 3, 4, 5  # pagemap_entry
_PE_PARENT = 1


def parent_pages(images: Path) -> dict[str, int]:
    """Pages that lie in the parent, by name of the pagemap that says so; none: empty.

    Raises ImageError if a pagemap cannot be read.
    """
    found = {}
    for path in sorted(images.iterdir()):
        if is_pagemap(path.name) and (count := _parent_pages(path)):
            found[path.name] = count
    return found


def is_pagemap(name: str) -> bool:
    """Whether a file of that name in an image directory is a pagemap."""
    return _NAME.fullmatch(name) is not None


def _parent_pages(path: Path) -> int:
    try:
        return count_parent_pages(path.read_bytes(), str(path))
    except OSError as exc:
        raise ImageError(f"cannot read {path}: {exc.strerror}") from exc


def count_parent_pages(raw: bytes, path: str) -> int:
    """Pages of one pagemap that lie in the parent; `path` is for messages. Raises ImageError."""
    if not has_magic(raw, _MAGIC):
        raise ImageError(f"{path} is not a pagemap of CRIU")
    try:
        entries = records(raw)
        next(entries, None)  # the head: which pages-N.img
        return sum(_pages_in_parent(entry) for entry in entries)
    except (ValueError, IndexError) as exc:
        raise ImageError(f"{path} is damaged: {exc}") from exc


def _pages_in_parent(entry: bytes) -> int:
    """Of one run of pages; older CRIUs say it with a field of its own, newer ones with a flag."""
    numbers = {number: value for number, value in fields(entry) if isinstance(value, int)}
    if not numbers.get(_IN_PARENT) and not numbers.get(_FLAGS, 0) & _PE_PARENT:
        return 0
    return max(numbers.get(_NR_PAGES, 0), numbers.get(_NR_PAGES_32, 0), 1)
