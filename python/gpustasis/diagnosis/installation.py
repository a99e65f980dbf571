# SPDX-License-Identifier: Apache-2.0
"""What `gpustasis install` sets up, and whether criu will come to our plugin through it."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpustasis import process
from gpustasis.criu.plugin import (
    CRUN_FILE,
    DEFAULT_FILE,
    PLUGIN_NAME,
    RUNC_FILE,
    Option,
    parse_options,
)
from gpustasis.diagnosis import Finding, note, ok, problem
from gpustasis.errors import CriuError, InstallError
from gpustasis.install.change import Action, Change
from gpustasis.install.installation import install
from gpustasis.install.layout import HOOK
from gpustasis.install.record import RECORD
from gpustasis.install.root import Root

_NAME = "installation"
_AGAIN = 'run "gpustasis install" again'
_STOCK = "/usr/lib/criu"  # where criu looks if nothing says otherwise
_HOOK_TIMEOUT_S = 30.0
_CRIU_TIMEOUT_S = 10  # criu's own default, for stopping the tasks


def check(criu_program: Path | None, python: str, directory: Path = Path("/")) -> list[Finding]:
    """criu_program: whose symbols plugins need; None: there is none. python: the hook's
    interpreter. directory: the host's root."""
    try:
        return _check(criu_program, python, directory)
    except OSError as exc:
        return [problem(_NAME, f"cannot be looked at: {exc.strerror}", "run as root")]


def _check(criu_program: Path | None, python: str, directory: Path) -> list[Finding]:
    with Root(directory, alone=False) as root:
        installed = root.exists(RECORD)
        findings = [_installation(root, python) if installed else _not_installed()]
        if installed and directory == Path("/"):
            findings.append(_hook())
        found = _Files(root)
        findings += found.findings
        for program, files in _READERS.items():
            findings += _libdir(root, program, found.option("libdir", files), installed)
        findings += _options(found)
        for place in sorted(found.values("libdir")):
            findings += _beside(root, place, criu_program)
    return findings


# Who reads which files, the one that wins first.
_READERS = {
    "criu by hand": (DEFAULT_FILE,),
    "runc": (RUNC_FILE, DEFAULT_FILE),
    "crun": (CRUN_FILE, DEFAULT_FILE),
}


@dataclass(frozen=True, slots=True)
class _Set:
    """An option and the file that it stands in."""

    file: str
    option: Option


class _Files:
    """CRIU's configuration on a host."""

    def __init__(self, root: Root) -> None:
        self.findings: list[Finding] = []
        self._options: dict[str, list[Option]] = {}
        for path in (DEFAULT_FILE, RUNC_FILE, CRUN_FILE):
            try:
                found = root.read(path)
                if found is not None:
                    text = found.data.decode("utf-8", "surrogateescape")
                    self._options[path] = parse_options(text, path)
            except (CriuError, InstallError, OSError) as exc:
                remedy = "mend that line: criu ends at it, and so does every checkpoint"
                self.findings.append(problem("CRIU configuration", str(exc), remedy))

    def option(self, name: str, files: tuple[str, ...]) -> _Set | None:
        """The one that counts where these files are read, the winning one first."""
        for file in files:
            instead = file == CRUN_FILE and file not in self._options  # as crun does
            read = RUNC_FILE if instead else file
            for option in reversed(self._options.get(read, [])):
                if option.name == name:
                    return _Set(read, option)
        return None

    def each(self, name: str) -> list[_Set]:
        return [
            _Set(f, o) for f, options in self._options.items() for o in options if o.name == name
        ]

    def values(self, name: str) -> set[str]:
        return {found.option.value for found in self.each(name)}


def _not_installed() -> Finding:
    return note(
        _NAME,
        f"there is none ({RECORD}): container runtimes of this host do not use gpustasis",
        'for Podman, CRI-O or containerd: "gpustasis install"',
    )


