"""Earlier checkpoints that an archive is built on, put where a restore looks for them.

A restore that finds no parent where the link leads looks for its id below /var/lib/gpustasis
(docs/format.md, "Links"). On another host than that of the dump, it has to be brought there.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from gpustasis._core import PARENT_LINK
from gpustasis.archive.layout import CHECKPOINT
from gpustasis.archive.opened import Archive, open_archive
from gpustasis.archive.tar import Kind, Member, TarReader
from gpustasis.errors import CheckpointError
from gpustasis.image.chain import NO_PARENT, STORE_ROOT, find_checkpoint
from gpustasis.image.new_directory import sync_directory

_OURS = "gpustasis-"
_CHUNK = 1 << 20  # bytes read at a time


def keep_parents(archives: Sequence[Path]) -> None:
    """Unpack the GPU images of these archives to STORE_ROOT/checkpoints/ID, where they are not yet.

    Raises ArchiveError for a bad archive, CheckpointError for one without GPU images, or if they
    cannot be written; what is there then is whole, and on the disk.
    """
    for path in archives:
        with open_archive(path) as archive:
            _keep(archive)


def require_parent(archive: Archive) -> None:
    """Raise CheckpointError, which names it, if the checkpoint that this one is built on is not on
    this machine."""
    manifest = archive.manifest()
    if manifest is None or manifest.parent_id == NO_PARENT:
        return
    if find_checkpoint(manifest.parent_id) is None:
        link = archive.members.get(CHECKPOINT + PARENT_LINK)
        where = f" (it was {link.target})" if link is not None else ""
        raise CheckpointError(
            f"{archive.name} is built on checkpoint {manifest.parent_id.hex()}{where}, which is not "
            f"below {STORE_ROOT}: bring it there, or name its archive with --import-parent"
        )


def _keep(archive: Archive) -> None:
    checkpoint_id = archive.checkpoint_id()
    if checkpoint_id is None:
        raise CheckpointError(f"{archive.name} is no parent: it holds no GPU state of gpustasis's")
    if find_checkpoint(checkpoint_id) is not None:
        return
    place = STORE_ROOT / "checkpoints"
    part = place / f".{checkpoint_id.hex()}.{os.getpid()}"
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(mode=0o700)
        try:
            for member, reader in archive.again():
                if _is_ours(member):
                    _write(part / member.name.removeprefix(CHECKPOINT), member, reader)
            sync_directory(part)
            try:
                part.rename(place / checkpoint_id.hex())
            except OSError:
                if find_checkpoint(checkpoint_id) is None:
                    raise  # else another import has just brought the same
            sync_directory(place)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    except OSError as exc:
        raise CheckpointError(
            f"cannot put checkpoint {checkpoint_id.hex()} of {archive.name} below {place}: "
            f"{exc.strerror}"
        ) from exc


def _is_ours(member: Member) -> bool:
    """A GPU image or the manifest; neither is in a directory below."""
    name = member.name.removeprefix(CHECKPOINT)
    return (
        member.kind is Kind.FILE
        and member.name.startswith(CHECKPOINT + _OURS)
        and "/" not in name
        and name.endswith(".img")
    )


def _write(path: Path, member: Member, reader: TarReader) -> None:
    with open(path, "xb", opener=_private) as file:
        left = member.size
        while left:
            piece = reader.read(min(left, _CHUNK))
            file.write(piece)
            left -= len(piece)
        file.flush()
        os.fsync(file.fileno())


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)
