# SPDX-License-Identifier: Apache-2.0
"""The container runtimes and engines of this host, as far as checkpoints of GPU containers go."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from shutil import which
from typing import Any

from gpustasis import process
from gpustasis.criu.plugin import CRUN_FILE
from gpustasis.diagnosis import Finding, kubernetes, note, ok, problem
from gpustasis.install.layout import HOOK_DEFINITION, crun_advice

_TIMEOUT_S = 30.0
_HOOK_DIRECTORIES = ("/usr/share/containers/oci/hooks.d", "/etc/containers/oci/hooks.d")
_CDI_DIRECTORIES = ("/etc/cdi", "/var/run/cdi")
_CONTAINERS_CONF = ("/usr/share/containers/containers.conf", "/etc/containers/containers.conf")
_NVIDIA_HOOKS = ("nvidia-container-runtime-hook", "nvidia-container-toolkit")
_NVIDIA_RUNTIME = "/etc/nvidia-container-runtime/config.toml"
_LARGEST = 1 << 22  # bytes of a file that is looked at
# Of its error, where it is built with that tag; neither its help nor `runc features` tells.
_LEFT_OUT_OF_RUNC = b"(runc_nocriu)"
_USE_CDI = (
    "give containers their GPUs by CDI (nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml; "
    "podman run --device nvidia.com/gpu=all), and remove the hook"
)


def check(environ: Mapping[str, str], driver_version: str | None) -> list[Finding]:
    """environ: its PATH is searched. driver_version: of this host's driver, None: not known."""
    path = environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
    crio = kubernetes.crio_config()
    return [
        *(found for program in _programs("runc", path, crio) for found in _runc(program)),
        *(found for program in _programs("crun", path, crio) for found in _crun(program)),
        *_podman(path),
        *_containerd(path),
        *kubernetes.check_crio(crio),
        *kubernetes.check_kubelet(),
        *_legacy_hooks(),
        *_cdi(driver_version),
    ]


def _programs(name: str, path: str, crio: Mapping[str, Any]) -> list[str]:
    """Those of that name that are run here: the one in PATH, and CRI-O's own, each once."""
    handlers = kubernetes.crio_handlers(crio).values()
    named = [name, *(program for program in handlers if Path(program).name == name)]
    found = [program for one in named if (program := which(one, path=path)) is not None]
    return list({os.path.realpath(program): program for program in reversed(found)}.values())[::-1]


def _runc(program: str) -> Iterator[Finding]:
    left_out = _LEFT_OUT_OF_RUNC in Path(program).read_bytes()
    if left_out or _run(program, "checkpoint", "--help") is None:
        text = f"{program} is built without checkpoints"
        yield problem("runc", text, "install runc >= 1.1, built as its distributors do")
        return
    yield ok("runc", f"{_version(program)}, {program}")


def _crun(program: str) -> Iterator[Finding]:
    said = _run(program, "--version") or ""
    version = _version(program)
    content = Path(program).read_bytes()
    if "+CRIU" not in said:
        text = f"{version}, {program}, is built without CRIU"
        yield problem("crun", text, "use runc: podman --runtime runc")
    elif "libcriu.so.2" not in (_run("ldconfig", "-p") or _run("/sbin/ldconfig", "-p") or ""):
        text = f"{version}, {program}: libcriu.so.2, by which it calls criu, is not there"
        yield problem("crun", text, "install libcriu2 (Debian), criu-libs (Fedora)")
    elif CRUN_FILE.encode() not in content:
        yield note("crun", next(crun_advice(program, content)), "use crun >= 1.26, or runc")
    else:
        yield ok("crun", f"{version}, {program}")


def _podman(path: str) -> Iterator[Finding]:
    program = which("podman", path=path)
    if program is None:
        return
    version = _version(program)
    own = HOOK_DEFINITION.rpartition("/")[0]
    if Path(HOOK_DEFINITION).exists():
        for place in _containers_conf():
            directories = _hooks_dir(place)
            if directories is not None and own not in directories:
                text = f"{place}: hooks_dir = {directories} leaves out {own}"
                yield problem(
                    "podman",
                    f"{version}; {text}: annotations io.gpustasis.* have no effect",
                    f"add {own!r} to it",
                )
                return
    yield ok("podman", f"{version}, {program}")


