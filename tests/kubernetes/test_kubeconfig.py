# SPDX-License-Identifier: Apache-2.0
"""`gpustasis kubelet checkpoint` with kubeconfig files: a real API server lets in each kind of user
that they can have. What else may stand in such files: tests/python/test_kubeconfig.py."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.gpu_pod import GpuPod
from support.kubernetes_node import ADMIN, API_SERVER, NODE, KubernetesNode
from support.kubernetes_objects import PLACE
from support.rights import wait_for_right

pytestmark = pytest.mark.usefixtures("tidy")

HOME = Path("/srv/automat")
PLUGIN = """#!/bin/sh
echo '{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential",'
echo '"status": {"token": "'"$(cat "$(dirname "$0")/token")"'"}}'
"""
User = dict[str, Any]


@pytest.fixture(scope="module")
def pod(cluster: KubernetesNode) -> GpuPod:
    return cluster.job("by-kubeconfig", "--mib", "2")


@pytest.fixture(scope="module")
def files(cluster: KubernetesNode) -> dict[str, str]:
    """Content of what lies in HOME: `token` of a service account that may do all, and the
    certificate of one who may."""
    cluster.kubectl("create", "serviceaccount", "automat")
    words = ("--clusterrole", "cluster-admin", "--serviceaccount", "default:automat")
    cluster.kubectl("create", "clusterrolebinding", "automat", *words)
    wait_for_right(cluster, "system:serviceaccount:default:automat", "create", "nodes/checkpoint")
    made = {"token": cluster.kubectl("create", "token", "automat").stdout}
    for name in ("pem", "key"):
        made[name] = cluster.root.path(PLACE / f"admin-client.{name}").read_text()
    for name, content in made.items():
        cluster.root.write(HOME / name, content, 0o600)
    cluster.root.write(HOME / "plugin", PLUGIN, 0o755)
    return made


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


@pytest.mark.parametrize(
    "user_of",
    [
        lambda files: {"token": files["token"].strip()},
        lambda files: {"tokenFile": "token", "token": "of-before"},
        lambda files: {"client-certificate": "pem", "client-key": "key"},
        lambda files: {
            "client-certificate-data": encoded(files["pem"]),
            "client-key-data": encoded(files["key"]),
        },
        lambda files: {
            "exec": {
                "apiVersion": "client.authentication.k8s.io/v1",
                "command": "./plugin",
                "interactiveMode": "Never",
            }
        },
    ],
    ids=["token", "token file", "certificate beside it", "certificate in it", "exec plugin"],
)
def test_every_kind_of_user(
    cluster: KubernetesNode,
    pod: GpuPod,
    files: dict[str, str],
    user_of: Callable[[dict[str, str]], User],
) -> None:
    """Its file comes first; server, CA and context are in another."""
    name = "tests"
    context = {"cluster": name, "user": "automat"}
    mine = {
        "users": [{"name": "automat", "user": user_of(files)}],
        "contexts": [{"name": "automat", "context": context}],
    }
    cluster.root.write(HOME / "config", json.dumps(mine), 0o600)
    done = cluster.root.run(
        *("gpustasis", "kubelet", "checkpoint", "--json", "--context", "automat"),
        f"{pod.path}@{NODE}",
        environ={"KUBECONFIG": f"{HOME}/gone:{HOME}/config:{ADMIN}"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (one,) = json.loads(done.stdout)["checkpoints"]
    assert one["ok"] and one["node"] == NODE


def test_a_token_that_the_server_does_not_know(cluster: KubernetesNode, pod: GpuPod) -> None:
    config = json.loads(cluster.root.path(ADMIN).read_text())
    assert config["clusters"][0]["cluster"]["server"] == API_SERVER
    config["users"][0]["user"] = {"token": "another"}
    cluster.root.write(HOME / "config", json.dumps(config), 0o600)
    words = ("gpustasis", "kubelet", "checkpoint", "--kubeconfig", HOME / "config", "--node", NODE)
    done = cluster.root.run(*words, pod.path, check=False)
    assert done.returncode == 16
    assert "(401): the token is not accepted: an API server accepts it?" in done.stderr
