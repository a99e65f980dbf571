"""Our lines in a file that is somebody else's: between two marks, found and taken out again."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpustasis.errors import InstallError

BEGIN = '# BEGIN gpustasis: made by "gpustasis install", taken out by "gpustasis uninstall"'
END = "# END gpustasis"
_BLOCK = re.compile(
    rb"^# BEGIN gpustasis\b[^\n]*\n(?:.*\n)*?# END gpustasis[^\n]*(?:\n|\Z)", re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where the block stands: its bytes from start, up to end; first and last line from 1."""

    start: int
    end: int
    lines: tuple[int, int]


def make(body: str) -> bytes:
    """The block with these lines in it. They must end with a newline."""
    return f"{BEGIN}\n{body}{END}\n".encode()


def find(data: bytes, origin: str) -> Place | None:
    """The block in a file. Raises InstallError if there are two, or half of one."""
    found = list(_BLOCK.finditer(data))
    marks = len(re.findall(rb"^# (?:BEGIN|END) gpustasis\b", data, re.MULTILINE))
    if marks != 2 * len(found) or len(found) > 1:
        raise InstallError(
            f"{origin} holds marks of gpustasis that do not make one block; "
            f"remove the lines that begin with {BEGIN[:16]!r} or {END!r}, and what is between them"
        )
    if not found:
        return None
    match = found[0]
    first = data.count(b"\n", 0, match.start()) + 1
    last = first + match[0].rstrip(b"\n").count(b"\n")
    return Place(match.start(), match.end(), (first, last))


def append(data: bytes, block: bytes) -> bytes:
    """The file with the block at its end, on a line of its own."""
    glue = b"\n" if data and not data.endswith(b"\n") else b""
    return data + glue + block


def blank(data: bytes, place: Place | None) -> bytes:
    """The file with empty lines where the block is: line numbers stay."""
    if place is None:
        return data
    lines = data.count(b"\n", place.start, place.end)
    return data[: place.start] + b"\n" * lines + data[place.end :]


def cut(data: bytes, place: Place) -> tuple[bytes, bytes]:
    """The file without the block, and also without the newline that append() may have put before.

    Which of them it was before only its hash can tell.
    """
    rest = data[: place.start] + data[place.end :]
    glued = data[: max(0, place.start - 1)] + data[place.end :]
    return rest, glued
