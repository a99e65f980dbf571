# SPDX-License-Identifier: Apache-2.0
"""What `inspect` says of an archive."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveView:
    """What an archive says of the container, and how large its parts are, in bytes.

    engine: "podman", "cri-o", "containerd" or "unknown". image: by its full name; image_requested:
    as the user named it. created, checkpointed: RFC 3339. "": it does not say. file_bytes: of the
    archive; unpacked_bytes: of all in it; checkpoint_bytes: of CRIU's image directory.
    """

    engine: str
    compression: str
    container_name: str
    container_id: str
    pod: str
    namespace: str
    image: str
    image_requested: str
    image_id: str
    runtime: str
    created: str
    checkpointed: str
    members: int
    file_bytes: int
    unpacked_bytes: int
    checkpoint_bytes: int
    rootfs_diff_bytes: int
    volumes_bytes: int
