# SPDX-License-Identifier: Apache-2.0
"""A connection to a container runtime over the Container Runtime Interface (CRI): gRPC on a Unix
socket, and the messages that are used here.

Only the fields that are needed stand in the tables of messages; what else a message holds is
skipped when it is read. Their classes are made when they are first asked for: no code has to be
generated.

Sources: api.proto of k8s.io/cri-api, package runtime.v1, for field names and numbers; the kubelet's
own client (k8s.io/cri-client) and gRPC's documentation for paths, limits and codes. Needs the extra
`cri`.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace, TracebackType
from typing import Any, Self

from gpustasis.errors import EngineError, UnsupportedError
from gpustasis.runtimes import freezer
from gpustasis.text import extra

PACKAGE = "runtime.v1"
SERVICE = f"{PACKAGE}.RuntimeService"

RUNNING = 1  # ContainerState.CONTAINER_RUNNING
CONTAINER_STATES = ("created", "running", "exited", "unknown")  # by number of ContainerState

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
TASK_RUNNING, TASK_PAUSED = 2, 4  # Status of containerd.v1.types
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

CALL_TIMEOUT_S = 30.0  # of calls that only ask
_MESSAGE_LIMIT = 16 << 20  # bytes of one answer; the kubelet's own limit
_TEXT_LIMIT = 2000  # characters of a runtime's error that are shown
_PATH_LIMIT = 107  # bytes, unix(7)
_TICK_S = 0.1
DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
CANCELLED = "CANCELLED"
_NO_SUCH_METHOD = "UNIMPLEMENTED"


class CallError(EngineError):
    """The runtime answered a call with an error. code: gRPC's name of it, as UNIMPLEMENTED."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class Cri:
    """A runtime's CRI socket, open for the length of a with statement."""

    def __init__(
        self,
        address: str,
        tables: tuple[Table, Mapping[str, tuple[str, str]]] | None = None,
    ) -> None:
        """address: the socket's absolute path, or unix:// and that.

        tables: messages and methods to know instead of those of cri_messages.

        Raises EngineError if nobody listens there, UnsupportedError without the extra.
        """
        try:
            import grpc

            messages, self._methods = tables or (MESSAGES, METHODS)
            self.messages = message_classes(messages)
        except ImportError as exc:
            raise UnsupportedError(
                f"talking to a container runtime over CRI needs {exc.name}; {extra('cri')}"
            ) from exc
        self.path = socket_path(address)
        _try_to_connect(self.path)
        self._grpc = grpc
        self._channel = grpc.insecure_channel(  # a Unix socket: its mode is what guards it
            f"unix:{self.path}",
            options=[
                ("grpc.max_receive_message_length", _MESSAGE_LIMIT),
                ("grpc.enable_http_proxy", 0),
            ],
        )
        self._runtime = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._channel.close()

    def call(
        self,
        method: str,
        *,
        timeout_s: float = CALL_TIMEOUT_S,
        deadline: bool = True,
        stop: Callable[[], bool] = lambda: False,
        metadata: tuple[tuple[str, str], ...] = (),
        **fields: Any,
    ) -> Any:
        """Call a method of METHODS with these fields of its request; the answer as a message.

        A name that begins with / is a whole path, else a method of SERVICE. deadline: whether the
        runtime is told how long it has; if not, the call is cancelled after that long. stop: asked
        again and again whether to cancel it. (A signal's handler that raises an exception within
        gRPC can leave the channel useless.)

        Raises CallError; its code is DEADLINE_EXCEEDED after timeout_s, CANCELLED after a stop.
        """
        request, response = self._methods[method]
        rpc = self._channel.unary_unary(
            method if method.startswith("/") else f"/{SERVICE}/{method}",
            request_serializer=getattr(self.messages, request).SerializeToString,
            response_deserializer=getattr(self.messages, response).FromString,
        )
        message = getattr(self.messages, request)(**fields)
        pending = rpc.future(message, timeout=timeout_s if deadline else None, metadata=metadata)
        end = time.monotonic() + timeout_s
        try:
            while True:
                try:
                    return pending.result(_TICK_S)
                except self._grpc.FutureTimeoutError:
                    if stop():
                        raise CallError("interrupted", CANCELLED) from None
                    if not deadline and time.monotonic() >= end:
                        raise CallError(
                            f"no answer in {timeout_s:g} s", DEADLINE_EXCEEDED
                        ) from None
        except self._grpc.RpcError as exc:
            raise CallError(printable(exc.details() or "no reason given"), exc.code().name) from exc
        except BaseException:
            pending.cancel()
            raise

    def checkpoint(
        self, container_id: str, location: str, timeout_s: int, stop: Callable[[], bool]
    ) -> None:
        """CheckpointContainer into an archive at `location`, a few times within timeout_s if the
        container could not be frozen. stop: as in call. Raises CallError."""
        tries = freezer.Tries(timeout_s)
        while True:
            try:
                self.call(
                    "CheckpointContainer",
                    timeout_s=tries.left_s,
                    stop=stop,
                    deadline=False,  # containerd would kill runc then, and leave criu behind
                    container_id=container_id,
                    location=location,
                    timeout=tries.left_s,
                )
            except CallError as exc:
                if not freezer.was_not_frozen(str(exc)) or not tries.again(stop):
                    raise
            else:
                return

    def runtime(self, stop: Callable[[], bool] = lambda: False) -> str:
        """Name and version of what listens, as "containerd v2.1.9". stop: as in call. Raises
        EngineError."""
        if not self._runtime:
            try:
                answer = self.call("Version", stop=stop, version="v1")
            except CallError as exc:
                raise EngineError(f"{self.path}: {_no_version(exc)}") from exc
            self._runtime = printable(f"{answer.runtime_name} {answer.runtime_version}")
        return self._runtime


def socket_path(address: str) -> str:
    """Path of a socket's address. Raises EngineError if it is none."""
    path = address.removeprefix("unix://").removeprefix("unix:")
    if not path.startswith("/") or "\0" in path:
        raise EngineError(
            f"{address!r} is no address of a container runtime: give the absolute path of its "
            "socket, as /run/containerd/containerd.sock"
        )
    if len(path.encode()) > _PATH_LIMIT:
        raise EngineError(f"{path}: a socket's path has at most {_PATH_LIMIT} bytes")
    return path


def _try_to_connect(path: str) -> None:
    """gRPC says "unavailable" to whatever goes wrong here; the system call says what."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(CALL_TIMEOUT_S)
        try:
            probe.connect(path)
        except OSError as exc:
            advice = {
                errno.ENOENT: "; does the runtime run, and is this its socket? --address names it",
                errno.ENOTDIR: "; --address names the runtime's socket",
                errno.EACCES: "; the socket is root's: run this as root",
                errno.ECONNREFUSED: "; nobody listens there: does the runtime run?",
            }.get(exc.errno or 0, "")
            raise EngineError(f"cannot connect to {path}: {exc.strerror or exc}{advice}") from exc


def _no_version(error: CallError) -> str:
    if error.code == _NO_SUCH_METHOD:
        return (
            "what listens there does not speak CRI v1; if it is containerd, take cri out of "
            "disabled_plugins in its config.toml (packages made for Docker disable it)"
        )
    return f"the runtime does not say its version: {error} ({error.code})"


def printable(text: str) -> str:
    """What somebody else wrote, as one line that does nothing to a terminal."""
    line = " ".join(text.split())
    line = "".join(char if char.isprintable() else "?" for char in line)
    return line if len(line) <= _TEXT_LIMIT else f"{line[:_TEXT_LIMIT]} ..."


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
