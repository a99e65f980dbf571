# SPDX-License-Identifier: Apache-2.0
"""The driver emulator: emulated GPUs for programs of the CUDA driver API, for tests and trials.

The libraries that play the driver lie in this folder when gpustasis is installed; a daemon plays
the GPUs.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import struct
import subprocess
import time
import uuid as uuid_module
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpustasis import files
from gpustasis.errors import EmulatorError

DAEMON = "gpustasis-gpu-emulator"
RUN_DIRECTORY = Path("/run/gpustasis-emulator")
# From this driver API version on, libcuda has cuCheckpointOperationComplete.
API_WITH_OPERATIONS = 13040
# First API version of each driver branch.
_BRANCHES = {570: 12080, 580: 13000, 590: 13010, 595: 13020, 610: 13030, 615: 13040}
# As in src/driver_emulator/wire.hpp.
_MAGIC = 0x656D7506
_ADMIN = 3
_MAX_TEXT = 64 * 1024
_PATIENCE_S = 10.0

# GB/s of each GPU, to the host and back. 0: as fast as memory.
Rates = tuple[float, float]
RATES_OFF: Rates = (0.0, 0.0)


def find_directory() -> Path:
    """Return the folder of the daemon and the libraries.

    It is $GPUSTASIS_EMULATOR_DIR, for a build that is not installed, or this package's own folder.

    Raises EmulatorError if the daemon is not there.
    """
    override = os.environ.get("GPUSTASIS_EMULATOR_DIR")
    directory = Path(override).absolute() if override else Path(__file__).absolute().parent
    if not (directory / DAEMON).is_file():
        raise EmulatorError(
            f"the driver emulator is not in {directory}: install gpustasis, or let "
            f"GPUSTASIS_EMULATOR_DIR name the folder of a build that holds {DAEMON}"
        )
    return directory


def library_directory(api_version: int) -> Path:
    """Return what LD_LIBRARY_PATH must name for a driver of that API version, e.g. 13000."""
    directory = find_directory()
    return directory / "cuda-13.4" if api_version >= API_WITH_OPERATIONS else directory


def socket_path(instance: str = "default") -> Path:
    """Return the path of an instance's socket; $GPUSTASIS_EMULATOR, if set, overrides it."""
    override = os.environ.get("GPUSTASIS_EMULATOR")
    return Path(override) if override else RUN_DIRECTORY / instance / "socket"


def is_running(path: Path) -> bool:
    """Say whether something accepts connections at `path`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        try:
            connection.connect(str(path))
        except OSError:
            return False
        return True


def administer(path: Path, text: str) -> dict[str, Any]:
    """Send one administrative request and return the daemon's answer.

    Raises EmulatorError if no daemon answers at `path`, or if it refuses the request.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(_PATIENCE_S)
        try:
            connection.connect(str(path))
            connection.sendall(struct.pack("=II", _MAGIC, _ADMIN) + text.encode())
            reply = connection.recv(4 * _MAX_TEXT)
        except OSError as exc:
            raise EmulatorError(
                f"no emulator answers at {path} ({exc.strerror or exc}): "
                "start one with `gpustasis emulator start`"
            ) from exc
    if not reply:
        raise EmulatorError(f"what listens at {path} is not this version's emulator")
    answer: dict[str, Any] = json.loads(reply)
    if not answer["ok"]:
        raise EmulatorError(str(answer["error"]))
    return answer


def api_version_of(driver: str) -> int:
    """Return the CUDA driver API version, e.g. 13000, that a driver version such as 580.95.05 has.

    Raises EmulatorError if that branch has no checkpoint API or is not a version.
    """
    try:
        branch = int(driver.split(".", 1)[0])
    except ValueError:
        raise EmulatorError(f"not a driver version: {driver}") from None
    versions = [version for first, version in _BRANCHES.items() if first <= branch]
    if not versions:
        raise EmulatorError(f"driver {driver} is not emulated: 570 is the first")
    return versions[-1]


