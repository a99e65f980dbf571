# SPDX-License-Identifier: Apache-2.0
"""Checkpoints through a real kubelet, asked directly and through a real API server."""

from __future__ import annotations

from pathlib import Path

from support.json_output import check_document
from support.kubernetes_node import NODE, PLACE, KubernetesNode


def archive_of(document: object) -> Path:
    assert isinstance(document, dict)
    (one,) = document["checkpoints"]
    assert one["ok"], one
    return Path(one["archive"])


def test_directly_over_tls(cluster: KubernetesNode) -> None:
    pod = cluster.job("direct", "--mib", "8")
    done = cluster.root.run(
        *("gpustasis", "kubelet", "checkpoint", "--json", "--node", "127.0.0.1"),
        *("--ca", PLACE / "ca.pem", "--cert", PLACE / "admin-client.pem"),
        *("--key", PLACE / "admin-client.key", pod.path),
    )
    archive = archive_of(check_document(done.stdout, "kubelet checkpoint"))
    assert "1 image whole" in cluster.root.run("gpustasis", "verify", archive).stdout
    pod.run_on()
    pod.delete()


def test_through_the_api_server(cluster: KubernetesNode) -> None:
    pod = cluster.job("proxied", "--mib", "8")
    done = cluster.root.run(
        *("gpustasis", "kubelet", "checkpoint", "--json", "--node", NODE),
        *("--kubeconfig", PLACE / "admin.conf", pod.path),
    )
    archive = archive_of(check_document(done.stdout, "kubelet checkpoint"))
    assert "1 image whole" in cluster.root.run("gpustasis", "verify", archive).stdout
    pod.run_on()
    pod.delete()
