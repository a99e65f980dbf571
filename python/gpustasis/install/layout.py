# SPDX-License-Identifier: Apache-2.0
"""What lies where on a host and where it comes from, and what an administrator should know about a
host before containers are checkpointed there.

docs/operating.md has the table. Programs of a root are looked at, not run: it may be another
system's.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from gpustasis import files as files_
from gpustasis import process
from gpustasis.criu.plugin import (
    CRUN_FILE,
    DEFAULT_FILE,
    PLUGIN_NAME,
    RUNC_FILE,
    SYSTEM_CONFIG,
    plugin_directory,
    rank_script,
)
from gpustasis.errors import InstallError
from gpustasis.install.root import Root

PLUGIN_DIRECTORY = "/usr/lib/gpustasis/criu"
PLUGIN = f"{PLUGIN_DIRECTORY}/{PLUGIN_NAME}"
HOOK = "/usr/libexec/gpustasis/oci-hook"
SCRIPT = "/usr/libexec/gpustasis/rank-script"
# Not /etc/containers/oci/hooks.d: of the two, Podman and CRI-O look only here unless told.
HOOK_DEFINITION = "/usr/share/containers/oci/hooks.d/50-gpustasis.json"
CRIO_DROP_IN = "/etc/crio/crio.conf.d/50-gpustasis.conf"
AGENT = "/usr/libexec/gpustasis/agent"
CONTAINERD = "/etc/containerd"
UNIT = "/usr/lib/systemd/system/gpustasis-agent.service"
CONFIG = str(SYSTEM_CONFIG)

# The commands, and where they are, with a Python of their own (install/bundle.py).
BUNDLE = "/opt/gpustasis"
COMMAND_PATHS = ("/usr/local/bin/gpustasis", "/usr/local/bin/checkpointctl-gpustasis")

FILE_PATHS = frozenset({PLUGIN, HOOK, HOOK_DEFINITION, SCRIPT, CRIO_DROP_IN, CONFIG, AGENT, UNIT})
BLOCK_PATHS = frozenset({DEFAULT_FILE, RUNC_FILE, CRUN_FILE})


class Kind(StrEnum):
    """What is done about a file that is there already and is not as it would be installed.

    PROGRAM: it is brought up to date if an installation put it there; else an error.
    DROP_IN: left alone if it was changed since; else as PROGRAM.
    CONFIGURATION: left alone, whoever put it there.
    """

    PROGRAM = "program"
    DROP_IN = "drop-in"
    CONFIGURATION = "configuration"


@dataclass(frozen=True, slots=True)
class File:
    """A file of ours."""

    path: str
    data: bytes
    mode: int
    kind: Kind


@dataclass(frozen=True, slots=True)
class Lines:
    """Lines of ours for a file of CRIU's configuration.

    body: its comments and options, each line ended.
    if_there: only into a file that is there already.
    """

    path: str
    body: str
    if_there: bool = False


def packages() -> str:
    """The directory that holds the package gpustasis, for the hook to import it from."""
    return str(Path(__file__).resolve().parent.parent.parent)


def files(python: str) -> tuple[File, ...]:
    """python: the interpreter that the hook runs on, a path on the host that is installed on.

    Raises InstallError if it cannot stand in a #! line, UnsupportedError if the plugin or
    the action script is missing.
    """
    if not python.startswith("/") or len(python) > 200 or set(python) & set(" \t\n"):
        raise InstallError(f"{python!r} cannot be the hook's interpreter: an absolute path is one")
    plugin = (plugin_directory() / PLUGIN_NAME).read_bytes()
    return (
        File(PLUGIN, plugin, 0o755, Kind.PROGRAM),
        File(
            HOOK,
            # ascii(): whatever its name holds, it is one literal.
            _filled("oci/oci-hook", PYTHON=python, PACKAGES=ascii(packages())),
            0o755,
            Kind.PROGRAM,
        ),
        File(HOOK_DEFINITION, _filled("oci/50-gpustasis.json", HOOK=HOOK), 0o644, Kind.DROP_IN),
        File(SCRIPT, rank_script().read_bytes(), 0o755, Kind.PROGRAM),
        File(CRIO_DROP_IN, _filled("crio/50-gpustasis.conf"), 0o644, Kind.DROP_IN),
        File(
            AGENT,
            _filled("agent/agent", PYTHON=python, PACKAGES=ascii(packages())),
            0o755,
            Kind.PROGRAM,
        ),
        File(UNIT, _filled("agent/gpustasis-agent.service", AGENT=AGENT), 0o644, Kind.DROP_IN),
        File(CONFIG, _filled("gpustasis/config.toml"), 0o644, Kind.CONFIGURATION),
    )


def commands() -> tuple[File, ...]:
    """The commands of a tree that is on the host, where its users' PATH finds them."""
    programs = Path(packages()).parent / "bin"
    return tuple(
        File(path, (programs / Path(path).name).read_bytes(), 0o755, Kind.PROGRAM)
        for path in COMMAND_PATHS
    )


