# SPDX-License-Identifier: Apache-2.0
"""`gpustasis doctor` on a node of a cluster, and what is wrong with the node for a while."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from subprocess import CompletedProcess
from typing import TYPE_CHECKING, Any

from support.idle_kubelet import wait_until_idle
from support.kubernetes_node import ADDRESS, KubernetesNode
from support.kubernetes_objects import PLACE

if TYPE_CHECKING:
    from support.engine_root import EngineRoot
    from support.gpu_pod import GpuPod

Findings = dict[str, list[dict[str, Any]]]


def findings(cluster: KubernetesNode, *words: str) -> Findings:
    """By their names."""
    done = cluster.root.run("gpustasis", "doctor", "--json", *words, check=False)
    assert done.returncode in (0, 20), done.stderr
    found: Findings = {}
    for one in json.loads(done.stdout)["findings"]:
        found.setdefault(one["name"], []).append(one)
    return found


def problems(found: Findings) -> dict[str, str]:
    """Name -> text and remedy. A name has one problem here."""
    wrong = [one for each in found.values() for one in each if one["status"] == "problem"]
    said = {one["name"]: f"{one['text']} -> {one['remedy']}" for one in wrong}
    assert len(said) == len(wrong), wrong
    return said


def ask(cluster: KubernetesNode, container: str) -> CompletedProcess[str]:
    """Ask the kubelet for a checkpoint of NAMESPACE/POD/CONTAINER."""
    return cluster.root.run(
        *("gpustasis", "kubelet", "checkpoint", "--node", ADDRESS, "--ca", PLACE / "ca.pem"),
        *("--cert", PLACE / "admin-client.pem", "--key", PLACE / "admin-client.key", container),
        check=False,
    )


def refusal(cluster: KubernetesNode, container: str) -> str:
    """What is said of a checkpoint that must fail."""
    done = ask(cluster, container)
    assert done.returncode == 16, done.stdout
    return done.stderr


@contextmanager
def edited(root: EngineRoot, path: str, edit: Callable[[str], str]) -> Iterator[None]:
    """A file of the node has other text."""
    text = root.path(path).read_text()
    assert edit(text) != text
    root.path(path).write_text(edit(text))
    try:
        yield
    finally:
        root.path(path).write_text(text)


@contextmanager
def without(root: EngineRoot, path: str) -> Iterator[None]:
    """A file of the node is not there."""
    kept = root.path("/opt/kept")
    root.path(path).rename(kept)
    try:
        yield
    finally:
        kept.rename(root.path(path))


@contextmanager
def with_file(root: EngineRoot, path: str, content: bytes, mode: int = 0o644) -> Iterator[None]:
    """The node has one file more."""
    place = root.path(path)
    assert not place.exists()
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(content)
    place.chmod(mode)
    try:
        yield
    finally:
        place.unlink()


def restart(cluster: KubernetesNode, *, at_once: bool = False) -> None:
    """Its container runtime; what runs under it runs on. A kubelet that runs has ended what it did
    with it before, unless at_once, and can ask it again after."""
    is_asked = cluster.runs("kubelet")
    if is_asked and not at_once:
        wait_until_idle(cluster)
    cluster.runtime.kill()
    cluster.runtime.restart()
    if is_asked:
        cluster.wait_for_runtime()


def running(pod: GpuPod) -> str:
    """The process of its job, as the node numbers it."""
    (only,) = findings(pod.node, "--container", pod.path)["GPU processes"]
    return str(only["text"].removeprefix("process "))
