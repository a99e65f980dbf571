# SPDX-License-Identifier: Apache-2.0
"""Who may have a container checkpointed: with each right that docs/operating.md names, and
without it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from support.certificates import Authority
from support.gpu_pod import GpuPod
from support.kubernetes_node import ADDRESS, API_SERVER, NODE, SERVER_USER, KubernetesNode
from support.kubernetes_objects import PLACE, binding, role
from support.rights import wait_for_right

pytestmark = pytest.mark.usefixtures("tidy")

# The caller's user, what its role allows, and how it asks.
PROXY = ("--api-server", API_SERVER, "--node", NODE)
DIRECT = ("--node", ADDRESS)
CHECKPOINT = ("create", "nodes/checkpoint")  # what a checkpoint needs of a kubelet


@pytest.fixture(scope="module")
def pod(cluster: KubernetesNode) -> GpuPod:
    return cluster.job("guarded", "--mib", "2")


def ask(
    cluster: KubernetesNode, pod: GpuPod, user: str, *words: str
) -> subprocess.CompletedProcess[str]:
    """With a service account's token, as users do."""
    made = cluster.kubectl("create", "token", user, "--namespace", "default")
    cluster.root.write(f"/tmp/{user}.token", made.stdout, 0o600)
    return cluster.root.run(
        *("gpustasis", "kubelet", "checkpoint", "--ca", PLACE / "ca.pem"),
        *("--token-file", f"/tmp/{user}.token", *words, pod.path),
        check=False,
    )


def account(cluster: KubernetesNode, user: str, verb: str, resource: str) -> None:
    """A service account whose one right is this."""
    bound = {**binding(user, user, user)}
    bound["subjects"] = [{"kind": "ServiceAccount", "name": user, "namespace": "default"}]
    metadata = {"name": user, "namespace": "default"}
    cluster.apply(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
        role(user, verb, resource),
        bound,
    )
    wait_for_right(cluster, f"system:serviceaccount:default:{user}", verb, resource)


@pytest.mark.parametrize(
    ("verb", "resource", "way"),
    [("create", "nodes/checkpoint", DIRECT), ("create", "nodes/proxy", PROXY)],
    ids=["direct", "through the API server"],
)
def test_the_right_that_is_named_is_enough(
    cluster: KubernetesNode, pod: GpuPod, verb: str, resource: str, way: tuple[str, ...]
) -> None:
    user = "may-" + resource.replace("/", "-")
    account(cluster, user, verb, resource)
    done = ask(cluster, pod, user, *way)
    assert done.returncode == 0, done.stderr
    pod.run_on()


@pytest.mark.parametrize(
    ("verb", "resource", "way", "missing"),
    [
        ("get", "nodes/checkpoint", DIRECT, "verb create on nodes/checkpoint"),
        ("create", "nodes/log", DIRECT, "verb create on nodes/checkpoint"),
        ("get", "nodes/proxy", PROXY, "verb create on nodes/proxy"),
        ("create", "nodes/checkpoint", PROXY, "verb create on nodes/proxy"),
    ],
)
def test_one_verb_or_resource_less_is_refused_and_named(
    cluster: KubernetesNode,
    pod: GpuPod,
    verb: str,
    resource: str,
    way: tuple[str, ...],
    missing: str,
) -> None:
    way_name = "proxied" if way == PROXY else "direct"
    user = f"{verb}-{resource.replace('/', '-')}-{way_name}"
    account(cluster, user, verb, resource)
    done = ask(cluster, pod, user, *way)
    assert done.returncode == 16
    assert "(403)" in done.stderr and missing in done.stderr, done.stderr
    pod.run_on()


def test_an_api_server_that_may_not_is_told_from_a_caller_that_may_not(
    cluster: KubernetesNode, pod: GpuPod
) -> None:
    account(cluster, "caller", "create", "nodes/proxy")
    cluster.kubectl("delete", "clusterrolebinding", "kubelet-checkpoint")
    try:
        wait_for_right(cluster, SERVER_USER, *CHECKPOINT, held=False)
        done = ask(cluster, pod, "caller", *PROXY)
    finally:
        cluster.apply(binding("kubelet-checkpoint", "kubelet-checkpoint", SERVER_USER))
        wait_for_right(cluster, SERVER_USER, *CHECKPOINT)
    assert done.returncode == 16
    assert "the kubelet refuses" in done.stderr and SERVER_USER in done.stderr, done.stderr


@pytest.mark.parametrize("way", [DIRECT, PROXY], ids=["direct", "through the API server"])
def test_a_token_that_nobody_has_given(
    cluster: KubernetesNode, pod: GpuPod, way: tuple[str, ...]
) -> None:
    cluster.root.write("/tmp/false.token", "a-token", 0o600)
    done = cluster.root.run(
        *("gpustasis", "kubelet", "checkpoint", "--ca", PLACE / "ca.pem"),
        *("--token-file", "/tmp/false.token", *way, pod.path),
        check=False,
    )
    assert done.returncode == 16
    assert "(401): the token is not accepted" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("known", "said"),
    [(True, "user=visitor"), (False, "(401): the client's certificate is not accepted")],
)
def test_a_client_by_its_certificate(
    cluster: KubernetesNode, pod: GpuPod, tmp_path: Path, known: bool, said: str
) -> None:
    """One whom the CA knows and nobody has allowed anything; and one whom another CA knows."""
    authority = cluster.authority if known else Authority(tmp_path)
    pair = authority.client("visitor")
    cluster.root.write("/tmp/visitor.pem", pair.certificate.read_text() + pair.key.read_text())
    done = cluster.root.run(
        *("gpustasis", "kubelet", "checkpoint", "--ca", PLACE / "ca.pem"),
        *("--cert", "/tmp/visitor.pem", *DIRECT, pod.path),
        check=False,
    )
    assert done.returncode == 16 and said in done.stderr, done.stderr
