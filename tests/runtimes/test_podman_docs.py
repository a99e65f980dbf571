# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/operating.md, "Podman", work as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

from support.engine_gpu import start_podman
from support.engine_image import IMAGE
from support.engine_root import EngineRoot

_IMAGE_BLOCK = re.compile(r"^```sh image\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_BLOCK = re.compile(r"^```sh podman\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_commands(engines: EngineRoot, repository: Path, shared: Path) -> None:
    document = (repository / "docs/operating.md").read_text()
    blocks = _BLOCK.findall(document)
    assert len(blocks) == 3
    (image,) = _IMAGE_BLOCK.findall(document)
    environ = {"IMAGE": IMAGE, "CONTAINER_HOST": start_podman(engines, "crun")}
    try:
        for block in blocks:
            engines.run("bash", "-e", "-c", block, environ=environ)
        # Of the archive that the blocks have left.
        engines.run("bash", "-e", "-c", f"cd /mnt/shared\n{image}", environ=environ)
    finally:
        engines.run("podman", "rm", "--force", "--time", "0", "--ignore", "job", "again")
        engines.run("podman", "rmi", "--ignore", "localhost/trainer-checkpoint:1")
        for name in ("job.tar", "again.tar"):
            (shared / name).unlink(missing_ok=True)
