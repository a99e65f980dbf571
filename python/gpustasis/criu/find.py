# SPDX-License-Identifier: Apache-2.0
"""The CRIU programs on this machine, and which of them to use."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from gpustasis import process
from gpustasis.errors import CriuError

MINIMUM_VERSION = (4, 1)
_LOADER = Path("lib64/ld-linux-x86-64.so.2")
_LIBRARIES = Path("usr/lib/x86_64-linux-gnu")
_TIMEOUT_S = 30.0
_TEXT_SHOWN = 200  # characters

Version = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Criu:
    """One criu program.

    program: the executable.
    root: the directory with a system of its own (Debian's layout) that it was named in, and whose
        loader and libraries it needs; None: it is this system's own.
    version: (4, 2, 1); empty if it does not run.
    origin: where it was found, for people: "PATH", "GPUSTASIS_CRIU", "/usr/sbin".
    problem: why it does not run; empty if it does.
    """

    program: Path
    root: Path | None
    version: Version
    origin: str
    problem: str = ""

    @property
    def usable(self) -> bool:
        """It runs and is new enough for the plugin."""
        return self.version >= MINIMUM_VERSION

    @property
    def version_text(self) -> str:
        return ".".join(map(str, self.version)) or "unknown"

    def command(self, environ: Mapping[str, str]) -> list[str]:
        """The words that start it, before its own arguments.

        A criu of another root runs on its root's loader, whose --library-path takes the place of
        LD_LIBRARY_PATH: those directories follow the root's own, so that a libcuda.so.1 that was
        put there for criu (the driver emulator's, for one) is still found.
        """
        return [*self.loader(environ), str(self.program)] if self.root else [str(self.program)]

    def loader(self, environ: Mapping[str, str]) -> list[str]:
        """The words that start the dynamic loader that this criu runs on."""
        return _loader(self.root, environ)


def find_all(
    environ: Mapping[str, str] | None = None, explicit: str | None = None
) -> tuple[Criu, ...]:
    """Every criu there is, the preferred one first; also those too old or broken.

    explicit: a program, or a root directory holding usr/sbin/criu. It, else the environment's
    GPUSTASIS_CRIU (the same), stands alone if given. Otherwise: PATH, then the system's usual
    places. No other place is looked into: what is found is run, as root mostly.
    """
    env = os.environ if environ is None else environ
    named, origin = (
        (explicit, "--criu") if explicit else (env.get("GPUSTASIS_CRIU"), "GPUSTASIS_CRIU")
    )
    if named:
        return (_probe(*_locate(Path(named)), origin, env),)
    return tuple(_probe(program, None, origin, env) for program, origin in _search(env))


def choose(candidates: tuple[Criu, ...]) -> Criu:
    """The first usable one. Raises CriuError that says what was found and what to do."""
    for candidate in candidates:
        if candidate.usable:
            return candidate
    wanted = ".".join(map(str, MINIMUM_VERSION))
    if not candidates:
        raise CriuError(f"no criu was found; install criu >= {wanted} or name one with --criu")
    found = "; ".join(
        f"{c.program} ({c.origin}): {c.problem or 'version ' + c.version_text}" for c in candidates
    )
    raise CriuError(f"no criu >= {wanted} was found, only {found}")


def find(explicit: str | None = None, environ: Mapping[str, str] | None = None) -> Criu:
    """The criu to use on this machine; see find_all and choose."""
    return choose(find_all(environ, explicit))


def parse_version(text: str) -> Version:
    """The version in what `criu --version` prints; empty if there is none."""
    match = re.search(r"^Version:\s*(\d+(?:\.\d+)*)", text, re.MULTILINE)
    return tuple(map(int, match[1].split("."))) if match else ()


def _locate(path: Path) -> tuple[Path, Path | None]:
    """A program as it is; a directory as a root with criu in it."""
    if path.is_dir():
        return path / "usr/sbin/criu", path
    return path, None


def _search(environ: Mapping[str, str]) -> Iterator[tuple[Path, str]]:
    seen: set[Path] = set()
    on_path = shutil.which("criu", path=environ.get("PATH", os.defpath))
    places = [(on_path, "PATH")] if on_path else []
    places += [(f"{folder}/criu", folder) for folder in ("/usr/local/sbin", "/usr/sbin")]
    for name, origin in places:
        program = Path(name)
        if program.exists() and program.resolve() not in seen:
            seen.add(program.resolve())
            yield program, origin


def _loader(root: Path | None, environ: Mapping[str, str]) -> list[str]:
    if root is None:
        return [str("/" / _LOADER)]
    directories = [str(root / _LIBRARIES)]
    directories += [entry for entry in environ.get("LD_LIBRARY_PATH", "").split(":") if entry]
    return [str(root / _LOADER), "--library-path", ":".join(directories)]


def _probe(program: Path, root: Path | None, origin: str, environ: Mapping[str, str]) -> Criu:
    found = Criu(program=program, root=root, version=(), origin=origin)
    try:
        ended = process.run(
            [*found.command(environ), "--version"], env=environ, timeout_s=_TIMEOUT_S
        )
    except OSError as exc:  # TimeoutError among them
        return replace(found, problem=str(exc))
    version = parse_version(ended.output)
    if not version:
        said = ended.output.strip()[-_TEXT_SHOWN:]
        return replace(found, problem=f"does not run ({ended.ending}): {said}")
    return replace(found, version=version)
