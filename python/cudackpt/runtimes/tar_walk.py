"""Members of a plain tar file that may be hostile: where they lie, never what they would do.

Nothing is unpacked and no path of the archive is ever used. Source of the layout: tar(5), POSIX
pax "Interchange Format"; GNU long names and base-256 sizes as in the GNU tar manual.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from cudackpt.errors import ImageError

MEMBER_LIMIT = 100_000
NAME_LIMIT = 4096  # bytes
_EXTENSION_LIMIT = 64 << 10  # bytes of a pax header or of a GNU long name
_BLOCK = 512
_REGULAR = b"0\0"
_PAX, _PAX_GLOBAL, _GNU_NAME, _GNU_LINK = b"x", b"g", b"L", b"K"


@dataclass(frozen=True, slots=True)
class Member:
    """One file or directory of an archive. name: without "./" before it. offset: of its bytes."""

    name: str
    regular: bool
    size: int
    offset: int


def members(handle: int, size: int, title: str) -> Iterator[Member]:
    """Each member of the tar file open as `handle`, which has `size` bytes, in order.

    title: what messages call it. Raises ImageError for what is no tar file, is cut off, or goes
    beyond the limits above; OSError.
    """
    offset = count = 0
    name: str | None = None
    override: int | None = None
    while True:
        block = os.pread(handle, _BLOCK, offset)
        if not block.strip(b"\0"):
            if count == 0:
                raise ImageError(f"{title} is no tar file: nothing is in it")
            return
        if len(block) < _BLOCK:
            raise ImageError(f"{title} is cut off at byte {offset + len(block)}")
        _check(block, offset, title)
        kind = block[156:157]
        length = _number(block[124:136], title, offset)
        data = offset + _BLOCK
        extension = kind in (_PAX, _PAX_GLOBAL, _GNU_NAME, _GNU_LINK)
        if not extension and override is not None:
            length = override
        offset = data + -(-length // _BLOCK) * _BLOCK
        if data + length > size:
            raise ImageError(
                f"{title} is cut off: a member at byte {data} has {length} bytes, the file {size}"
            )
        count += 1
        if count > MEMBER_LIMIT:
            raise ImageError(f"{title} has more than {MEMBER_LIMIT} members")
        if extension:
            if length > _EXTENSION_LIMIT:
                raise ImageError(
                    f"{title}: an extended header at byte {data} has {length} bytes; at most "
                    f"{_EXTENSION_LIMIT} are read"
                )
            raw = os.pread(handle, length, data)
            if kind == _GNU_NAME:
                name = raw.rstrip(b"\0").decode("utf-8", "replace")
            elif kind == _PAX:
                records = _pax(raw, title, data)
                name = records.get("path", name)
                override = _pax_size(records, title, data)
            continue
        text = name if name is not None else _plain_name(block)
        if len(text.encode("utf-8", "replace")) > NAME_LIMIT:
            raise ImageError(f"{title}: a name at byte {data} is longer than {NAME_LIMIT} bytes")
        yield Member(text.removeprefix("./"), kind in _REGULAR, length, data)
        name = override = None


def _check(block: bytes, offset: int, title: str) -> None:
    """The checksum: the sum of the header's bytes, its own eight taken as spaces."""
    total = sum(block[:148]) + sum(block[156:]) + 8 * 0x20
    try:
        stated = int(block[148:156].strip(b" \0"), 8)
    except ValueError:
        stated = -1
    if stated != total:
        what = "is no tar file" if offset == 0 else "is damaged"
        raise ImageError(f"{title} {what}: the header at byte {offset} has a wrong checksum")


def _number(field: bytes, title: str, offset: int) -> int:
    """An octal number, or a base-256 one when the first bit is set."""
    if field[0] & 0x80:
        value = int.from_bytes(bytes([field[0] & 0x7F]) + field[1:])
    else:
        try:
            value = int(field.strip(b" \0") or b"0", 8)
        except ValueError:
            value = -1
    if not 0 <= value < 1 << 63:
        raise ImageError(f"{title} is damaged: the header at byte {offset} has no valid size")
    return value


def _plain_name(block: bytes) -> str:
    """Of a ustar header; GNU's has other things where ustar's prefix is."""
    name = block[:100].split(b"\0", 1)[0]
    if block[257:263] == b"ustar\0":
        prefix = block[345:500].split(b"\0", 1)[0]
        name = prefix + b"/" + name if prefix else name
    return name.decode("utf-8", "replace")


def _pax(raw: bytes, title: str, offset: int) -> dict[str, str]:
    """Records "LENGTH KEY=VALUE\\n" of an extended header."""
    records = {}
    while raw:
        digits, _, _ = raw.partition(b" ")
        length = int(digits) if digits.isdigit() and len(digits) < 8 else 0
        record = raw[len(digits) + 1 : length]
        if length > len(raw) or not record.endswith(b"\n") or b"=" not in record:
            raise ImageError(f"{title} is damaged: the extended header at byte {offset}")
        key, _, value = record[:-1].partition(b"=")
        records[key.decode("utf-8", "replace")] = value.decode("utf-8", "replace")
        raw = raw[length:]
    return records


def _pax_size(records: dict[str, str], title: str, offset: int) -> int | None:
    text = records.get("size")
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise ImageError(
            f"{title} is damaged: the extended header at byte {offset} has size {text!r}"
        )
    return int(text)
