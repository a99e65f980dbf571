# SPDX-License-Identifier: Apache-2.0
"""Pods that are ranks of a job, on a node with CRI-O: a kubelet's checkpoints of all of them are
one of the job, and one alone is none."""

from __future__ import annotations

import pytest

from support.container_ranks import Node, log_of_agent
from support.containerd_node import wait_for
from support.kubernetes_node import KubernetesNode

pytestmark = [pytest.mark.usefixtures("tidy"), pytest.mark.with_crio]

LOOK_S = 40
TIMEOUT_S = 180.0  # of a checkpoint of the job


def test_two_pods_are_in_it_or_none_is(cluster: KubernetesNode) -> None:
    node = Node(cluster.root, "pods", LOOK_S, installed=True)
    try:
        node.start_agent()
        pods = [
            cluster.job(
                f"rank-{rank}",
                *("--mib", "8"),
                annotations={
                    "io.gpustasis.job": "pods",
                    "io.gpustasis.rank": str(rank),
                    "io.gpustasis.world": "2",
                },
            )
            for rank in range(2)
        ]
        begun = [cluster.begin_checkpoint(pod) for pod in pods]
        for client in begun:
            wait_for(lambda client=client: client.poll() is not None, "end", cluster.log, TIMEOUT_S)
            assert client.poll() == 0, client.said() + log_of_agent(node)
        for pod in pods:
            pod.run_on()
        alone = cluster.begin_checkpoint(pods[0])
        wait_for(lambda: alone.poll() is not None, "end", cluster.log, TIMEOUT_S)
        assert alone.poll() != 0
        assert "epoch 2 is aborted: phase look took too long" in alone.said(), alone.said()
        for pod in pods:
            pod.run_on()
        states = [one["state"] for one in node.job("list", "pods")["epochs"]]
        assert states == ["committed", "aborted"]
        whole = node.job("checkpoint", "pods", "--leave-running")
        assert whole["epoch"] == 3
        for pod in pods:
            pod.run_on()
    finally:
        node.close()