def lines() -> tuple[Lines, ...]:
    """What is put into CRIU's configuration.

    Not into a new crun.conf: without one crun reads runc.conf, and what an administrator has put,
    or puts later, into runc.conf would no longer count for crun.
    """
    whole = _filled("criu/default.conf", LIBDIR=PLUGIN_DIRECTORY, SCRIPT=SCRIPT).decode()
    runtime = _filled("criu/runtime.conf", LIBDIR=PLUGIN_DIRECTORY).decode()
    return (
        Lines(DEFAULT_FILE, whole),
        Lines(RUNC_FILE, runtime),
        Lines(CRUN_FILE, runtime, if_there=True),
    )


def _filled(name: str, **values: str) -> bytes:
    """A file of runtime-hooks/ with its @NAME@s replaced."""
    path = Path(__file__).resolve().parent.parent / "runtime-hooks" / name
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as exc:
        raise InstallError(f"cannot read {path}: {exc.strerror}; install gpustasis anew") from exc
    filled = re.sub(r"@([A-Z]+)@", lambda found: values[found[1]], text)
    return os.fsencode(filled)


_PYTHON_TIMEOUT_S = 30.0
_DEEPEST = 100  # of JSON: what a specification has is less than ten levels deep
CRUN_PLACES = ("/usr/bin/crun", "/usr/sbin/crun", "/usr/local/bin/crun", "/usr/local/sbin/crun")

# Where distributions' criu looks if no libdir is set.
_CRIO = ("/usr/bin/crio", "/usr/local/bin/crio", "/etc/crio/crio.conf", "/run/crio/crio.sock")
_LIBC = (
    *("/lib/x86_64-linux-gnu/libc.so.6", "/lib64/libc.so.6", "/usr/lib64/libc.so.6"),
    *("/lib/aarch64-linux-gnu/libc.so.6", "/usr/lib/libc.so.6"),
)
_GLIBC = re.compile(rb"GLIBC_2\.(\d+)\0")
STOCK_DIRECTORIES = ("/usr/lib/criu", "/usr/lib64/criu", "/usr/lib/x86_64-linux-gnu/criu")


def advice(root: Root, python: str) -> Iterator[str]:
    """Sentences. python: the hook's interpreter, as a path in the root."""
    for place in CRUN_PLACES:
        try:
            found = root.read(place)
        except (InstallError, OSError):  # one that this user cannot read
            continue
        if found is not None:
            yield from crun_advice(place, found.data)
    for directory in STOCK_DIRECTORIES:
        try:
            plugins = [name for name in root.listing(directory) if name.endswith(".so")]
        except (InstallError, OSError):  # links to nowhere: criu finds nothing there either
            continue
        if plugins:
            yield (
                f"criu does not load {', '.join(plugins)} from {directory} any more: it has one "
                "plugin directory, now ours"
            )
    for path in (python, f"{packages()}/gpustasis"):
        if not root.exists(path):
            yield (
                f"{path} is not there, and {HOOK} needs it: containers with annotations "
                "io.gpustasis.* will not start"
            )


def restart_advice(root: Root, made: tuple[str, ...]) -> Iterator[str]:
    """made: directories that were missing. CRI-O makes this one when it starts, and watches it: if
    it was removed since, CRI-O sees no file in a new one."""
    directory = HOOK_DEFINITION.rpartition("/")[0]
    if directory in made and any(root.exists(place) for place in _CRIO):
        yield (
            f"{directory} was not there: a CRI-O that runs does not see it, and annotations "
            "io.gpustasis.* have no effect until it is restarted"
        )


