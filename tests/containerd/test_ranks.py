# SPDX-License-Identifier: Apache-2.0
"""Annotations under containerd, which has them from a base spec with our hook: containers that are
ranks of a job are in a checkpoint together, or run on."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpustasis.errors import EngineError
from gpustasis.install.layout import HOOK
from support.container_ranks import Asking, Node, log_of_agent
from support.containerd_node import Container, ContainerdNode
from support.engine_gpu import install
from support.engine_root import EngineRoot

LOOK_S = 30
CONFIG = "/etc/containerd/config.toml"
BASE = "/etc/containerd/gpustasis.json"
DOCUMENT = Path(__file__).resolve().parents[2] / "docs/operating.md"


def block(kind: str) -> str:
    """Of the document, for annotations."""
    found = re.findall(
        rf"^```{kind} containerd-annotations\n(.*?)^```$",
        DOCUMENT.read_text(),
        re.MULTILINE | re.DOTALL,
    )
    assert len(found) == 1
    return str(found[0])


class NodeWithHook(ContainerdNode):
    """gpustasis is installed on it, and its containers have the hook, as the document has it."""

    def _prepare(self) -> None:
        super()._prepare()
        install(self.root)
        self.root.run("sh", "-euc", block("sh"))
        config = self.root.path(CONFIG)
        config.write_text(config.read_text() + block("toml"))


@pytest.fixture(scope="module")
def hooked(tmp_path_factory: pytest.TempPathFactory, job_program: Path) -> Iterator[NodeWithHook]:
    with (
        EngineRoot(tmp_path_factory.mktemp("hooked")) as root,
        NodeWithHook(root, job_program) as node,
    ):
        yield node


@pytest.fixture
def agent(hooked: NodeWithHook) -> Iterator[Node]:
    made = Node(hooked.root, "trees", LOOK_S, installed=True)
    made.start_agent()
    yield made
    made.close()


def start(node: NodeWithHook, job: str, world: int = 2) -> list[Container]:
    """One container a pod, and the pod says what it is, as in Kubernetes."""
    made = []
    for rank in range(world):
        words = {"job": job, "rank": str(rank), "world": str(world)}
        pod = node.pod(
            f"{job}-{rank}",
            annotations={f"io.gpustasis.{key}": word for key, word in words.items()},
        )
        made.append(pod.job("job", "--mib", "8", "--seed", str(rank + 3)))
    return made


def ask_all(
    node: NodeWithHook, ranks: list[Container], archives: str
) -> list[subprocess.CompletedProcess[str]]:
    """At the same time."""
    words = ("gpustasis", "containerd", "checkpoint")
    asked = [
        Asking(node.root, *words, one.path, "--export", f"/tmp/{archives}-{number}.tar")
        for number, one in enumerate(ranks)
    ]
    return [one.ended() for one in asked]


def test_all_are_in_it_or_none_is(hooked: NodeWithHook, agent: Node) -> None:
    ranks = start(hooked, "together")
    for done in ask_all(hooked, ranks, "together"):
        assert done.returncode == 0, done.stderr + log_of_agent(agent)
    for number, one in enumerate(ranks):
        one.run_on()
        hooked.root.run("gpustasis", "verify", f"/tmp/together-{number}.tar")
    begin = time.monotonic()
    (alone,) = ask_all(hooked, ranks[:1], "alone")
    assert alone.returncode != 0
    assert time.monotonic() - begin >= LOOK_S
    assert not hooked.root.path("/tmp/alone-0.tar").exists()
    for one in ranks:
        one.run_on()  # the one that containerd had paused, too
    whole = agent.job("checkpoint", "together", "--world", "2", "--leave-running")
    for one in ranks:
        one.run_on()
    states = [one["state"] for one in agent.job("list", "together")["epochs"]]
    assert states == ["committed", "aborted", "committed"] and whole["epoch"] == 3
    for one in ranks:
        one.stop()


def test_without_an_agent_none_is(hooked: NodeWithHook) -> None:
    ranks = start(hooked, "orphans")
    for number, done in enumerate(ask_all(hooked, ranks, "orphans")):
        assert done.returncode != 0
        assert f"job orphans, rank {number}: the checkpoint of container " in done.stderr
        assert "no agent answers at " in done.stderr and "start gpustasis-agent" in done.stderr
        assert not hooked.root.path(f"/tmp/orphans-{number}.tar").exists()
    for one in ranks:
        one.run_on()
        one.stop()


def test_a_container_without_annotations_has_nothing_of_it(hooked: NodeWithHook) -> None:
    container = hooked.pod("plain").job("job", "--mib", "4")
    (done,) = ask_all(hooked, [container], "plain")
    assert done.returncode == 0, done.stderr
    container.run_on()
    container.stop()


def test_a_wrong_annotation_stops_the_start(hooked: NodeWithHook) -> None:
    pod = hooked.pod("wrong", annotations={"io.gpustasis.threads": "many"})
    with pytest.raises(EngineError, match=r"io\.gpustasis\.threads.*many.*must be"):
        pod.job("job")


def test_the_hook_is_not_taken_from_under_it(hooked: NodeWithHook) -> None:
    """No container would start."""
    done = hooked.root.run("gpustasis", "uninstall", check=False)
    assert done.returncode != 0
    assert f"{BASE} names {HOOK}" in done.stderr and "nothing was changed" in done.stderr
    assert hooked.root.path(HOOK).exists()
