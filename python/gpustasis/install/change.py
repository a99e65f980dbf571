# SPDX-License-Identifier: Apache-2.0
"""What is to be done to one path, and doing it; and our lines in a file that is somebody else's:
between two marks, found and taken out again.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from enum import StrEnum

from gpustasis.criu.plugin import Option, parse_options
from gpustasis.errors import CriuError, InstallError
from gpustasis.install.layout import File, Kind, Lines
from gpustasis.install.record import Before, Entry
from gpustasis.install.root import Found, Root

MAX_CONFIGURATION = 1 << 20  # bytes of a file of CRIU's configuration
BEGIN = '# BEGIN gpustasis: made by "gpustasis install", taken out by "gpustasis uninstall"'
END = "# END gpustasis"
_BLOCK = re.compile(
    rb"^# BEGIN gpustasis\b[^\n]*\n(?:.*\n)*?# END gpustasis[^\n]*(?:\n|\Z)", re.MULTILINE
)


class Action(StrEnum):
    """What is done to a path; what the commands print."""

    CREATE = "create"
    EXTEND = "extend"
    REPLACE = "replace"
    UNCHANGED = "unchanged"
    KEEP = "keep"
    SKIP = "skip"
    REMOVE = "remove"
    RESTORE = "restore"


@dataclass(frozen=True, slots=True)
class Change:
    """path, action and note are for people. data: what is to be written; None: nothing.

    entry: what the record says afterwards; None: the path is not in it.
    like: the file whose owner and mode it keeps.
    """

    path: str
    action: Action
    note: str = ""
    entry: Entry | None = None
    data: bytes | None = None
    mode: int = 0o644
    like: Found | None = None

    def apply(self, root: Root) -> None:
        if self.data is not None:
            root.write(self.path, self.data, self.mode, self.like)


def digest(data: bytes) -> str:
    """What a record of installed files holds of a file's content."""
    return hashlib.sha256(data).hexdigest()


def of_file(root: Root, wanted: File, entry: Entry | None) -> Change:
    """What is to be done for a file of ours. Raises InstallError if somebody else's is there."""
    found = root.read(wanted.path)
    sha256 = digest(wanted.data)
    ours = Entry(wanted.path, False, (sha256,))
    change = Change(wanted.path, Action.CREATE, "", ours, wanted.data, wanted.mode)
    if found is None:
        return change
    same = found.data == wanted.data
    if entry is None:
        if same or wanted.kind is Kind.CONFIGURATION:
            text = "it was there before" if same else "it was there before; yours counts"
            return Change(wanted.path, Action.KEEP, text)
        raise InstallError(
            f"{wanted.path} is there already, and no installation by this command put it there: "
            "remove it, or the package that it belongs to"
        )
    if same and found.status.st_mode & 0o7777 == wanted.mode:
        return Change(wanted.path, Action.UNCHANGED, "", ours)
    if same:
        if wanted.kind is not Kind.PROGRAM:
            return Change(wanted.path, Action.UNCHANGED, "its mode is yours", ours)
        return replace(change, action=Action.REPLACE, note="its mode had been changed")
    if digest(found.data) in entry.ours:
        return replace(change, action=Action.REPLACE, note="with the one of this version")
    if wanted.kind is Kind.PROGRAM:
        return replace(change, action=Action.REPLACE, note="it had been changed")
    return Change(wanted.path, Action.KEEP, "you have changed it; yours counts", entry)


