# SPDX-License-Identifier: Apache-2.0
"""Objects of the Kubernetes API that the tests make, and how the node is configured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from support.containerd_node import JOB_IMAGE

RESOURCE = "gpustasis.io/gpu"
PLACE = Path("/etc/kubernetes")
ETCD = "http://127.0.0.1:2379"
API_SERVER_WORDS = (
    *("--etcd-servers", ETCD, "--bind-address", "127.0.0.1", "--secure-port", "6443"),
    *("--advertise-address", "127.0.0.1", "--endpoint-reconciler-type", "none"),
    *("--service-cluster-ip-range", "10.96.0.0/24", "--allow-privileged"),
    *("--authorization-mode", "Node,RBAC", "--client-ca-file", PLACE / "ca.pem"),
    *("--tls-cert-file", PLACE / "server.pem"),
    *("--tls-private-key-file", PLACE / "server.key"),
    *("--kubelet-certificate-authority", PLACE / "ca.pem"),
    *("--kubelet-client-certificate", PLACE / "apiserver.pem"),
    *("--kubelet-client-key", PLACE / "apiserver.key"),
    *("--kubelet-preferred-address-types", "InternalIP"),
    *("--service-account-issuer", "https://kubernetes.default.svc"),
    *("--service-account-key-file", PLACE / "accounts.pub"),
    *("--service-account-signing-key-file", PLACE / "accounts.key"),
)
NETWORK = {
    "cniVersion": "1.0.0",
    "name": "pods",
    "plugins": [
        {
            "type": "bridge",
            "bridge": "cni0",
            "isGateway": True,
            "ipam": {"type": "host-local", "subnet": "10.88.0.0/24"},
        }
    ],
}
KUBELET = {
    "apiVersion": "kubelet.config.k8s.io/v1beta1",
    "kind": "KubeletConfiguration",
    "authentication": {
        "anonymous": {"enabled": False},
        "webhook": {"enabled": True},
        "x509": {"clientCAFile": str(PLACE / "ca.pem")},
    },
    # Else a right that was taken away would hold for five minutes more.
    "authorization": {
        "mode": "Webhook",
        "webhook": {"cacheAuthorizedTTL": "1ms", "cacheUnauthorizedTTL": "1ms"},
    },
    "cgroupDriver": "cgroupfs",
    "failCgroupV1": False,
    "failSwapOn": False,
    "resolvConf": "",
    "oomScoreAdj": 0,
    "tlsCertFile": str(PLACE / "kubelet.pem"),
    "tlsPrivateKeyFile": str(PLACE / "kubelet.key"),
    "localStorageCapacityIsolation": False,
    "evictionHard": {"memory.available": "50Mi"},
    "imageMinimumGCAge": "24h",
    "imageGCHighThresholdPercent": 100,
    "nodeStatusUpdateFrequency": "2s",
    # By itself a kubelet looks at a pod once in 60 to 90 s. One that containerd was started anew
    # under would then kill and replace a paused container, in one of ten tests of that.
    "syncFrequency": "1h0m0s",
    "featureGates": {"KubeletInUserNamespace": True},
}


def is_ready(status: Mapping[str, Any], since: float) -> bool:
    """Whether a kubelet has said so after that second: a node's status outlives its kubelet."""
    for one in status.get("conditions", ()):
        if one["type"] == "Ready" and one["status"] == "True":
            return datetime.fromisoformat(one["lastHeartbeatTime"]).timestamp() > since
    return False


def kubeconfig(server: str, stem: str) -> Mapping[str, Any]:
    """A kubeconfig file for who has the certificate and the key of that name in PLACE."""
    user = {
        "client-certificate": str(PLACE / f"{stem}.pem"),
        "client-key": str(PLACE / f"{stem}.key"),
    }
    cluster = {"server": server, "certificate-authority": str(PLACE / "ca.pem")}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "tests", "cluster": cluster}],
        "users": [{"name": stem, "user": user}],
        "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": stem}}],
        "current-context": "tests",
    }


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


def set_of(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    """A ReplicaSet that sees to it that there always is one such pod; it is named as the pod."""
    name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
    labels = {"set": name}
    template = {
        "metadata": {"labels": labels, **pod["metadata"]},
        "spec": pod["spec"],
    }
    del template["metadata"]["name"], template["metadata"]["namespace"]
    return {
        "apiVersion": "apps/v1",
        "kind": "ReplicaSet",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"selector": {"matchLabels": labels}, "template": template},
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
