# SPDX-License-Identifier: Apache-2.0
"""An image in the OCI layout, as one tar archive, of one layer."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Sequence

_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar"


def oci_archive(layer: bytes, name: str, command: Sequence[str]) -> bytes:
    """layer: an uncompressed tar archive, the image's files. name: what an import calls it."""
    blobs: dict[str, bytes] = {}

    def add(content: bytes, media: str) -> dict[str, object]:
        digest = hashlib.sha256(content).hexdigest()
        blobs[f"blobs/sha256/{digest}"] = content
        return {"mediaType": media, "digest": f"sha256:{digest}", "size": len(content)}

    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": list(command)},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": _MANIFEST,
        "config": add(json.dumps(config).encode(), _CONFIG),
        "layers": [add(layer, _LAYER)],
    }
    described = add(json.dumps(manifest).encode(), _MANIFEST)
    described["annotations"] = {"io.containerd.image.name": name}
    blobs["index.json"] = json.dumps({"schemaVersion": 2, "manifests": [described]}).encode()
    blobs["oci-layout"] = json.dumps({"imageLayoutVersion": "1.0.0"}).encode()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path, content in blobs.items():
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(content), 0o644
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()
