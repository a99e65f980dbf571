# SPDX-License-Identifier: Apache-2.0
"""To which job a rank's directory belongs. A dump there has the number of its epoch for a name: two
jobs in one directory would take each other's for their own, and remove them."""

from __future__ import annotations

import logging
import os
import secrets
import time
from contextlib import suppress
from pathlib import Path

from gpustasis.errors import JobError
from gpustasis.files import give_name, open_new, open_regular, sync, sync_directory
from gpustasis.jobs.records import Keys

log = logging.getLogger(__name__)

OWNER = ".job"  # in the rank's directory
_MOST_BYTES = 256
_PATIENCE_S = 1.0  # for who is just writing it, where there are no hard links
_POLL_S = 0.05


def owner_of(directory: Path) -> str:
    """The job that this rank's directory belongs to; empty: nothing says so, as where no keeper of
    this build has been yet. Raises JobError."""
    path = directory / OWNER
    end = time.monotonic() + _PATIENCE_S
    while True:
        try:
            with open_regular(path, os.O_NOFOLLOW) as file:
                raw = file.read(_MOST_BYTES)
        except FileNotFoundError:
            return ""
        except OSError as exc:
            raise JobError(f"cannot read {path}: {exc.strerror}") from exc
        if raw or time.monotonic() >= end:
            break
        time.sleep(_POLL_S)
    try:
        return Keys(raw.decode("utf-8", "replace").removesuffix("\n")).job
    except JobError as exc:
        raise JobError(
            f"{path} names no job ({exc}): remove it once it is clear to which job the checkpoints "
            "beside it belong"
        ) from exc


def own(directory: Path, job: str) -> None:
    """Have this rank's directory belong to that job. Raises JobError if it is another's."""
    owner = owner_of(directory) or _write(directory, job)
    if owner != job:
        raise JobError(
            f"{directory} belongs to job {owner}, and not to job {job}: each job needs a directory "
            f"of its own (-D). If job {owner} is over, and its checkpoints are not needed, remove "
            f"{directory / OWNER}"
        )


def _write(directory: Path, job: str) -> str:
    """Whose directory it is then: another may have been faster. Raises JobError."""
    part = directory / f"{OWNER}.{secrets.token_hex(4)}.part"
    try:
        with open_new(part) as file:
            file.write(f"{job}\n".encode())
            sync(file)
        give_name(part, directory / OWNER)
        sync_directory(directory.parent)
    except FileExistsError:
        return owner_of(directory) or job
    except OSError as exc:  # a disk that is full keeps no rank from being taken over
        log.warning("%s cannot be written: %s", directory / OWNER, exc.strerror)
    finally:
        with suppress(OSError):
            part.unlink()
    return job
