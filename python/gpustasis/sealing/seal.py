# SPDX-License-Identifier: Apache-2.0
"""Seal a checkpoint into a new directory.

The sealed form is written beside its place, synced, read back and compared with the files. Only
then does it get its name. The plain checkpoint is read, and never changed or removed. One that is
only in memory is sealed out of it: its images are never on a disk in the clear.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from gpustasis._core import (
    ARENA_MARKER,
    DEFAULT_SEALED_FRAME,
    ENVELOPE_NAME,
    MANIFEST_NAME,
    MAX_ENVELOPE_SIZE,
    SEALED_NAME,
    FreshKey,
    SealedReader,
    is_sealed_name,
    seal_from_arena,
    write_sealed,
)
from gpustasis.draining.drain import finished_manifest, locked, require_own, sync_files
from gpustasis.errors import CheckpointError, SealError
from gpustasis.files import open_new, sync
from gpustasis.image.arena import Tier, by_descriptor, stored_directory, tier_of
from gpustasis.image.directory import is_there, new_directory, require_outside, share, shared
from gpustasis.image.peer_record import PEER_RECORD
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
    """state: of the checkpoint that was sealed. files: how many are in it; plain_bytes: of these,
    and of images out of memory the memory that they hold; sealed_bytes: of the sealed files.
    signature: None: it was not to be signed. in_clear: names of images that a drain which failed or
    was killed has left in the directory of a local one."""

    state: Tier
    files: int
    plain_bytes: int
    sealed_bytes: int
    signature: Signature | None = None
    in_clear: tuple[str, ...] = ()


def seal(
    directory: Path,
    recipients: Sequence[Recipient],
    out: Path,
    *,
    threads: int = 0,
    frame_size: int = DEFAULT_SEALED_FRAME,
    rate: int = 0,
    signer: Signer | None = None,
    on_progress: OnProgress | None = None,
) -> Sealed:
    """Seal the checkpoint in `directory` for these into the new directory `out`.

    out: must not exist. threads: 0: one for each processor. frame_size:
    in bytes, a power of two from 4 KiB to 4 MiB, of all but images out of memory. rate: of a
    checkpoint that is only in memory, bytes of images that are written in a second, at most; 0: no
    limit. signer: what signs `out`.

    Raises SealError for what cannot be sealed or read, and if files came, went or changed
    meanwhile; CheckpointError if `out` is there, is within `directory` or cannot be written, and
    for a rate of one that is on the disk; ImageError if one in memory is lost or not finished.
    Nothing is at `out` then.
    """
    if os.path.lexists(out):
        raise CheckpointError(f"{out} is there already; name a new directory")
    require_outside(out, directory)
    tell = on_progress or (lambda done: None)
    if tier_of(directory) == Tier.LOCAL:
        # Marker, images and arena have to be those of one directory.
        with _held(directory) as inside, locked(inside) as is_marked:
            if is_marked and tier_of(inside) == Tier.LOCAL:  # not drained meanwhile
                arena = stored_directory(inside)
                require_own(inside, arena)
                with shared((inside, arena)), new_directory(out) as place:
                    done = _write_local(inside, arena, recipients, place, threads, rate, tell)
                    return _signed(done, place, out, signer, threads)
    with share(directory):
        if rate:
            raise CheckpointError(
                f"{directory} is on the disk: a rate limit is for what is only in memory"
            )
        found = files_to_seal(directory)
        require_whole(directory, found)
        with new_directory(out) as place:
            done = _write(directory, found, recipients, place, threads, frame_size, tell)
            return _signed(done, place, out, signer, threads)


def _signed(done: Sealed, place: Path, out: Path, signer: Signer | None, threads: int) -> Sealed:
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
    tell: OnProgress,
) -> Sealed:
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
    _write_envelope(place, envelope)
    copy_inventory(directory, place)
    sealed = _open_again(place, fresh)
    with sealed_errors(f"{directory}, compared with {place / SEALED_NAME}"):
        sealed.compare(directory, threads, lambda done: tell(plain_bytes + done))
    _require_all(place, sealed, set(found), envelope)
    if files_to_seal(directory) != found:
        raise _changed(directory)
    return Sealed(
        state=Tier.DURABLE, files=files, plain_bytes=plain_bytes, sealed_bytes=sealed_bytes
    )


@contextmanager
def _held(directory: Path) -> Iterator[Path]:
    with ExitStack() as held:
        try:
            inside = held.enter_context(by_descriptor(directory))
        except OSError as exc:
            raise CheckpointError(f"cannot open {directory}: {exc.strerror}") from exc
        yield inside


def _write_local(
    directory: Path,
    arena: Path,
    recipients: Sequence[Recipient],
    place: Path,
    threads: int,
    rate: int,
    tell: OnProgress,
) -> Sealed:
    manifest = finished_manifest(directory, arena)
    if manifest.chain_length:
        raise SealError(
            f"{directory} is built on an earlier checkpoint, which would not be sealed with it: "
            "drain it, make a copy that needs no other with `gpustasis flatten`, and seal that"
        )
    images = {task.image_name for task in manifest.tasks if task.externalized}
    # Not what is said of this directory alone, nor what a drain that failed or was
    # killed has left, whole or in part.
    left = {*images, MANIFEST_NAME}
    left |= {f".{name}.part" for name in (*left, PEER_RECORD)} | {ARENA_MARKER, PEER_RECORD}
    found = files_to_seal(directory, left)
    require_whole(directory, {*found, *images})
    try:
        sync_files(directory, arena, but=left)  # else what was lost on the way would be sealed
    except OSError as exc:
        raise CheckpointError(f"cannot sync {directory}: {exc.strerror}") from exc
    with sealed_errors(str(directory)):
        fresh = FreshKey()
        envelope = fresh.key.wrap([recipient.pem for recipient in recipients])
    _write_envelope(place, envelope)
    with sealed_errors(str(directory)):
        files, plain_bytes, sealed_bytes = seal_from_arena(
            fresh, arena, directory, list(found), place, threads=threads, rate=rate, progress=tell
        )
    copy_inventory(directory, place)
    sealed = _open_again(place, fresh)
    # Each image was checked as it was read out of memory, and is compressed anew: that it is on the
    # disk as it was sealed, the tags of its frames tell.
    with sealed_errors(str(place)):
        sealed.check([], threads, lambda done: tell(plain_bytes + done))
    _require_all(place, sealed, {*found, *images, MANIFEST_NAME}, envelope)
    if files_to_seal(directory, left) != found:
        raise _changed(directory)
    remains = images | {f".{name}.part" for name in images}
    return Sealed(
        state=Tier.LOCAL,
        files=files,
        plain_bytes=plain_bytes,
        sealed_bytes=sealed_bytes,
        in_clear=tuple(sorted(name for name in remains if is_there(directory / name))),
    )


def _write_envelope(place: Path, envelope: bytes) -> None:
    with open_new(place / ENVELOPE_NAME) as file:
        file.write(envelope)
        sync(file)


def _changed(directory: Path) -> SealError:
    return SealError(f"{directory}: files came, went or changed while it was sealed")


def _open_again(place: Path, fresh: FreshKey) -> SealedReader:
    """What was sealed, to be read from the disk as far as the kernel will. Raises SealError."""
    for path in place.iterdir():
        if is_sealed_name(path.name) and path.name != ENVELOPE_NAME:
            _forget(path)
    with seal_errors(place):
        return SealedReader.open(place, fresh.key)


def _require_all(place: Path, sealed: SealedReader, names: set[str], envelope: bytes) -> None:
    """Raise SealError unless `names` are what is sealed, and the envelope is what was written."""
    # What names are in it was read from the disk as well: all that were to be sealed.
    if {entry.name for entry in sealed.entries} != names:
        raise SealError(f"{place}: it does not hold the files that were to be sealed")
    if read_file(place / ENVELOPE_NAME, MAX_ENVELOPE_SIZE) != envelope:
        raise SealError(f"{place / ENVELOPE_NAME} reads back as something else")


def _forget(path: Path) -> None:
    """Have the kernel read the file from the disk again, as far as it will."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