def _is_deep(found: object) -> bool:
    """Whether it may be too deep to be written: what can be read is not always."""
    level = [found]
    for _ in range(_DEEPEST):
        level = [
            inner
            for one in level
            if isinstance(one, dict | list)
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
    return any(isinstance(one, dict | list) for one in level)


def with_hook(spec: bytes, name: str) -> dict[str, object]:
    """A container's specification as JSON, with our hook in it. It may hold the hook already.

    name: of the specification. Raises InstallError if it is none (OCI runtime specification,
    "hooks"). It has no conditions, so the hook is run for every container.
    """
    too_deep = InstallError(f"{name}: it is nested more than {_DEEPEST} levels deep")
    try:
        found = json.loads(spec)
    except RecursionError:
        raise too_deep from None
    except ValueError as exc:
        raise InstallError(f"{name}: it is no JSON: {exc}") from None
    if _is_deep(found):
        raise too_deep
    if not isinstance(found, dict) or not isinstance(found.get("ociVersion"), str):
        raise InstallError(f"{name}: it is no container's specification: ociVersion is missing")
    hooks = found.setdefault("hooks", {})
    definition = json.loads(_filled("oci/50-gpustasis.json", HOOK=HOOK))
    for stage in definition["stages"]:
        one = hooks.setdefault(stage, []) if isinstance(hooks, dict) else None
        if not isinstance(one, list):
            raise InstallError(
                f"{name}: its hooks are not as the OCI runtime specification has them"
            )
        if not any(isinstance(other, dict) and other.get("path") == HOOK for other in one):
            one.append(definition["hook"])
    return found


def bound_to_hook(root: Root) -> Iterator[str]:
    """Which of containerd's files name the hook: without it, no container there would start. Each
    a sentence."""
    for name in root.listing(CONTAINERD):
        path = f"{CONTAINERD}/{name}"
        try:
            found = root.read(path) if name.endswith(".json") else None
        except InstallError as exc:
            yield f"it cannot be told whether containerd needs {HOOK}: {exc}"
            continue
        if found is not None and HOOK.encode() in found.data:
            yield (
                f"{path} names {HOOK}, without which no container of containerd starts: take the "
                "file out of containerd's configuration, restart containerd, and delete the file"
            )


def old_libc(root: Root, plugin: bytes) -> Iterator[str]:
    """Whether the libc of criu there lacks what the plugin needs; a sentence, or none."""
    needed = _newest_glibc(plugin)
    for place in _LIBC:
        try:
            found = root.read(place)
        except OSError:
            continue
        except InstallError:  # a link to libc-2.NN.so, as it was until 2.33
            there = 33
        else:
            if found is None:
                continue
            there = _newest_glibc(found.data)
        if there < needed:
            yield (
                f"{place} is glibc 2.{there} or older, and the plugin needs 2.{needed}: criu there "
                "cannot load it; build gpustasis on that system"
            )
        return


def _newest_glibc(program: bytes) -> int:
    return max((int(minor) for minor in _GLIBC.findall(program)), default=0)


def crun_advice(place: str, program: bytes) -> Iterator[str]:
    """What this build of crun cannot do. program: its bytes."""
    if b"libcriu.so" not in program:
        yield f"{place} was built without CRIU: it can neither checkpoint nor restore; use runc"
    elif CRUN_FILE.encode() not in program:
        yield (
            f"{place} is older than 1.26: it reads neither {CRUN_FILE} nor runc.conf, nor follows "
            "the annotation org.criu.config. It finds the plugin through /etc/criu/default.conf; "
            "options such as ghost-limit have to stand there too, and tcp-established has no effect"
        )


def unsafe_hook(root: Root, python: str) -> Iterator[str]:
    """What of the hook, which runs as root, others than root could change: its interpreter, where
    that finds its modules, and the package, with all ways there. What is missing is left out."""
    host = os.path.samefile(root.directory, "/")
    # A root that is being made is its maker's, who need not be root.
    directory, owners = ("/", (0,)) if host else (str(root.directory), (0, os.geteuid()))
    package = f"{packages()}/gpustasis"
    found = list(_changeable([python, package], directory, owners))
    prefix = directory.rstrip("/")
    for above, below, names in os.walk(prefix + package):
        inside = above[len(prefix) :]
        paths = [f"{inside}/{name}" for name in (*below, *names)]
        found += _changeable(paths, directory, owners)
    if host and not found and os.path.exists(python):
        found += _changeable(_module_places(python), directory, owners)
    for part in dict.fromkeys(found):
        yield (
            f"{part}: others than root could change it, and {HOOK} runs it as root; install "
            "gpustasis, and name a Python, where only root can write"
        )


def _changeable(paths: list[str], root: str, owners: tuple[int, ...]) -> Iterator[str]:
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            yield from files_.changeable_by_others(path, root, owners)


def _module_places(python: str) -> list[str]:
    """Where this interpreter, which only root can change, finds modules, and the file that tells
    it.

    Raises InstallError if it does not run.
    """
    code = "import sys; print(ascii(sys.path))"
    try:
        ended = process.run([python, "-IS", "-c", code], timeout_s=_PYTHON_TIMEOUT_S)
    except OSError as exc:
        raise InstallError(f"{python} cannot be the hook's interpreter: {exc}") from exc
    try:
        places: list[str] = ast.literal_eval(ended.output)
    except (ValueError, SyntaxError) as exc:
        raise InstallError(f"{python} cannot be the hook's interpreter: {ended.ending}") from exc
    here = os.path.dirname(python)
    settings = [f"{place}/pyvenv.cfg" for place in (here, os.path.dirname(here))]
    return [*settings, *places]
