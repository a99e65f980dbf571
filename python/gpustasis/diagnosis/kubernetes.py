# SPDX-License-Identifier: Apache-2.0
"""CRI-O and the kubelet of a Kubernetes node, as they run: their files may have changed since."""

from __future__ import annotations

import errno
import os
import re
import socket
import stat
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpustasis import process
from gpustasis.diagnosis import Finding, note, ok, problem
from gpustasis.install.layout import CRIO_DROP_IN, HOOK_DEFINITION
from gpustasis.text import mib, plural

CRIO_SOCKET = Path("/run/crio/crio.sock")
_ANSWER_S = 10.0
_LARGEST = 1 << 20  # bytes of an answer, or of a file, that are looked at
_FIRST_WITH_CHECKPOINTS = (1, 30)  # Kubernetes; before, the gate is off unless it is switched on


def crio_config(path: Path = CRIO_SOCKET) -> dict[str, Any]:
    """The configuration that CRI-O runs with (its table `crio`); empty: none says."""
    try:
        with socket.socket(socket.AF_UNIX) as crio:
            crio.settimeout(_ANSWER_S)
            crio.connect(str(path))
            crio.sendall(b"GET /config HTTP/1.0\r\n\r\n")
            with crio.makefile("rb") as answer:
                text = answer.read(_LARGEST).decode().replace("\r", "")
        return _table(tomllib.loads(text.partition("\n\n")[2]), "crio")
    except (OSError, ValueError):
        return {}


def crio_handlers(config: Mapping[str, Any]) -> dict[str, str]:
    """Name of each of CRI-O's runtime handlers -> its program."""
    found = _table(_table(config, "runtime"), "runtimes")
    return {name: str(_table(found, name).get("runtime_path") or name) for name in found}


def check_crio(config: Mapping[str, Any], path: Path = CRIO_SOCKET) -> Iterator[Finding]:
    """config: of crio_config(path)."""
    name, runtime = "CRI-O", _table(config, "runtime")
    if not config:
        if path.exists():
            yield note(name, f"{path} is there, and nobody says there how CRI-O runs")
        return
    level = _table(config, "checkpoint_restore").get("container_level_enabled", "")
    if runtime.get("enable_criu_support") is False or level == "none":
        text = "it refuses checkpoints: it was told so, or there was no criu when it started"
        remedy = "have criu in its PATH and the lines of {} read, and restart it"
        yield problem(name, text, remedy.format(CRIO_DROP_IN))
    elif level == "checkpoint_only":
        text = f'it restores nothing: container_level_enabled = "{level}"'
        yield note(name, text, f"where pods may restore: see {CRIO_DROP_IN}, and restart it")
    else:
        yield ok(name, "it checkpoints and restores containers")
    own, places = HOOK_DEFINITION.rpartition("/")[0], runtime.get("hooks_dir")
    if Path(HOOK_DEFINITION).exists() and isinstance(places, list) and own not in places:
        text = f"hooks_dir = {places} leaves out {own}: annotations io.gpustasis.* have no effect"
        yield problem(name, text, f"add {own!r} to it in /etc/crio, and restart CRI-O")


def check_kubelet(proc: Path = Path("/proc")) -> Iterator[Finding]:
    """Of the host's kubelet, if it runs, whether it offers checkpoints and has room for them."""
    for entry in sorted(proc.glob("[0-9]*/comm")):
        try:
            if entry.read_text(errors="replace").strip() != "kubelet" or not _is_hosts(
                entry.parent, proc / "1"
            ):
                continue
            words = (entry.parent / "cmdline").read_text(errors="replace")
            yield _gate(entry.parent, words)
        except OSError:  # it has ended, or is somebody else's
            continue
        place = (_flags(words, "root-dir") or ["/var/lib/kubelet"])[-1] + "/checkpoints"
        with suppress(OSError):  # without the gate there is none
            yield _archives(entry.parent / "root" / place.lstrip("/"), place)


def _is_hosts(process_: Path, first: Path) -> bool:
    """Any process may call itself kubelet. This one is root's, was not started by another user
    through a setuid program, and is in no container."""
    uids = re.search(r"^Uid:(.*)$", (process_ / "status").read_text(errors="replace"), re.MULTILINE)
    if uids is None or set(uids[1].split()) != {"0"}:
        return False
    spaces = [(process_ / "ns" / name, first / "ns" / name) for name in ("mnt", "user", "pid")]
    return all(a.readlink() == b.readlink() for a, b in spaces)


def _version(process_: Path) -> str:
    """What its program says of itself. Raises OSError if others than root could have changed it."""
    program = os.open(process_ / "exe", os.O_RDONLY | os.O_CLOEXEC)  # what is looked at is run
    try:
        found = os.fstat(program)
        if found.st_uid != 0 or found.st_mode & (stat.S_ISUID | stat.S_ISGID | 0o022):
            raise PermissionError(errno.EPERM, "others than root could change it")
        words = [f"/proc/{os.getpid()}/fd/{program}", "--version"]
        return process.run(words, timeout_s=_ANSWER_S).output
    finally:
        os.close(program)


def _text(path: Path) -> str:
    """Of a file. Raises OSError, also for what is no ordinary file."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, encoding="utf-8", errors="replace") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "is no ordinary file")
        return file.read(_LARGEST)


def _gate(process_: Path, words: str) -> Finding:
    version = re.search(r"v(\d+)\.(\d+)\S*", _version(process_))
    files = [process_ / "root" / path.lstrip("/") for path in _flags(words, "config")]
    texts = [_text(path) for path in files] + _flags(words, "feature-gates")
    gate = r'^[^#\n]*\bContainerCheckpoint"?\s*[:=]\s*(true|false)'
    found = re.findall(gate, "\n".join(texts), re.MULTILINE)
    on = version is None or (int(version[1]), int(version[2])) >= _FIRST_WITH_CHECKPOINTS
    text = version[0] if version else "of unknown version"
    if found[-1] == "true" if found else on:
        return ok("kubelet", f"{text}, with checkpoints")
    return problem(
        "kubelet",
        f'{text}: feature gate ContainerCheckpoint is off; it answers "404 page not found"',
        "featureGates: {ContainerCheckpoint: true} in its configuration, and restart it",
    )


def _archives(directory: Path, place: str) -> Finding:
    sizes = [path.stat().st_size for path in directory.glob("*.tar")]
    room = os.statvfs(directory)
    free = room.f_bavail * room.f_frsize
    text = f"{plural(len(sizes), 'archive')} in {place}, {mib(sum(sizes))}; {mib(free)} are free"
    if free < max(sizes, default=0):
        text += ", which another like the largest does not fit into"
        remedy = "delete those that nobody needs: Kubernetes deletes none"
        return problem("kubelet's archives", text, remedy)
    return ok("kubelet's archives", text)


def _flags(words: str, name: str) -> list[str]:
    """Values of --name VALUE and --name=VALUE. words: a process's, each ended by a NUL."""
    return re.findall(rf"(?:^|\0)--{name}[=\0]([^\0]*)", words)


def _table(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = config.get(name)
    return value if isinstance(value, dict) else {}
