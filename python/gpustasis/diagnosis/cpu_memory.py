# SPDX-License-Identifier: Apache-2.0
"""Who is to store CPU memory at a dump, and whether that can be done here: what our plugin finds
out for itself when a dump begins (src/cuda_plugin/cpu_memory_dump.cpp)."""

from __future__ import annotations

import errno
import fcntl
import re
import tomllib
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from gpustasis.criu.find import Criu
from gpustasis.criu.plugin import Setting, find_config, read_config
from gpustasis.diagnosis import Finding, note, ok, problem
from gpustasis.diagnosis.container import PROC, Container
from gpustasis.errors import CheckpointError, CriuError
from gpustasis.policy import POLICY_DIRECTORY

NAME = "CPU memory"
_KEY = "cpu_memory"
_WORDS = ("criu", "ours", "auto")
_PAGEMAP = Path("/proc/self/pagemap")
_SCAN_ARGUMENTS = 96  # bytes: sizeof(struct pm_scan_arg), linux/fs.h
_PAGEMAP_SCAN = 0xC0000000 | _SCAN_ARGUMENTS << 16 | ord("f") << 8 | 16  # _IOWR('f', 16, …)
_LEAVE = f'set {_KEY} = "auto" or "criu"'
# Relocations of x86-64 and of aarch64 (elf.h) that hold the address of an imported function.
_IMPORTS = {"EM_X86_64": (6, 7), "EM_AARCH64": (1025, 1026)}  # GLOB_DAT, JUMP_SLOT


def check(environ: Mapping[str, str], criu: Criu | None) -> Finding:
    """Of the configuration. criu: the one that would dump; None: there is none."""
    path = find_config(environ)
    try:
        asked = read_config(path).get(_KEY, "criu")
    except CheckpointError as exc:  # the finding on the configuration is the problem
        return note(NAME, f"not known who stores it: {exc}")
    return _judge(asked, str(path), criu)


def check_container(container: Container, environ: Mapping[str, str], criu: Criu | None) -> Finding:
    """Of the annotations of the container; of the configuration, if they do not say."""
    try:
        found = _annotated(container)
    except (OSError, ValueError) as exc:
        remedy = "start the container anew; only the OCI hook writes that file"
        return problem(NAME, f"its policy cannot be read: {exc}", remedy)
    if found is None:
        finding = check(environ, criu)
        asked = _configured(environ)
    else:
        asked, place = found
        finding = _judge(asked, place, criu)
    twice = _same_pids(container)
    if asked == "criu" or finding.remedy or not twice:
        return finding
    text = f"processes {twice} have one pid in their pid namespaces, and images go by pid"
    if asked == "ours":
        return problem(NAME, f"{finding.text}; {text}: a dump fails", _LEAVE)
    return note(NAME, f"{finding.text}; {text}: theirs is left to CRIU")


def why_no_page_scan(pagemap: Path = _PAGEMAP) -> str:
    """Why the kernel cannot say which pages a process has; "": it can."""
    arguments = bytearray(_SCAN_ARGUMENTS)
    arguments[:8] = _SCAN_ARGUMENTS.to_bytes(8, "little")
    try:
        with pagemap.open("rb") as file:
            fcntl.ioctl(file, _PAGEMAP_SCAN, arguments)
    except OSError as exc:
        if exc.errno == errno.ENOTTY:
            return "this kernel has no PAGEMAP_SCAN (Linux 6.7 and later have)"
        return f"PAGEMAP_SCAN: {exc.strerror}"
    return ""


def why_not_led(program: Path, function: str) -> str:
    """Why calls of this function by a criu program cannot be led to our plugin; "": they can."""
    try:
        imported = imported_functions(program)
    except (OSError, CriuError) as exc:
        return f"{program}: {exc}"
    if function in imported:
        return ""
    return f"{program} does not import {function} (is it linked statically?)"


def imported_functions(program: Path) -> frozenset[str]:
    """What a program calls in libraries, by the places that the dynamic linker fills in. Raises
    CriuError if it is no ELF file."""
    from elftools.common.exceptions import ELFError
    from elftools.elf.dynamic import DynamicSegment
    from elftools.elf.elffile import ELFFile
    from elftools.elf.relocation import RelocationTable

    found: set[str] = set()
    try:
        with program.open("rb") as file:
            elf = ELFFile(file)
            wanted = _IMPORTS.get(elf["e_machine"], ())
            for segment in elf.iter_segments():
                if not isinstance(segment, DynamicSegment):
                    continue
                tables = [
                    table
                    for table in segment.get_relocation_tables().values()
                    if isinstance(table, RelocationTable)
                ]
                for table in tables:
                    for entry in table.iter_relocations():
                        if entry["r_info_type"] in wanted:
                            found.add(segment.get_symbol(entry["r_info_sym"]).name)
    except (ELFError, ValueError, KeyError, AttributeError, IndexError) as exc:
        raise CriuError(f"not a sound ELF file: {exc}") from exc
    return frozenset(found)


def _judge(asked: Setting, place: str, criu: Criu | None) -> Finding:
    """asked: the value of the key; place: where it stands."""
    if asked == "criu":
        return ok(NAME, f'CRIU stores it ({_KEY} = "criu")')
    said = f"{_KEY} = {asked!r} in {place}".replace("'", '"')
    if asked not in _WORDS:
        return problem(NAME, f"{said}: every dump fails", f"it is one of {', '.join(_WORDS)}")
    reasons = [why_no_page_scan()]
    if criu is not None:
        reasons.append(why_not_led(criu.program, "ioctl"))
    why = "; ".join(reason for reason in reasons if reason)
    if not why and asked == "ours":
        return ok(NAME, f"the plugin stores it ({said})")
    if not why:
        return ok(NAME, f"the plugin stores it of processes that have much ({said})")
    if asked == "ours":
        return problem(NAME, f"{said}, and every dump fails: {why}", _LEAVE)
    return note(NAME, f"{said}, and all of it is left to CRIU: {why}")


def _configured(environ: Mapping[str, str]) -> Setting:
    try:
        return read_config(find_config(environ)).get(_KEY, "criu")
    except CheckpointError:
        return "criu"


def _annotated(container: Container) -> tuple[Setting, str] | None:
    """What its policy file says, and which that is; None: nothing of this. Raises OSError, and
    ValueError if it is no TOML."""
    for identity in re.findall(r"[0-9a-f]{64}", container.group):
        path = Path(POLICY_DIRECTORY) / f"{identity}.toml"
        try:
            settings = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        return (settings[_KEY], str(path)) if _KEY in settings else None
    return None


def _same_pids(container: Container) -> str:
    """Processes of the container that have one pid in their innermost pid namespaces: "7, 9"; "":
    none."""
    by_inner: dict[str, list[int]] = defaultdict(list)
    for pid in container.tasks:
        try:
            status = (PROC / str(pid) / "status").read_text(errors="replace")
        except OSError:
            continue  # it has ended
        if match := re.search(r"^NSpid:.*\s(\d+)$", status, re.MULTILINE):
            by_inner[match[1]].append(pid)
    return ", ".join(str(pid) for pids in by_inner.values() if len(pids) > 1 for pid in pids)