def _containers_conf() -> list[Path]:
    """The files that Podman reads, the one that wins last."""
    places = [Path(name) for name in _CONTAINERS_CONF]
    drop_ins = [item for name in places for item in sorted(Path(f"{name}.d").glob("*.conf"))]
    return [*places, *drop_ins]


def _hooks_dir(place: Path) -> list[str] | None:
    """None: the file says nothing of it, or is none that Podman could read."""
    try:
        value = tomllib.loads(_text(place)).get("engine", {}).get("hooks_dir")
    except (ValueError, AttributeError):
        return None
    if not isinstance(value, list):
        return None
    appended = any(isinstance(item, dict) and item.get("append") for item in value)
    return None if appended else [item for item in value if isinstance(item, str)]


def _containerd(path: str) -> Iterator[Finding]:
    program = which("containerd", path=path)
    if program is None:
        return
    said = _run(program, "--version") or ""
    found = re.search(r"\bv?(\d+)\.(\d+)\.\d+", said)
    if found is None:
        yield note("containerd", f"{program} does not say its version")
    elif int(found[1]) < 2:
        text = f"{found[0]}, {program}: it answers CheckpointContainer, and so the kubelet, with "
        text += "UNIMPLEMENTED"
        yield note("containerd", text, "containerd >= 2.0; ctr can checkpoint with this one")
    else:
        yield ok("containerd", f"{found[0]}, {program}")


def _legacy_hooks() -> Iterator[Finding]:
    """NVIDIA's prestart hook mounts what no config.json speaks of: CRIU cannot restore that, and
    runc runs the hook again at every restore, where it fails even for containers without a GPU."""
    name = "NVIDIA's legacy hook"
    for directory in _HOOK_DIRECTORIES:
        for place in sorted(Path(directory).glob("*.json")):
            if any(hook in _text(place) for hook in _NVIDIA_HOOKS):
                text = f"{place}: its mounts are in no config.json, so CRIU cannot restore them"
                yield problem(name, text, _USE_CDI)
    mode = re.search(r'^\s*mode\s*=\s*"legacy"', _text(Path(_NVIDIA_RUNTIME)), re.MULTILINE)
    if mode is not None:
        text = f'{_NVIDIA_RUNTIME} says mode = "legacy": mounts that are in no config.json'
        yield problem(name, text, 'set mode = "cdi", and make a CDI specification')


def _cdi(driver_version: str | None) -> Iterator[Finding]:
    """A specification names the driver's files with their version: after an upgrade it is stale."""
    for directory in _CDI_DIRECTORIES:
        for place in sorted(Path(directory).glob("*")):
            if place.suffix not in (".yaml", ".json"):
                continue
            text = _text(place)
            versions = sorted(set(re.findall(r"libcuda\.so\.(\d+\.\d+(?:\.\d+)?)", text)))
            others = [version for version in versions if version != driver_version]
            if driver_version is not None and others:
                yield problem(
                    "CDI",
                    f"{place} is for driver {', '.join(others)}; this host has {driver_version}",
                    f"nvidia-ctk cdi generate --output={place}",
                )
            elif "disable-device-node-modification" in text:
                yield note(
                    "CDI",
                    f"{place}: the hook disable-device-node-modification mounts a file that is in "
                    'no config.json; a restore then fails with "No mapping for ... mountpoint"',
                    "nvidia-ctk cdi generate --disable-hook=disable-device-node-modification",
                )
            elif versions:
                yield ok("CDI", f"{place}, for driver {', '.join(versions)}")


def _version(program: str) -> str:
    lines = (_run(program, "--version") or "").strip().splitlines()
    return lines[0] if lines else "unknown version"


def _run(*argv: str) -> str | None:
    """What it printed; None: it failed, or cannot be run."""
    try:
        ended = process.run(argv, timeout_s=_TIMEOUT_S)
    except (OSError, TimeoutError):
        return None
    return ended.output if ended.status == 0 else None


def _text(place: Path) -> str:
    """The beginning of a file; empty if there is none."""
    try:
        with place.open("rb") as file:
            return file.read(_LARGEST).decode("utf-8", "replace")
    except OSError:
        return ""