@dataclass(frozen=True)
class Options:
    """What to emulate. None means the default, or whatever a running emulator has.

    memory_bytes is each GPU's, a multiple of 2 MiB (rounded down). uuids are of the first GPUs, in
    order; the others' are random. rates: how fast a checkpoint and a restore copy GPU memory, at
    most; by default the daemon's, which are those measured on A100, A10G and L4. direct_rates: the
    same for what a caller copies itself with custom storage; RATES_OFF if rates are that, else by
    default the daemon's, as measured on an A100.
    """

    gpus: int | None = None
    memory_bytes: int | None = None
    uuids: tuple[str, ...] = ()
    driver: str | None = None
    name: str | None = None
    settings: dict[str, str] = field(default_factory=dict)
    rates: Rates | None = None
    direct_rates: Rates | None = None

    def rate_settings(self) -> dict[str, int]:
        """Return the settings for the rates that are asked for."""
        direct = self.direct_rates
        if direct is None and self.rates == RATES_OFF:
            direct = RATES_OFF
        settings = {} if self.rates is None else rate_settings(self.rates)
        if direct is not None:
            settings |= {f"direct_{key}": value for key, value in rate_settings(direct).items()}
        return settings

    def arguments(self) -> list[str]:
        """Return the daemon's arguments for it."""
        arguments: list[str] = []
        if self.gpus is not None:
            arguments += ["--gpus", str(self.gpus)]
        elif self.uuids:
            arguments += ["--gpus", str(len(self.uuids))]
        if self.memory_bytes is not None:
            arguments += ["--memory", str(self.memory_bytes)]
        for uuid in self.uuids:
            arguments += ["--uuid", uuid]
        if self.driver is not None:
            arguments += ["--driver", self.driver, "--api", str(api_version_of(self.driver))]
        if self.name is not None:
            arguments += ["--name", self.name]
        for key, milliseconds in self.rate_settings().items():
            arguments += ["--set", f"{key}={milliseconds}"]
        for key, value in self.settings.items():
            arguments += ["--set", f"{key}={value}"]
        return arguments

    def differences(self, status: dict[str, Any]) -> list[str]:
        """Return how a running emulator differs from what is asked for, one sentence each."""
        gpus: list[dict[str, Any]] = status["gpus"]
        found = []
        if self.gpus is not None and self.gpus != len(gpus):
            found.append(f"it has {len(gpus)} GPUs, not {self.gpus}")
        if self.memory_bytes is not None and gpus:
            memory = gpus[0]["memory_bytes"]
            if memory != self.memory_bytes // (2 << 20) * (2 << 20):
                found.append(f"its GPUs have {memory} bytes each, not {self.memory_bytes}")
        if len(self.uuids) > len(gpus):
            found.append(f"it has {len(gpus)} GPUs, not {len(self.uuids)}")
        for wanted, gpu in zip(self.uuids, gpus, strict=False):
            if _plain(wanted) != _plain(gpu["uuid"]):
                found.append(f"one of its GPUs is {gpu['uuid']}, not {wanted}")
        if self.driver is not None and self.driver != status["driver_version"]:
            found.append(f"its driver is {status['driver_version']}, not {self.driver}")
        for key, milliseconds in self.rate_settings().items():
            if status["settings"][key] != milliseconds:
                found.append(f"its {key} is {status['settings'][key]}, not {milliseconds}")
        if self.name is not None and gpus and self.name != gpus[0]["name"]:
            found.append(f"its GPUs are named {gpus[0]['name']!r}, not {self.name!r}")
        return found


def rate_settings(rates: Rates) -> dict[str, int]:
    """The settings that make an emulator copy at these rates."""
    keys = ("d2h_ms_per_gib", "h2d_ms_per_gib")
    return {
        key: round(2**30 / 1e6 / rate) if rate > 0 else 0
        for key, rate in zip(keys, rates, strict=True)
    }


def _plain(uuid: str) -> str:
    try:
        return uuid_module.UUID(uuid.removeprefix("GPU-")).hex
    except ValueError:
        raise EmulatorError(f"not a GPU UUID: {uuid}") from None


