"""How much an archive may ask of its reader."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one archive; what goes beyond one is an ArchiveError.

    members: headers of any kind. names_bytes: of memory for all names and the
    directories they imply, which are kept to find one that comes twice. name_bytes: of one name; name_parts:
    directories in it. header_bytes: of one
    extended header (pax, GNU long name). kept_bytes: of the small files that are read whole;
    kept_file_bytes: of one of them. image_files: images and their stripes, each of which takes two
    descriptors. index_bytes: of all images' metadata and indexes.
    unpacked_bytes: of the whole archive. An archive that unpacks to more than ratio_free_bytes may
    be at most ratio times smaller than what comes out of it: gzip cannot do better, and what zstd
    makes smaller still is empty. window_bytes: of zstd's memory. padding_bytes: behind the end.
    """

    members: int = 1 << 18
    names_bytes: int = 64 * MIB
    name_bytes: int = 4096
    name_parts: int = 32
    header_bytes: int = 1 * MIB
    kept_bytes: int = 64 * MIB
    kept_file_bytes: int = 4 * MIB
    image_files: int = 4096
    index_bytes: int = 512 * MIB
    unpacked_bytes: int = 16 << 40
    ratio: int = 1024
    ratio_free_bytes: int = 16 * GIB
    window_bytes: int = 128 * MIB
    padding_bytes: int = 1 * MIB


DEFAULT_LIMITS = Limits()
