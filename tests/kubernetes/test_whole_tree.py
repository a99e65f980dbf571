# SPDX-License-Identifier: Apache-2.0
"""A pod with a tree of fifty processes (tests/programs/whole_tree.c) goes on in another pod, to the
bit."""

from __future__ import annotations

import copy
import shutil
import tarfile
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from gpustasis._core import PACK_NAME, PARENT_LINK, SEALED_NAME
from gpustasis.criu.plugin import Setting, format_config
from support.certificates import Pair
from support.containerd_node import wait_for
from support.gpu_pod import GpuPod
from support.kubernetes_node import KubernetesNode
from support.kubernetes_objects import pod_of
from support.recipients import make_recipient
from support.restored_pod import mounts_to_name, push
from support.whole_tree import FLAGS, PROGRAM, ROUND_S, WAYS, rounds_said

pytestmark = pytest.mark.usefixtures("tidy")

CONFIG = "/etc/gpustasis/config.toml"
MINE = "/etc/gpustasis/mine"
# Each container has a tmpfs there, which belongs to it alone.
ARGUMENTS = (f"/data/{PROGRAM.stem}", "--disk", "/tmp", "--tmpfs", "/dev")


@pytest.fixture(scope="module")
def program(compile_cuda: Callable[..., Path], shared: Path) -> Path:
    return Path(shutil.copy(compile_cuda(PROGRAM, *FLAGS), shared / PROGRAM.stem))


@pytest.fixture
def me(cluster: KubernetesNode, tmp_path: Path) -> Pair:
    """Paths on the node."""
    pair = make_recipient(tmp_path)
    cluster.root.write(f"{MINE}.pem", pair.certificate.read_text())
    cluster.root.write(f"{MINE}.key", pair.key.read_text(), 0o600)
    return Pair(Path(f"{MINE}.pem"), Path(f"{MINE}.key"))


@pytest.fixture
def config(cluster: KubernetesNode) -> Iterator[Callable[..., None]]:
    """config(keys): more of the node's configuration, until the test has ended."""
    before = cluster.config()
    yield lambda keys: cluster.root.write(CONFIG, before + "\n" + format_config(keys))
    cluster.root.write(CONFIG, before)


def tree_pod(cluster: KubernetesNode, name: str, program: Path, **more: str) -> Mapping[str, Any]:
    mounts = mounts_to_name(cluster) if more else {}
    pod = copy.deepcopy(
        pod_of(name, "default", mounts={**mounts, "/data": str(program.parent)}, **more)
    )
    (container,) = pod["spec"]["containers"]
    del container["args"]
    container["command"] = list(ARGUMENTS)
    return pod


def rounds(pod: GpuPod, since: str = "") -> list[int]:
    """In which all of it was right, said from that moment on."""
    return rounds_said(line.split(" ", 3)[3] for line in pod.lines() if line >= since)


def run_on(pod: GpuPod) -> None:
    seen = rounds(pod)[-1]
    wait_for(lambda: rounds(pod)[-1] > seen + 1, "rounds after it", pod.story, ROUND_S)


@pytest.mark.parametrize("way", ["plain", "packed-ours", "sealed", "sealed-incremental"])
def test_in_another_pod(
    cluster: KubernetesNode, program: Path, config: Callable[..., None], me: Pair, way: str
) -> None:
    how = WAYS[way]
    keys: dict[str, Setting] = dict(how.config)
    if how.sealed:
        keys |= {"recipients": [str(me.certificate)], "private_key": str(me.key)}
    config(keys | ({"incremental": True} if how.earlier else {}))
    cluster.apply(tree_pod(cluster, f"tree-{way}", program))
    pod = GpuPod(cluster, f"tree-{way}", "default")
    pod.wait_for_start()
    wait_for(lambda: len(rounds(pod)) > 1, "rounds of the first", pod.story, ROUND_S)
    for _ in range(how.earlier):
        cluster.checkpoint(pod)
        run_on(pod)
    archive = cluster.checkpoint(pod)
    with tarfile.open(cluster.root.path(archive)) as tar:
        names = {Path(name).name for name in tar.getnames()}
    assert (PACK_NAME in names) == (how.config.get("layout") == "packed")
    assert (SEALED_NAME in names) == how.sealed
    assert (PARENT_LINK in names) == bool(how.earlier)
    run_on(pod)
    last = rounds(pod)[-1]
    pod.delete()

    image, _ = push(cluster, archive, f"tree-{way}")
    moment = datetime.now(UTC).isoformat()
    cluster.apply(tree_pod(cluster, f"again-{way}", program, image=image))
    again = GpuPod(cluster, f"again-{way}", "default")
    again.wait_for_start()
    wait_for(lambda: len(rounds(again, moment)) > 2, "rounds there", again.story, ROUND_S)
    assert 2 < rounds(again, moment)[0] <= last  # from where it was, not from the beginning
    assert again.status()["containerStatuses"][0]["restartCount"] == 0
    again.delete()
