# SPDX-License-Identifier: Apache-2.0
"""What users may do on the nodes of a KubernetesNode's cluster."""

from __future__ import annotations

from support.containerd_node import wait_for
from support.kubernetes_node import KubernetesNode


def wait_for_right(
    cluster: KubernetesNode, user: str, verb: str, resource: str, *, held: bool = True
) -> None:
    """Until the API server goes by a binding that was just made, or removed: it learns of both a
    moment later. resource: nodes/SUBRESOURCE."""
    name, subresource = resource.split("/")
    words = ("auth", "can-i", verb, name, "--subresource", subresource, "--as", user)
    wanted = "yes" if held else "no"

    def holds() -> bool:
        return cluster.kubectl(*words, check=False).stdout.split()[:1] == [wanted]

    said = f"{wanted!r} to whether {user} may {verb} {resource}"
    wait_for(holds, said, lambda: cluster.log("kube-apiserver"))
