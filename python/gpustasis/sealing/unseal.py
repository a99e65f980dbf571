# SPDX-License-Identifier: Apache-2.0
"""Open a sealed checkpoint again, or give it to others to open."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpustasis._core import (
    ENVELOPE_NAME,
    MANIFEST_NAME,
    MAX_ENVELOPE_SIZE,
    DataKey,
    ImageReader,
    flatten_image,
    read_manifest,
    write_manifest,
)
from gpustasis.errors import CheckpointError, SealError
from gpustasis.files import replace_file
from gpustasis.image.checkpoint import NO_PARENT
from gpustasis.image.directory import (
    new_directory,
    require_free,
    require_outside,
    share,
    try_exclude,
)
from gpustasis.image.flatten import flat_task, without_parent
from gpustasis.sealing.directory import (
    copy_clear,
    open_key,
    open_sealed,
    read_file,
    require_sealed,
    seal_errors,
)
from gpustasis.sealing.keys import KeySource
from gpustasis.sealing.recipients import Recipient


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsealed:
    """files: how many were written; plain_bytes: of these."""

    files: int
    plain_bytes: int


def unseal(
    directory: Path,
    source: KeySource,
    out: Path,
    *,
    threads: int = 0,
    on_progress: Callable[[int], object] | None = None,
) -> Unsealed:
    """Write the files of the sealed checkpoint in `directory` to `out`, which must not exist, or be
    an empty directory. It gets its name when all of it was found authentic. Of one that is built on
    earlier ones, what these hold of it is written as well: it needs no other then.

    threads: 0: one for each processor. Raises SealError for a wrong key and for anything that was
    changed, CheckpointError if `out` cannot be written.
    """
    require_free(out)
    require_outside(out, directory)
    with share(directory):
        require_sealed(directory)
        key = open_key(directory, source)
        sealed = open_sealed(directory, key)
        with new_directory(out) as place:
            with seal_errors(directory):
                sealed.extract(place, threads, on_progress)
            files, size = copy_clear(directory, place, sealed)
            with seal_errors(directory):
                size += _make_flat(directory, key, place, threads)
        entries = sealed.entries
        return Unsealed(
            files=files + len(entries),
            plain_bytes=size + sum(entry.size for entry in entries),
        )


def _make_flat(directory: Path, key: DataKey, place: Path, threads: int) -> int:
    """What was written to `place` needs no other checkpoint from now on: images that refer to
    earlier ones are replaced by whole ones. How many bytes that added. Raises SealError; as what
    is in seal_errors()."""
    if not (place / MANIFEST_NAME).exists():
        return 0
    manifest = read_manifest(place)
    if manifest.chain_length != key.ancestor_count:
        raise SealError(
            f"{directory}: {MANIFEST_NAME} is built on {manifest.chain_length} checkpoints, and "
            f"the envelope holds the keys of {key.ancestor_count}"
        )
    if manifest.parent_id == NO_PARENT:
        return 0
    tasks, added = [], 0
    for task in manifest.tasks:
        if not task.externalized:
            tasks.append(task)
            continue
        image = ImageReader.find_sealed(directory, task.image_name, key)
        image.attach_sources()
        written = flatten_image(image, place / task.image_name, threads)
        added += written.file_size - image.file_size
        tasks.append(flat_task(task, written.digest))
    made = (place / MANIFEST_NAME).stat()
    write_manifest(place, without_parent(manifest, tasks, manifest.pack))
    os.utime(place / MANIFEST_NAME, ns=(made.st_atime_ns, made.st_mtime_ns))
    return added


def rewrap(directory: Path, source: KeySource, recipients: Sequence[Recipient]) -> None:
    """Give the data key to these, and to nobody else from now on: in one step, a new envelope takes
    the place of the old one, once it was read back and found to be for this data key, with its
    mode, owner and group. No other file is touched.

    Raises SealError for a wrong key or what was changed, CheckpointError if somebody else uses the
    directory or it cannot be written.
    """
    lock = try_exclude(directory)
    if lock is None:
        raise CheckpointError(
            f"{directory} is in use, by another rewrap or an unseal: try again when that has ended"
        )
    with lock:
        require_sealed(directory)
        key = open_key(directory, source)
        open_sealed(directory, key)  # so that no envelope leads to what it cannot open
        with seal_errors(directory):
            envelope = key.wrap([recipient.pem for recipient in recipients])
        old = os.stat(ENVELOPE_NAME, dir_fd=lock.fd, follow_symlinks=False)
        mode = old.st_mode & 0o777  # never for another to run as its owner
        part = f".{ENVELOPE_NAME}.{secrets.token_hex(8)}.part"

        def finish(written: int) -> None:
            os.fchown(written, old.st_uid, old.st_gid)
            os.fsync(written)
            path = Path(f"/proc/self/fd/{lock.fd}") / part
            content = read_file(path, MAX_ENVELOPE_SIZE)
            with seal_errors(directory):
                key.check(content)
            if content != envelope:
                raise SealError(f"{directory / part} reads back as something else")

        try:
            replace_file(
                *(lock.fd, ENVELOPE_NAME, envelope, mode),
                part=part,
                prepare=finish,
            )
        except OSError as exc:
            raise CheckpointError(
                f"cannot write {os.path.join(directory, ENVELOPE_NAME)}: {exc.strerror}"
            ) from exc