class Emulator:
    """One instance of the emulator, running or not.

    path is its socket; by default that of instance `instance`, or $GPUSTASIS_EMULATOR.
    """

    def __init__(self, path: Path | None = None, instance: str = "default") -> None:
        self.path = (path or socket_path(instance)).absolute()

    def is_running(self) -> bool:
        """Say whether its daemon accepts connections."""
        return is_running(self.path)

    def start(self, options: Options | None = None) -> bool:
        """Start the daemon, or make sure that the one that runs is what is asked for.

        Returns whether one was started. It goes on until stop(), whoever started it.

        Raises EmulatorError if it cannot be started, or runs with other options.
        """
        options = options or Options()
        daemon = find_directory() / DAEMON
        with self._turn():
            if self.is_running():
                differences = options.differences(self.status())
                if differences:
                    raise EmulatorError(
                        f"the emulator at {self.path} runs with other options: "
                        + "; ".join(differences)
                        + " (`gpustasis emulator stop` ends it)"
                    )
                return False
            self._spawn(daemon, options)
        return True

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Let one starter at a time look and act."""
        try:
            if self.path.is_relative_to(RUN_DIRECTORY):  # not of a user's own choice
                levels = len(self.path.parent.parts) - len(RUN_DIRECTORY.parent.parts)
                os.close(files.open_own_directory(str(self.path.parent), levels, 0o755))
            files.make_directories(str(self.path.parent), 0o755)
            lock = (self.path.parent / (self.path.name + ".lock")).open("ab")
        except OSError as exc:
            raise EmulatorError(
                f"cannot use {exc.filename or self.path}: {exc.strerror}; as another user than "
                "root, let GPUSTASIS_EMULATOR name a socket in a folder of yours"
            ) from exc
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _spawn(self, daemon: Path, options: Options) -> None:
        self.path.unlink(missing_ok=True)  # of one that was killed
        log_path = self.path.parent / (self.path.name + ".log")
        ready, ready_in_daemon = os.pipe()
        try:
            with log_path.open("wb") as log:
                process = subprocess.Popen(
                    [
                        str(daemon),
                        *["--socket", str(self.path)],
                        *["--ready-fd", str(ready_in_daemon)],
                        *options.arguments(),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[ready_in_daemon],
                    start_new_session=True,
                    cwd="/",
                    env={"PATH": os.environ.get("PATH", "/usr/bin:/bin")},
                )
            os.close(ready_in_daemon)
            ready_in_daemon = -1
            started = os.read(ready, 1) == b"1"
        finally:
            os.close(ready)
            if ready_in_daemon >= 0:
                os.close(ready_in_daemon)
        if not started:
            process.wait()
            reason = log_path.read_text(errors="replace").strip() or f"see {log_path}"
            raise EmulatorError(f"the emulator did not start: {reason}")
        process.returncode = 0  # it is on its own now: nobody waits for it

    def stop(self) -> None:
        """End the daemon, and with it all memory of its GPUs.

        Raises EmulatorError if none is running.
        """
        pid = int(self.status()["pid"])
        administer(self.path, "stop")
        deadline = time.monotonic() + _PATIENCE_S
        while self.is_running() or Path(f"/proc/{pid}/fd/0").exists():
            if time.monotonic() > deadline:
                raise EmulatorError(f"the emulator at {self.path} (pid {pid}) does not stop")
            time.sleep(0.01)

    def status(self) -> dict[str, Any]:
        """Return what is emulated, who uses it, the faults and the settings.

        Keys: pid, socket, api_version, driver_version, settings, faults, gpus (each: name, uuid,
        memory_bytes, used_bytes, processes).
        """
        return administer(self.path, "status")

    def add_fault(
        self,
        operation: str,
        action: str,
        *,
        code: int | None = None,
        count: int = 1,
        delay_ms: int = 0,
        pid: int = 0,
    ) -> int:
        """Make an operation go wrong, `count` times (0: always). Returns the fault's number.

        operation is init, get_state, lock, checkpoint, restore, unlock, complete or any; actions
        are listed in docs/emulator.md; code is a CUresult, for die a signal, for state a state;
        pid, 0 for all, is the target's as seen by the daemon.
        """
        text = f"fault add {operation} {action} count={count} delay_ms={delay_ms} pid={pid}"
        if code is not None:
            text += f" code={code}"
        return int(administer(self.path, text)["number"])

    def clear_faults(self) -> None:
        """Forget all faults."""
        administer(self.path, "fault clear")

    def set(self, key: str, value: str) -> None:
        """Change one of status()["settings"]."""
        administer(self.path, f"set {key} {value}")

    def environment(self, api_version: int) -> dict[str, str]:
        """Return the variables that make a program use this emulator.

        LD_LIBRARY_PATH keeps what it has behind the emulator's folder.
        """
        before = os.environ.get("LD_LIBRARY_PATH", "")
        library = str(library_directory(api_version))
        return {
            "LD_LIBRARY_PATH": library + (":" + before if before else ""),
            "GPUSTASIS_EMULATOR": str(self.path),
        }
