# SPDX-License-Identifier: Apache-2.0
"""The node itself: a pod with a GPU runs on it."""

from __future__ import annotations

import pytest

from support.kubernetes_node import KubernetesNode

pytestmark = pytest.mark.usefixtures("tidy")

START_S = 60.0


def test_it_starts_in_time(cluster: KubernetesNode) -> None:
    assert cluster.seconds_to_start < START_S


def test_a_pod_gets_a_gpu_by_cdi(cluster: KubernetesNode) -> None:
    pod = cluster.job("first", "--mib", "4")
    assert pod.status()["containerStatuses"][0]["restartCount"] == 0
    pod.delete()
