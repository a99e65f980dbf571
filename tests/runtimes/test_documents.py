# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/operating.md on installing work as they stand there, on two hosts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from runtimes.conftest import start
from support.engine_gpu import SteadyContainer
from support.engine_root import EngineRoot

Host = Callable[[str], EngineRoot]


def blocks(document: Path, kind: str) -> list[str]:
    pattern = rf"^```sh {kind}\n(.*?)^```$"
    return re.findall(pattern, document.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def host(tmp_path: Path, shared: Path, steady_job: Path) -> Iterator[Host]:
    """host(name): a system with emulated GPUs on which gpustasis is not installed."""
    with ExitStack() as stack:

        def make(name: str) -> EngineRoot:
            place = tmp_path / name
            place.mkdir()
            root = stack.enter_context(start(place, shared, steady_job))
            for program in ("runc", "crun", "default"):
                root.path(f"/etc/criu/{program}.conf").unlink()
            return root

        yield make


def test_install(host: Host, repository: Path) -> None:
    install, look, undo = blocks(repository / "docs/operating.md", "install")
    here, there = host("here"), host("there")

    def shell(root: EngineRoot, script: str) -> str:
        return root.run("bash", "-euc", script).stdout

    for root in (here, there):
        assert "create     /etc/criu/runc.conf" in shell(root, install)
    job = SteadyContainer.run(here, "job", "runc", mib=4)
    assert "problem" not in shell(here, look)
    job.remove()
    # `there` is the other host: what is said of the archive here holds there, too.
    assert "runtime: runc" in shell(there, look.splitlines()[-1])
    shell(there, "podman --runtime runc container restore --import /mnt/shared/job.tar")
    SteadyContainer(there, "job").run_on()
    SteadyContainer(there, "job").remove()
    for root in (here, there):
        shell(root, undo)
        assert not root.path("/etc/criu/runc.conf").exists()
    here.path("/mnt/shared/job.tar").unlink()
