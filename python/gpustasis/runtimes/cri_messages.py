"""The messages of the Container Runtime Interface (CRI) that are used here, as protobuf classes.

Source: api.proto of k8s.io/cri-api, package runtime.v1: field names and numbers. Only the fields that
are needed stand here; what else a message holds is skipped when it is read. The classes are made
from the table when they are first asked for, so that no code has to be generated.

Needs the extra `cri`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

PACKAGE = "runtime.v1"
SERVICE = f"{PACKAGE}.RuntimeService"

RUNNING = 1  # ContainerState.CONTAINER_RUNNING
CONTAINER_STATES = ("created", "running", "exited", "unknown")  # by number of ContainerState
POD_READY = 0  # PodSandboxState.SANDBOX_READY

Table = Mapping[str, Mapping[str, tuple[int, str]]]

# Message -> field -> (number, type). A type is a scalar's, "enum", a message of the table, or "map"
# for map<string, string>; "*" before it: repeated. An enum is read as the int32 it is on the wire.
MESSAGES: Table = {
    "VersionRequest": {"version": (1, "string")},
    "VersionResponse": {
        "version": (1, "string"),
        "runtime_name": (2, "string"),
        "runtime_version": (3, "string"),
        "runtime_api_version": (4, "string"),
    },
    "StatusRequest": {"verbose": (1, "bool")},
    "StatusResponse": {"info": (2, "map")},
    "ContainerMetadata": {"name": (1, "string"), "attempt": (2, "uint32")},
    "PodSandboxMetadata": {
        "name": (1, "string"),
        "uid": (2, "string"),
        "namespace": (3, "string"),
        "attempt": (4, "uint32"),
    },
    "ImageSpec": {"image": (1, "string"), "user_specified_image": (18, "string")},
    "Container": {
        "id": (1, "string"),
        "pod_sandbox_id": (2, "string"),
        "metadata": (3, "ContainerMetadata"),
        "image": (4, "ImageSpec"),
        "image_ref": (5, "string"),
        "state": (6, "enum"),
        "created_at": (7, "int64"),
        "labels": (8, "map"),
        "annotations": (9, "map"),
    },
    "ListContainersRequest": {},
    "ListContainersResponse": {"containers": (1, "*Container")},
    "PodSandbox": {
        "id": (1, "string"),
        "metadata": (2, "PodSandboxMetadata"),
        "state": (3, "enum"),
        "created_at": (4, "int64"),
    },
    "ListPodSandboxRequest": {},
    "ListPodSandboxResponse": {"items": (1, "*PodSandbox")},
    "CheckpointContainerRequest": {
        "container_id": (1, "string"),
        "location": (2, "string"),
        "timeout": (3, "int64"),
    },
    "CheckpointContainerResponse": {},
    # Of containerd's own API: api/services/tasks/v1/tasks.proto, api/types/task/task.proto.
    "TaskRequest": {"container_id": (1, "string")},
    "TaskProcess": {"pid": (3, "uint32"), "status": (4, "enum")},
    "GetTaskResponse": {"process": (1, "TaskProcess")},
    "ResumeTaskResponse": {},
}
TASK_PAUSED = 4  # Status.PAUSED of containerd.v1.types
GET_TASK = "/containerd.services.tasks.v1.Tasks/Get"
RESUME_TASK = "/containerd.services.tasks.v1.Tasks/Resume"
# Method -> (request, response), of SERVICE if it has no path.
METHODS: Mapping[str, tuple[str, str]] = {
    "Version": ("VersionRequest", "VersionResponse"),
    "Status": ("StatusRequest", "StatusResponse"),
    "ListContainers": ("ListContainersRequest", "ListContainersResponse"),
    "ListPodSandbox": ("ListPodSandboxRequest", "ListPodSandboxResponse"),
    "CheckpointContainer": ("CheckpointContainerRequest", "CheckpointContainerResponse"),
    GET_TASK: ("TaskRequest", "GetTaskResponse"),
    RESUME_TASK: ("TaskRequest", "ResumeTaskResponse"),
}


def message_classes(table: Table = MESSAGES) -> Any:
    """A namespace with one class for each message of `table`.

    They live in a pool of their own: other code's CRI messages in this process do no harm.
    """
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="cri.proto", package=PACKAGE, syntax="proto3")

    def set_type(field: Any, kind: str) -> None:
        if kind in table:
            field.type, field.type_name = kinds.TYPE_MESSAGE, f".{PACKAGE}.{kind}"
        else:
            field.type = getattr(kinds, f"TYPE_{'int32' if kind == 'enum' else kind}".upper())

    for name, fields in table.items():
        message = file.message_type.add(name=name)
        for field_name, (number, kind) in fields.items():
            field = message.field.add(name=field_name, number=number, label=kinds.LABEL_OPTIONAL)
            if kind == "map":
                entry = f"{''.join(word.capitalize() for word in field_name.split('_'))}Entry"
                field.label, field.type = kinds.LABEL_REPEATED, kinds.TYPE_MESSAGE
                field.type_name = f".{PACKAGE}.{name}.{entry}"
                nested = message.nested_type.add(name=entry)
                nested.options.map_entry = True
                for position, part in enumerate(("key", "value"), 1):
                    set_type(nested.field.add(name=part, number=position, label=1), "string")
                continue
            if kind.startswith("*"):
                field.label = kinds.LABEL_REPEATED
            set_type(field, kind.removeprefix("*"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return SimpleNamespace(
        **{
            name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))
            for name in table
        }
    )