def of_lines(root: Root, wanted: Lines, entry: Entry | None) -> Change:
    """What is to be done for lines of ours in a file.

    Raises InstallError if they are at odds with what stands there, or if criu cannot read it.
    """
    found = root.read(wanted.path, MAX_CONFIGURATION)
    if found is None:
        if wanted.if_there:
            return Change(wanted.path, Action.SKIP, "not there; crun reads runc.conf instead")
        text = make_block(wanted.body)
        return Change(
            wanted.path, Action.CREATE, "", Entry(wanted.path, True, (digest(text),)), text
        )
    place = find_block(found.data, wanted.path)
    text, left_out = _fitted(wanted, blank_block(found.data, place))
    note = f"{', '.join(left_out)}: yours counts" if left_out else ""
    ours = (digest(text),)
    if place is None:
        known = entry.before if entry is not None else None
        sha256 = digest(found.data)
        before = Before(sha256, found.status.st_mtime_ns)
        if known is not None and known.sha256 == sha256:
            before = known
        return Change(
            wanted.path,
            Action.EXTEND,
            note,
            Entry(wanted.path, True, ours, before),
            append_block(found.data, text),
            like=found,
        )
    present = found.data[place.start : place.end]
    if entry is None:
        raise InstallError(
            f"{wanted.path}, lines {place.lines[0]} to {place.lines[1]}: lines of gpustasis that "
            "no record of an installation speaks of; remove them"
        )
    if present == text:
        return Change(wanted.path, Action.UNCHANGED, note, replace(entry, ours=ours))
    if digest(present) not in entry.ours:
        return Change(wanted.path, Action.KEEP, "you have changed our lines; yours count", entry)
    data = found.data[: place.start] + text + found.data[place.end :]
    return Change(
        wanted.path, Action.REPLACE, note, replace(entry, ours=ours), data=data, like=found
    )


def _fitted(wanted: Lines, others: bytes) -> tuple[bytes, list[str]]:
    """The block for a file with these other lines, and what is left out of it: options that the
    file sets itself. A libdir may stand there only if it is ours."""
    theirs = {}
    for option in _parse(others, wanted.path):
        theirs[option.name.removeprefix("no-")] = option
    kept, left_out = [], []
    for wanted_line in wanted.body.splitlines(keepends=True):
        line = wanted_line
        for option in parse_options(wanted_line, "our own lines"):
            other = theirs.get(option.name)
            if other is None or str(other) == str(option):
                continue
            if option.name == "libdir":
                raise InstallError(
                    f"{wanted.path}, line {other.line}: {str(other)!r} is set already; criu loads "
                    f"plugins from one directory only, and ours is {option.value}: remove that line"
                )
            left_out.append(f"{other} in line {other.line}")
            line = f"# Not set here, for it is set above: {line}"
        kept.append(line)
    return make_block("".join(kept)), left_out


def _parse(data: bytes, path: str) -> list[Option]:
    try:
        return parse_options(data.decode("utf-8", "surrogateescape"), path)
    except CriuError as exc:
        raise InstallError(f"{exc}; criu ends when it reads this. Mend it first") from exc


@dataclass(frozen=True, slots=True)
class Place:
    """Where the block stands: its bytes from start, up to end; first and last line from 1."""

    start: int
    end: int
    lines: tuple[int, int]


def make_block(body: str) -> bytes:
    """The block with these lines in it. They must end with a newline."""
    return f"{BEGIN}\n{body}{END}\n".encode()


def find_block(data: bytes, origin: str) -> Place | None:
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


def append_block(data: bytes, block: bytes) -> bytes:
    """The file with the block at its end, on a line of its own."""
    glue = b"\n" if data and not data.endswith(b"\n") else b""
    return data + glue + block


def blank_block(data: bytes, place: Place | None) -> bytes:
    """The file with empty lines where the block is: line numbers stay."""
    if place is None:
        return data
    lines = data.count(b"\n", place.start, place.end)
    return data[: place.start] + b"\n" * lines + data[place.end :]


def cut_block(data: bytes, place: Place) -> tuple[bytes, bytes]:
    """The file without the block, and also without the newline that append_block() may have put
    before.

    Which of them it was before only its hash can tell.
    """
    rest = data[: place.start] + data[place.end :]
    glued = data[: max(0, place.start - 1)] + data[place.end :]
    return rest, glued
