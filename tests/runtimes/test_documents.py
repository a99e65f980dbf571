"""The commands of docs/operating.md for Podman work as they stand there, on two hosts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from runtimes.conftest import start
from support.engine_gpu import DEVICE, SteadyContainer
from support.engine_image import IMAGE
from support.engine_root import EngineRoot

Host = Callable[[str], EngineRoot]


def blocks(document: Path, kind: str) -> list[str]:
    pattern = rf"^```sh {kind}\n(.*?)^```$"
    return re.findall(pattern, document.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def host(tmp_path: Path, shared: Path, steady_job: Path) -> Iterator[Host]:
    """host(name): a system with emulated GPUs on which cudackpt is not installed."""
    with ExitStack() as stack:

        def make(name: str) -> EngineRoot:
            place = tmp_path / name
            place.mkdir()
            root = stack.enter_context(start(place, shared, steady_job))
            for program in ("runc", "crun", "default"):
                root.path(f"/etc/criu/{program}.conf").unlink()
            return root

        yield make


def test_podman(host: Host, repository: Path) -> None:
    first, checkpoint, elsewhere, undo = blocks(repository / "docs/operating.md", "podman")
    variables = {"gpu": DEVICE, "image": IMAGE, "job": "/bin/steady_job --mib 4"}

    def shell(root: EngineRoot, script: str) -> str:
        words = ("env", "--chdir", "/mnt/shared", "bash", "-euc", script)
        return root.run(*words, environ=variables).stdout

    here, there = host("here"), host("there")
    shell(here, first)
    SteadyContainer(here, "trainer").run_on()
    assert "steady_job" in shell(here, checkpoint)
    shell(there, elsewhere)
    SteadyContainer(there, "trainer").run_on()
    for root in (here, there):
        shell(root, undo)
        assert not root.path("/etc/criu/runc.conf").exists()
    here.path("/mnt/shared/trainer.tar").unlink()
