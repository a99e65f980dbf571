"""Every exception this package raises on purpose. The CLI prints str(exc), exits exit_code."""

from __future__ import annotations


class CheckpointError(Exception):
    """A checkpoint, restore or image operation failed."""

    exit_code = 2


class ImageError(CheckpointError):
    """A checkpoint image is missing, damaged, or of an unknown version."""

    exit_code = 10


class ArchiveError(ImageError):
    """A checkpoint archive is damaged, out of bounds, or of a layout that is not known."""

    exit_code = 10


class DriverError(CheckpointError):
    """The CUDA driver is missing or refused a call.

    code: the CUresult of the refused call; None if the driver is missing.
    """

    exit_code = 11

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


class CriuError(CheckpointError):
    """CRIU is missing, too old, or failed."""

    exit_code = 12


class EmulatorError(CheckpointError):
    """The driver emulator cannot be started, reached or set up as asked."""

    exit_code = 15


class EngineError(CheckpointError):
    """A container engine or a kubelet cannot be reached, refused what was asked, or failed."""

    exit_code = 16


class PolicyError(CheckpointError):
    """What a container asks of its checkpoints cannot be done, or its policy cannot be used."""

    exit_code = 17


class UnsupportedError(CheckpointError):
    """What was asked for cannot be done on this machine."""

    exit_code = 20


class InstallError(CheckpointError):
    """A host cannot be set up as asked, or what is installed there is not as recorded."""

    exit_code = 22
