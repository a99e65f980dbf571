# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/operating.md, "Podman", work as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

from support.engine_gpu import start_podman
from support.engine_image import IMAGE
from support.engine_root import EngineRoot

_BLOCK = re.compile(r"^```sh podman\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_commands(engines: EngineRoot, repository: Path, shared: Path) -> None:
    blocks = _BLOCK.findall((repository / "docs/operating.md").read_text())
    assert len(blocks) == 3
    environ = {"IMAGE": IMAGE, "CONTAINER_HOST": start_podman(engines, "crun")}
    try:
        for block in blocks:
            engines.run("bash", "-e", "-c", block, environ=environ)
    finally:
        engines.run("podman", "rm", "--force", "--time", "0", "--ignore", "job", "again")
        for name in ("job.tar", "again.tar"):
            (shared / name).unlink(missing_ok=True)
