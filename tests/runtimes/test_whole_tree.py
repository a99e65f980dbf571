# SPDX-License-Identifier: Apache-2.0
"""A container with a tree of fifty processes (tests/programs/whole_tree.c) comes back to the bit,
with runc and with crun, however it was checkpointed. Its tmpfs has files with and without names."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpustasis.criu.plugin import Setting, format_config
from support.certificates import Pair
from support.engine_gpu import DEVICE, POLL_S, SteadyContainer, write_config
from support.engine_image import IMAGE
from support.engine_policy import add_hook, remove_hook
from support.engine_root import EngineRoot
from support.recipients import make_recipient
from support.whole_tree import FLAGS, PROGRAM, ROUND_S, WAYS, Way, chosen, rounds_said

MINE = "/etc/gpustasis/mine"
CHUNKS = "chunk_size"  # has no annotation
# A stream is of no container.
OF_CONTAINERS = [name for name, way in WAYS.items() if not way.streamed]


@pytest.fixture(scope="module")
def program(compile_cuda: Callable[..., Path], shared: Path) -> str:
    shutil.copy(compile_cuda(PROGRAM, *FLAGS), shared / PROGRAM.stem)
    return f"/data/{PROGRAM.stem}"


@pytest.fixture(scope="module")
def me(engines: EngineRoot, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Paths in the root."""
    pair = make_recipient(tmp_path_factory.mktemp("recipient"))
    engines.write(f"{MINE}.pem", pair.certificate.read_text())
    engines.write(f"{MINE}.key", pair.key.read_text(), 0o600)
    return Pair(Path(f"{MINE}.pem"), Path(f"{MINE}.key"))


@pytest.fixture(autouse=True)
def hook(engines: EngineRoot) -> Iterator[None]:
    add_hook(engines)
    yield
    write_config(engines)
    remove_hook(engines)


class TreeContainer(SteadyContainer):
    def rounds(self) -> int:
        numbers = rounds_said(self.output().splitlines())
        assert numbers[:1] in ([], [1])
        return len(numbers)

    def await_rounds(self, more: int) -> None:
        """Of which the first may have begun before the checkpoint."""
        wanted, deadline = self.rounds() + more, time.monotonic() + ROUND_S
        while self.rounds() < wanted:
            assert self.state() == "running", f"it is {self.state()}:\n{self.output()[-500:]}"
            assert time.monotonic() < deadline, f"it does not run on:\n{self.output()[-500:]}"
            time.sleep(POLL_S)


@pytest.fixture
def tree(engines: EngineRoot, program: str) -> Iterator[Callable[..., TreeContainer]]:
    made: list[TreeContainer] = []

    def run(name: str, runtime: str, *words: str) -> TreeContainer:
        made.append(TreeContainer(engines, name))
        engines.run(
            *["podman", "--runtime", runtime, "run", "--detach", "--name", name],
            *["--network", "none", "--device", DEVICE, "--volume", "/mnt/shared:/data"],
            *["--tmpfs", "/scratch", *words, IMAGE],
            *[program, "--disk", "/tmp", "--tmpfs", "/scratch"],
        )
        made[-1].await_rounds(2)
        return made[-1]

    yield run
    for container in made:
        container.remove()


def annotations(way: Way) -> list[str]:
    more = {"incremental": "true", "keep": "1"} if way.earlier else {}
    keys = {key: value for key, value in way.config.items() if key != CHUNKS} | more
    words = (f"io.gpustasis.{key.replace('_', '-')}={value}" for key, value in keys.items())
    return [word for annotation in words for word in ("--annotation", annotation)]


@pytest.mark.parametrize("runtime", ["runc", "crun"])
@pytest.mark.parametrize("way", chosen(OF_CONTAINERS, ["packed-ours"]))
def test_there_and_back(
    tree: Callable[..., TreeContainer], me: Pair, way: str, runtime: str
) -> None:
    how = WAYS[way]
    container = tree(f"tree-{way}-{runtime}", runtime, *annotations(how))
    root, name = container.root, container.name
    keys: dict[str, Setting] = {key: how.config[key] for key in how.config.keys() & {CHUNKS}}
    if how.sealed:
        keys |= {"recipients": [str(me.certificate)], "private_key": str(me.key)}
    write_config(root, *format_config(keys).splitlines())
    for _ in range(how.earlier):
        root.run("podman", "container", "checkpoint", "--keep", "--leave-running", name)
        container.await_rounds(2)
    root.run("podman", "container", "checkpoint", "--keep", name)
    assert container.state() == "exited"
    how.require_taken(root.path(container.images()))
    root.run("podman", "container", "restore", "--keep", name)
    container.await_rounds(2)
