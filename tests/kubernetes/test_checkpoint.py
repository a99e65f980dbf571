# SPDX-License-Identifier: Apache-2.0
"""Checkpoints through a real kubelet, asked directly and through a real API server."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.json_output import check_document
from support.kubernetes_node import NODE, PLACE, KubernetesNode

pytestmark = pytest.mark.usefixtures("tidy")


def test_directly_over_tls(cluster: KubernetesNode) -> None:
    pod = cluster.job("direct", "--mib", "8")
    archive = cluster.checkpoint(pod)
    assert "1 image whole" in cluster.root.run("gpustasis", "verify", archive).stdout
    pod.run_on()
    pod.delete()


def test_through_the_api_server(cluster: KubernetesNode) -> None:
    pod = cluster.job("proxied", "--mib", "8")
    done = cluster.root.run(
        *("gpustasis", "kubelet", "checkpoint", "--json", "--node", NODE),
        *("--kubeconfig", PLACE / "admin.conf", pod.path),
    )
    (one,) = check_document(done.stdout, "kubelet checkpoint")["checkpoints"]
    assert one["ok"], one
    archive = Path(one["archives"][0])
    assert "1 image whole" in cluster.root.run("gpustasis", "verify", archive).stdout
    pod.run_on()
    pod.delete()