def _installation(root: Root, python: str) -> Finding:
    changes: list[Change] = []
    try:
        install(root, "", python, changes.append, dry_run=True)
    except (InstallError, OSError) as exc:
        return problem(_NAME, "; ".join(str(exc).splitlines()[:-1]) or str(exc), f"then {_AGAIN}")
    harmless = (Action.UNCHANGED, Action.KEEP, Action.SKIP)
    wrong = [
        f"{change.path}: {_WRONG[change.action]}"
        for change in changes
        if change.action not in harmless
    ]
    if wrong:
        return problem(_NAME, "; ".join(wrong), _AGAIN)
    kept = [change.path for change in changes if change.action is Action.KEEP]
    if kept:
        return note(_NAME, f"complete; yours: {', '.join(kept)}")
    return ok(_NAME, "complete")


def _hook() -> Finding:
    """Without a container on stdin it has nothing to do, and ends with 0."""
    name = "OCI hook"
    remedy = f"{_AGAIN}; until then containers with annotations io.gpustasis.* do not start"
    try:
        ended = process.run([HOOK], timeout_s=_HOOK_TIMEOUT_S)
    except (OSError, TimeoutError) as exc:
        return problem(name, f"{HOOK}: {exc}", remedy)
    if ended.status != 0:
        said = ended.output.strip().splitlines()
        return problem(name, f"{HOOK}: {said[-1] if said else ended.ending}", remedy)
    return ok(name, f"starts and ends in {ended.seconds * 1000:.0f} ms")


_WRONG = {
    Action.CREATE: "it is missing",
    Action.EXTEND: "our lines are missing",
    Action.REPLACE: "it is not that of this version",
    Action.REMOVE: "this version does not need it",
}


def _libdir(root: Root, program: str, found: _Set | None, installed: bool) -> list[Finding]:
    """Whether the directory that this program's criu takes plugins from holds ours."""
    name = f"plugin for {program}"
    if found is None:
        if not installed:
            return []
        return [problem(name, f"no libdir is set: criu looks into {_STOCK}", _AGAIN)]
    place, where = found.option.value, f"{found.file}, line {found.option.line}"
    if not root.exists(place):
        text = f"{where}: libdir {place} is not there: criu ends every dump and restore at that"
        return [problem(name, text, _AGAIN)]
    if not root.exists(f"{place}/{PLUGIN_NAME}"):
        text = f"{where}: libdir {place} holds no {PLUGIN_NAME}: GPU files cannot be dumped"
        return [problem(name, text, _AGAIN)]
    return [ok(name, f"{place} ({where})")]


def _options(found: _Files) -> list[Finding]:
    findings = []
    for one in found.each("timeout"):
        seconds = one.option.value
        if seconds.isdecimal() and 0 < int(seconds) < _CRIU_TIMEOUT_S:
            findings.append(
                note(
                    "criu timeout",
                    f"{one.file}, line {one.option.line}: {one.option}: a large tree may not be "
                    "stopped in that time",
                    f"criu's own is {_CRIU_TIMEOUT_S} s",
                )
            )
    for one in found.each("stream"):
        text = (
            f"{one.file}, line {one.option.line}: stream: criu dies of it when a runtime calls it"
        )
        findings.append(problem("criu stream", text, "remove that line"))
    return findings


def _beside(root: Root, place: str, criu_program: Path | None) -> list[Finding]:
    """Other plugins that criu loads along with ours, and whether this criu can."""
    findings = []
    for item in root.listing(place) if root.exists(place) else []:
        if not item.endswith(".so") or item == PLUGIN_NAME:
            continue
        path, name = f"{place}/{item}", "other plugin"
        try:
            found = root.read(path)
            missing = lacking(found.data, criu_program) if found and criu_program else []
        except (InstallError, CriuError, OSError) as exc:
            text = f"{path} cannot be loaded ({exc}), and then criu fails every dump"
            findings.append(problem(name, text, "remove it"))
            continue
        if missing:
            text = f"{path} needs {', '.join(missing)}, which {criu_program} does not have"
            remedy = (
                "it was built for another criu, which dies when it gets there: remove or replace it"
            )
            findings.append(problem(name, text, remedy))
        else:
            findings.append(note(name, f"criu loads {path} as well"))
    return findings


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
