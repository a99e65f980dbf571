"""What a plugin expects of the criu that loads it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from gpustasis.errors import CriuError

_PLACES = (  # where the loader finds libraries, whatever the distribution
    *("/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64"),
    *("/usr/lib", "/usr/local/lib"),
)
_UNVERSIONED = (
    1  # elf(5), VER_NDX_GLOBAL: up to it a symbol has no version; those of libraries have
)


def lacking(plugin: bytes, criu_program: Path) -> list[str]:
    """Symbols that the plugin needs and neither criu nor a library defines; or a library that is
    not there.

    plugin: the content of the shared object. Raises CriuError if it, or criu, is no ELF file.
    """
    needed = [
        name
        for name, symbol, version in _symbols(plugin, "the plugin")
        if symbol["st_shndx"] == "SHN_UNDEF"
        and symbol["st_info"]["bind"] == "STB_GLOBAL"
        and version <= _UNVERSIONED
    ]
    if not needed:
        return []
    defined = _defined(criu_program)
    for library in _libraries(plugin):
        place = next((p for d in _PLACES if (p := Path(d) / library).exists()), None)
        if place is None:
            return [library]
        defined |= _defined(place)
    return sorted(set(needed) - defined)


def _defined(path: Path) -> set[str]:
    found = _symbols(path.read_bytes(), str(path))
    return {name for name, symbol, _ in found if symbol["st_shndx"] != "SHN_UNDEF"}


def _libraries(content: bytes) -> list[str]:
    """What it says itself that it is loaded with (DT_NEEDED)."""
    from elftools.elf.dynamic import DynamicSection
    from elftools.elf.elffile import ELFFile

    section = ELFFile(io.BytesIO(content)).get_section_by_name(".dynamic")
    if not isinstance(section, DynamicSection):
        return []
    return [str(vars(tag)["needed"]) for tag in section.iter_tags("DT_NEEDED")]


def _symbols(content: bytes, name: str) -> list[tuple[str, Any, int]]:
    """Name, entry and index of version of every dynamic symbol."""
    from elftools.common.exceptions import ELFError
    from elftools.elf.elffile import ELFFile
    from elftools.elf.gnuversions import GNUVerSymSection
    from elftools.elf.sections import SymbolTableSection

    try:
        elf = ELFFile(io.BytesIO(content))
        table = elf.get_section_by_name(".dynsym")
        versions = elf.get_section_by_name(".gnu.version")
        found: list[tuple[str, Any, int]] = []
        if not isinstance(table, SymbolTableSection):
            return found
        for number, symbol in enumerate(table.iter_symbols()):
            index = 0
            if isinstance(versions, GNUVerSymSection):
                raw = versions.get_symbol(number)["ndx"]
                index = raw & 0x7FFF if isinstance(raw, int) else 0  # else it is a name of 0 or 1
            found.append((symbol.name, symbol.entry, index))
    except (ELFError, ValueError, KeyError, AttributeError, OSError) as exc:
        raise CriuError(f"{name} is not a sound ELF file: {exc}") from exc
    return found
