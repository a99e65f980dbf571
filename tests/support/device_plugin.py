# SPDX-License-Identifier: Apache-2.0
"""A device plugin of the kubelet: it hands out a node's emulated GPUs by CDI, as GPU vendors' do.

As a program on a node, until it is killed:

    python device_plugin.py RESOURCE CDI-DEVICE COUNT

Source: api.proto of k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from gpustasis.runtimes.cri import Table, message_classes

DIRECTORY = Path("/var/lib/kubelet/device-plugins")
ENDPOINT = "gpustasis-emulator.sock"
_VERSION = "v1beta1"
_POLL_S = 0.2
_REGISTER_S = 60.0
_MESSAGES: Table = {
    "Empty": {},
    "DevicePluginOptions": {"pre_start_required": (1, "bool")},
    "RegisterRequest": {
        "version": (1, "string"),
        "endpoint": (2, "string"),
        "resource_name": (3, "string"),
    },
    "Device": {"ID": (1, "string"), "health": (2, "string")},
    "ListAndWatchResponse": {"devices": (1, "*Device")},
    "ContainerAllocateRequest": {"devices_ids": (1, "*string")},
    "AllocateRequest": {"container_requests": (1, "*ContainerAllocateRequest")},
    "CDIDevice": {"name": (1, "string")},
    "ContainerAllocateResponse": {"cdi_devices": (5, "*CDIDevice")},
    "AllocateResponse": {"container_responses": (1, "*ContainerAllocateResponse")},
}
_CLASSES = message_classes(_MESSAGES)


def _list(device: str, count: int) -> Any:
    devices = [{"ID": f"{device}-{number}", "health": "Healthy"} for number in range(count)]
    return _CLASSES.ListAndWatchResponse(devices=devices)


def _serve(device: str, count: int) -> grpc.Server:
    def options(request: Any, context: Any) -> Any:
        return _CLASSES.DevicePluginOptions()

    def list_and_watch(request: Any, context: Any) -> Iterator[Any]:
        yield _list(device, count)
        threading.Event().wait()  # nothing changes

    def allocate(request: Any, context: Any) -> Any:
        each = {"cdi_devices": [{"name": device}]}
        return _CLASSES.AllocateResponse(
            container_responses=[each] * len(request.container_requests)
        )

    def handler(kind: Any, answer: Any, asked: str) -> Any:
        return kind(
            answer,
            request_deserializer=getattr(_CLASSES, asked).FromString,
            response_serializer=lambda message: message.SerializeToString(),
        )

    one, many = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
    methods = {
        "GetDevicePluginOptions": handler(one, options, "Empty"),
        "ListAndWatch": handler(many, list_and_watch, "Empty"),
        "Allocate": handler(one, allocate, "AllocateRequest"),
    }
    server = grpc.server(ThreadPoolExecutor(8))
    service = grpc.method_handlers_generic_handler(f"{_VERSION}.DevicePlugin", methods)
    server.add_generic_rpc_handlers((service,))
    place = DIRECTORY / ENDPOINT
    place.unlink(missing_ok=True)
    server.add_insecure_port(f"unix:{place}")
    server.start()
    return server


def _register(resource: str) -> None:
    with grpc.insecure_channel(f"unix:{DIRECTORY / 'kubelet.sock'}") as channel:
        register = channel.unary_unary(
            f"/{_VERSION}.Registration/Register",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=_CLASSES.Empty.FromString,
        )
        request = _CLASSES.RegisterRequest(
            version=_VERSION, endpoint=ENDPOINT, resource_name=resource
        )
        register(request, timeout=_REGISTER_S, wait_for_ready=True)


def main() -> None:
    resource, device, count = sys.argv[1:4]
    registered = -1
    server = None
    while True:
        # A kubelet that starts removes all sockets and forgets who was there.
        if (kubelet := _kubelet()) not in (None, registered):
            if server is not None:
                server.stop(None).wait()
            server = _serve(device, int(count))
            try:
                _register(resource)
            except grpc.RpcError as error:  # it ended meanwhile, say; the next look tries again
                print(f"not registered: {error}", flush=True)
            else:
                registered = kubelet
                print("registered", flush=True)
        time.sleep(_POLL_S)


def _kubelet() -> int | None:
    """Which kubelet it is that runs, by its socket's inode; None: none does."""
    try:
        return (DIRECTORY / "kubelet.sock").stat().st_ino
    except FileNotFoundError:
        return None


if __name__ == "__main__":
    main()
