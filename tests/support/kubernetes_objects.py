# SPDX-License-Identifier: Apache-2.0
"""Objects of the Kubernetes API that the tests make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from support.containerd_node import JOB_IMAGE

RESOURCE = "gpustasis.io/gpu"


def pod_of(
    name: str,
    namespace: str,
    args: Sequence[str] = (),
    image: str = JOB_IMAGE,
    mounts: Mapping[str, str] | None = None,
    spec: Mapping[str, Any] | None = None,
    **metadata: Any,
) -> Mapping[str, Any]:
    """A pod on the node's GPUs. mounts: path in its container -> path on the node.
    spec: more of the pod's. metadata: of the pod, annotations say."""
    places = list((mounts or {}).items())
    container = {
        "name": "job",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "args": list(args),
        "resources": {"limits": {RESOURCE: "1"}},
        "volumeMounts": [
            {"name": f"host-{number}", "mountPath": inside}
            for number, (inside, _) in enumerate(places)
        ],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, **metadata},
        "spec": {
            "containers": [container],
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "volumes": [
                {"name": f"host-{number}", "hostPath": {"path": outside}}
                for number, (_, outside) in enumerate(places)
            ],
            **(spec or {}),
        },
    }


def role(name: str, verb: str, *resources: str) -> Mapping[str, Any]:
    """A ClusterRole of one rule."""
    rule = {"apiGroups": [""], "resources": list(resources), "verbs": [verb]}
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": name},
        "rules": [rule],
    }


def binding(name: str, role_name: str, user: str) -> Mapping[str, Any]:
    """A ClusterRoleBinding of that role to a user."""
    group = "rbac.authorization.k8s.io"
    return {
        "apiVersion": f"{group}/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": name},
        "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": role_name},
        "subjects": [{"apiGroup": group, "kind": "User", "name": user}],
    }
