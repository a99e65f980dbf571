# SPDX-License-Identifier: Apache-2.0
"""Seal a checkpoint into a new directory.

The sealed form is written beside its place, synced, read back and compared with the files. Only
then does it get its name. The plain checkpoint is read, and never changed or removed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpustasis._core import (
    DEFAULT_SEALED_FRAME,
    ENVELOPE_NAME,
    MAX_ENVELOPE_SIZE,
    SEALED_NAME,
    FreshKey,
    SealedReader,
    write_sealed,
)
from gpustasis.errors import CheckpointError, SealError
from gpustasis.files import open_new, sync
from gpustasis.image.arena import require_durable
from gpustasis.image.directory import new_directory, require_outside, share
from gpustasis.sealing.directory import (
    Identity,
    copy_inventory,
    files_to_seal,
    read_file,
    require_whole,
    seal_errors,
)
from gpustasis.sealing.keys import sealed_errors
from gpustasis.sealing.recipients import Recipient
from gpustasis.sealing.signing import Signature, Signer, sign_held

# Told how many bytes are done; each is done twice: sealed, and read back.
OnProgress = Callable[[int], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    """files: how many are in it; plain_bytes: of these; sealed_bytes: of the sealed file.
    signature: None: it was not to be signed."""

    files: int
    plain_bytes: int
    sealed_bytes: int
    signature: Signature | None = None


def seal(
    directory: Path,
    recipients: Sequence[Recipient],
    out: Path,
    *,
    threads: int = 0,
    frame_size: int = DEFAULT_SEALED_FRAME,
    signer: Signer | None = None,
    on_progress: OnProgress | None = None,
) -> Sealed:
    """Seal the checkpoint in `directory` for these into the new directory `out`.

    out: must not exist. threads: 0: one for each processor. frame_size:
    in bytes, a power of two from 4 KiB to 4 MiB. signer: what signs `out`.

    Raises SealError for what cannot be sealed or read, and if files came, went or changed
    meanwhile; CheckpointError if `out` is there, is within `directory` or cannot be written.
    Nothing is at `out` then.
    """
    if os.path.lexists(out):
        raise CheckpointError(f"{out} is there already; name a new directory")
    require_outside(out, directory)
    require_durable(directory, "seal it")
    with share(directory):
        found = files_to_seal(directory)
        require_whole(directory, found)
        with new_directory(out) as place:
            done = _write(directory, found, recipients, place, threads, frame_size, on_progress)
            if signer is None:
                return done
            signature = replace(sign_held(place, signer, threads=threads), directory=out)
            return replace(done, signature=signature)


def _write(
    directory: Path,
    found: dict[str, Identity],
    recipients: Sequence[Recipient],
    place: Path,
    threads: int,
    frame_size: int,
    on_progress: OnProgress | None,
) -> Sealed:
    tell = on_progress or (lambda done: None)
    with sealed_errors(str(directory)):
        fresh = FreshKey()
        envelope = fresh.key.wrap([recipient.pem for recipient in recipients])
        files, plain_bytes, sealed_bytes = write_sealed(
            fresh,
            directory,
            list(found),
            place,
            frame_size=frame_size,
            threads=threads,
            progress=tell,
        )
    with open_new(place / ENVELOPE_NAME) as file:
        file.write(envelope)
        sync(file)
    copy_inventory(directory, place)
    _forget(place / SEALED_NAME)
    with seal_errors(place):
        sealed = SealedReader.open(place, fresh.key)
    with sealed_errors(f"{directory}, compared with {place / SEALED_NAME}"):
        sealed.compare(directory, threads, lambda done: tell(plain_bytes + done))
    # What names are in it was read from the disk as well: all that were to be sealed.
    if {entry.name for entry in sealed.entries} != set(found) or files_to_seal(directory) != found:
        raise SealError(f"{directory}: files came, went or changed while it was sealed")
    if read_file(place / ENVELOPE_NAME, MAX_ENVELOPE_SIZE) != envelope:
        raise SealError(f"{place / ENVELOPE_NAME} reads back as something else")
    return Sealed(files=files, plain_bytes=plain_bytes, sealed_bytes=sealed_bytes)


def _forget(path: Path) -> None:
    """Have the kernel read the file from the disk again, as far as it will."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
