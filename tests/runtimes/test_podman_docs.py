# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/operating.md, "Podman", work as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

from support.engine_gpu import DEVICE, start_podman
from support.engine_image import IMAGE
from support.engine_root import EngineRoot


def blocks(document: str, kind: str) -> list[str]:
    return re.findall(rf"^```sh {kind}\n(.*?)^```$", document, re.MULTILINE | re.DOTALL)


def test_the_commands(engines: EngineRoot, repository: Path, shared: Path) -> None:
    document = (repository / "docs/operating.md").read_text()
    podman = blocks(document, "podman")
    assert len(podman) == 3
    (sealing,), (image,) = blocks(document, "sealing"), blocks(document, "image")
    seal, unseal = blocks(document, "archive")
    environ = {
        "image": IMAGE,
        "job": "/bin/steady_job",
        "gpu": DEVICE,
        "CONTAINER_HOST": start_podman(engines, "crun"),
    }

    def shell(script: str) -> str:
        return engines.run("bash", "-eu", "-c", script, environ=environ).stdout

    try:
        for block in podman:
            shell(block)
        # Of the archive that the blocks have left; the keys are those of another block.
        keys = sealing.split("gpustasis seal")[0]
        shell(f"mkdir /tmp/seal\ncd /tmp/seal\nmv /mnt/shared/job.tar .\n{keys}{seal}")
        assert not engines.path("/tmp/seal/job.tar").exists()
        assert "1 image whole" in shell(f"cd /tmp/seal\n{unseal}")
        shell(f"cd /tmp/seal\n{image}")
    finally:
        engines.run("rm", "-rf", "/tmp/seal")
        engines.run("podman", "rm", "--force", "--time", "0", "--ignore", "job", "again")
        engines.run("podman", "rmi", "--ignore", "localhost/trainer-checkpoint:1")
        for name in ("job.tar", "again.tar"):
            (shared / name).unlink(missing_ok=True)
