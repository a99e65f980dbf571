"""Where the emulator's files are."""

from __future__ import annotations

import os
from pathlib import Path

from gpustasis.errors import EmulatorError

DAEMON = "gpustasis-gpu-emulator"
RUN_DIRECTORY = Path("/run/gpustasis-emulator")
# From this driver API version on, libcuda has cuCheckpointOperationComplete.
API_WITH_OPERATIONS = 13040


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
