# SPDX-License-Identifier: Apache-2.0
"""The messages and methods of CRI that a kubelet needs beyond those the package uses.

Source: api.proto of k8s.io/cri-api, package runtime.v1.
"""

from __future__ import annotations

from gpustasis.runtimes.cri import MESSAGES, METHODS, PACKAGE, Table

NODE_NETWORK = 2  # NamespaceMode.NODE

NODE_MESSAGES: Table = {
    **MESSAGES,
    "NamespaceOption": {"network": (1, "enum"), "pid": (2, "enum"), "ipc": (3, "enum")},
    "LinuxSandboxSecurityContext": {"namespace_options": (1, "NamespaceOption")},
    "LinuxPodSandboxConfig": {"security_context": (2, "LinuxSandboxSecurityContext")},
    "PodSandboxConfig": {
        "metadata": (1, "PodSandboxMetadata"),
        "hostname": (2, "string"),
        "log_directory": (3, "string"),
        "labels": (6, "map"),
        "annotations": (7, "map"),
        "linux": (8, "LinuxPodSandboxConfig"),
    },
    "RunPodSandboxRequest": {"config": (1, "PodSandboxConfig")},
    "RunPodSandboxResponse": {"pod_sandbox_id": (1, "string")},
    "KeyValue": {"key": (1, "string"), "value": (2, "string")},
    "Mount": {"container_path": (1, "string"), "host_path": (2, "string"), "readonly": (3, "bool")},
    "CDIDevice": {"name": (1, "string")},
    "LinuxContainerSecurityContext": {"namespace_options": (3, "NamespaceOption")},
    "LinuxContainerConfig": {"security_context": (2, "LinuxContainerSecurityContext")},
    "ContainerConfig": {
        "metadata": (1, "ContainerMetadata"),
        "image": (2, "ImageSpec"),
        "command": (3, "*string"),
        "args": (4, "*string"),
        "envs": (6, "*KeyValue"),
        "mounts": (7, "*Mount"),
        "labels": (9, "map"),
        "annotations": (10, "map"),
        "log_path": (11, "string"),
        "linux": (15, "LinuxContainerConfig"),
        "CDI_devices": (17, "*CDIDevice"),
    },
    "CreateContainerRequest": {
        "pod_sandbox_id": (1, "string"),
        "config": (2, "ContainerConfig"),
        "sandbox_config": (3, "PodSandboxConfig"),
    },
    "CreateContainerResponse": {"container_id": (1, "string")},
    "StartContainerRequest": {"container_id": (1, "string")},
    "StopContainerRequest": {"container_id": (1, "string"), "timeout": (2, "int64")},
    "RemoveContainerRequest": {"container_id": (1, "string")},
    "PullImageRequest": {"image": (1, "ImageSpec")},
    "PullImageResponse": {"image_ref": (1, "string")},
    "Nothing": {},
}
NODE_METHODS = {
    **METHODS,
    "RunPodSandbox": ("RunPodSandboxRequest", "RunPodSandboxResponse"),
    "CreateContainer": ("CreateContainerRequest", "CreateContainerResponse"),
    "StartContainer": ("StartContainerRequest", "Nothing"),
    "StopContainer": ("StopContainerRequest", "Nothing"),
    "RemoveContainer": ("RemoveContainerRequest", "Nothing"),
    f"/{PACKAGE}.ImageService/PullImage": ("PullImageRequest", "PullImageResponse"),
}
