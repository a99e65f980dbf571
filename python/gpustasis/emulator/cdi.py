# SPDX-License-Identifier: Apache-2.0
"""The emulator as a device of containers: a Container Device Interface specification.

Format: the CDI specification 0.6.0 (github.com/cncf-tags/container-device-interface, SPEC.md).
Engines read it from /etc/cdi and /var/run/cdi; `--device gpustasis.io/gpu=all` asks for it.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

from gpustasis import files
from gpustasis.emulator import Emulator, find_directory, library_directory
from gpustasis.errors import EmulatorError

CDI_VERSION = "0.6.0"
KIND = "gpustasis.io/gpu"
DEFAULT_FILE = Path("/etc/cdi/gpustasis-emulator.json")
# Where containers see the libraries; LD_LIBRARY_PATH names it.
LIBRARIES = Path("/usr/lib/gpustasis-emulator")
# What stands for a GPU's device file (src/driver_emulator/driver/artefacts.cpp): the first there
# is.
_DEVICES = ("/dev/fuse", "/dev/loop-control", "/dev/kvm", "/dev/vhost-net")
_MOUNT_OPTIONS = ["bind", "ro", "nosuid", "nodev"]


def specification(emulator: Emulator) -> dict[str, Any]:
    """Return the specification, as JSON would hold it, of a running emulator's GPUs.

    It has one device, `all`, since a process of the emulator always sees all of its GPUs. The
    directory of the socket is mounted, not the socket: the daemon may be started anew.

    Raises EmulatorError if the emulator does not run.
    """
    status = emulator.status()
    libraries = {
        "libcuda.so.1": library_directory(int(status["api_version"])),
        "libnvidia-ml.so.1": find_directory(),
    }
    mounts = [
        {
            "hostPath": str(directory / name),
            "containerPath": str(LIBRARIES / name),
            "options": _MOUNT_OPTIONS,
        }
        for name, directory in libraries.items()
    ]
    socket_directory = str(emulator.path.parent)
    mounts.append(
        {
            "hostPath": socket_directory,
            "containerPath": socket_directory,
            "options": _MOUNT_OPTIONS,
        }
    )
    edits: dict[str, Any] = {
        "env": [f"GPUSTASIS_EMULATOR={emulator.path}", f"LD_LIBRARY_PATH={LIBRARIES}"],
        "mounts": mounts,
    }
    device = next((path for path in _DEVICES if _is_device(Path(path))), None)
    if device is not None:
        edits["deviceNodes"] = [{"path": device, "permissions": "rw"}]
    return {
        "cdiVersion": CDI_VERSION,
        "kind": KIND,
        "devices": [{"name": "all", "containerEdits": edits}],
    }


def write_specification(text: str, path: Path) -> None:
    """Put it where engines look for it, whole or not at all; directories are made.

    Raises EmulatorError if it cannot be written.
    """
    try:
        files.make_directories(str(path.parent), 0o755)
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:  # engines read *.json and *.yaml, not what it is called until it is whole
            files.replace_file(directory, path.name, text.encode(), 0o644)
        finally:
            os.close(directory)
    except OSError as exc:
        raise EmulatorError(f"cannot write {path}: {exc.strerror}") from exc


def _is_device(path: Path) -> bool:
    try:
        return stat.S_ISCHR(path.stat().st_mode)
    except OSError:
        return False
