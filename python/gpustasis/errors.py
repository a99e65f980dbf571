# SPDX-License-Identifier: Apache-2.0
"""Every exception that this package raises on purpose, and every exit status of its programs.

The command line prints str(exc) and exits with exit_code; no status stands for two things.
docs/errors.md is made from this file.
"""

from __future__ import annotations

# Exit statuses that are no exception of this package, and what they mean.
DONE = 0
BUG = 1
USAGE = 2
DESCRIBED = 42
INTERRUPTED = 130
OUTPUT_CLOSED = 141
OTHER_STATUSES = {
    DONE: "done",
    BUG: "a bug in gpustasis; please report the traceback",
    USAGE: "the command line is wrong: nothing was done",
    DESCRIBED: "`checkpointctl-gpustasis --plugin-description`, as checkpointctl asks for",
    INTERRUPTED: "interrupted with Ctrl-C (128 + SIGINT)",
    OUTPUT_CLOSED: "the reader of the output, such as `head`, went away (128 + SIGPIPE)",
}


class CheckpointError(Exception):
    """A checkpoint, restore or image operation failed."""

    exit_code = 3

    @property
    def errno(self) -> int | None:
        """The errno of the system's refusal that this comes from; None: it comes from none."""
        cause = self.__cause__
        while cause is not None:
            if isinstance(cause, OSError) and cause.errno is not None:
                return cause.errno
            cause = cause.__cause__
        return None

    def details(self) -> dict[str, object]:
        """Further facts for programs, by name: what --json adds to code, name and message."""
        return {}


def add_to(error: BaseException, text: str) -> None:
    """Have the error say that as well, if it is one of ours: of others nobody is shown the text."""
    if isinstance(error, CheckpointError) and text:
        error.args = (f"{error}{text}",)


class ImageError(CheckpointError):
    """A checkpoint image is missing, damaged, or of an unknown version."""

    exit_code = 10


class ArchiveError(ImageError):
    """A checkpoint archive is damaged, out of bounds, or of a layout that is not known."""

    exit_code = 13


class SealError(ImageError):
    """A checkpoint is sealed, or cannot be; or a key, a signature or what was sealed is wrong."""

    exit_code = 14


class DriverError(CheckpointError):
    """The CUDA driver is missing or refused a call.

    code: the CUresult of the refused call; None if the driver is missing.
    """

    exit_code = 11

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code

    def details(self) -> dict[str, object]:
        """cuda_result: the CUresult of the refused call."""
        return {} if self.code is None else {"cuda_result": self.code}


class CriuError(CheckpointError):
    """CRIU is missing, too old, or failed."""

    exit_code = 12


class EmulatorError(CheckpointError):
    """The driver emulator cannot be started, reached or set up as asked."""

    exit_code = 15


class EngineError(CheckpointError):
    """A container engine or a kubelet cannot be reached, refused what was asked, or failed. One
    that says "may stand still" may have left the container paused; one that says "is complete" has
    kept the archive."""

    exit_code = 16


class PolicyError(CheckpointError):
    """What a container asks of its checkpoints cannot be done, or its policy cannot be used."""

    exit_code = 17


class StreamError(CheckpointError):
    """A stream of a checkpoint broke off, stalled, or is damaged."""

    exit_code = 18


class JobError(CheckpointError):
    """A checkpoint or restore of a whole job was aborted, or cannot be made, or a rank has not done
    its part of one that is committed; or the job failed; or `job verify` found a problem."""

    exit_code = 19


class StoreError(CheckpointError):
    """The store in which the ranks of a job agree cannot be reached, or refused what was asked."""

    exit_code = 21


class UnsupportedError(CheckpointError):
    """What was asked for cannot be done on this machine."""

    exit_code = 20


class InstallError(CheckpointError):
    """A host cannot be set up as asked, or what is installed there is not as recorded."""

    exit_code = 22


class AgentError(CheckpointError):
    """The agent of this node cannot be reached, or refuses what was asked, or has not made it."""

    exit_code = 23


class VerificationError(CheckpointError):
    """A restored job does not count as back: a command that verifies it has failed, or a rank was
    lost or ended before all had succeeded."""

    exit_code = 24


class LocalError(CheckpointError):
    """A checkpoint is only in the memory of this host yet, or its dump into it has not ended."""

    exit_code = 25


class PeerError(CheckpointError):
    """A copy on a neighbour cannot be made, fetched or found, or the neighbour cannot be reached or
    refuses."""

    exit_code = 26
