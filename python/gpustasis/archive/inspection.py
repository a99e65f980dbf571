"""What a checkpoint archive holds: as of a directory, and what it says of the container."""

from __future__ import annotations

from dataclasses import asdict, replace

from gpustasis.archive.layout import CHECKPOINT, ROOTFS_DIFF, VOLUMES
from gpustasis.archive.opened import Archive
from gpustasis.image.inspection import ArchiveView, Inspection, inspect_files


def inspect_archive(archive: Archive) -> Inspection:
    """Look into it without checking GPU memory. Raises as inspect_files."""
    return replace(inspect_files(archive), archive=_view(archive))


def _view(archive: Archive) -> ArchiveView:
    rootfs_diff = archive.members.get(ROOTFS_DIFF)
    return ArchiveView(
        **asdict(archive.facts()),
        compression=archive.compression,
        members=len(archive.members),
        file_bytes=archive.file_bytes,
        unpacked_bytes=archive.unpacked_bytes,
        checkpoint_bytes=_size_below(archive, CHECKPOINT),
        rootfs_diff_bytes=0 if rootfs_diff is None else rootfs_diff.size,
        volumes_bytes=_size_below(archive, VOLUMES),
    )


def _size_below(archive: Archive, prefix: str) -> int:
    return sum(m.size for m in archive.members.values() if m.name.startswith(prefix))
