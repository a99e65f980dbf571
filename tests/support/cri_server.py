# SPDX-License-Identifier: Apache-2.0
"""A container runtime that only answers: CRI on a Unix socket, for what no real one can be made to
do.

Its answers are functions; a method that has none is answered UNIMPLEMENTED, by gRPC itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

from gpustasis.runtimes.cri import (
    GET_TASK,
    METHODS,
    RESUME_TASK,
    RUNNING,
    SERVICE,
    TASK_PAUSED,
    TASK_RUNNING,
    message_classes,
)

MESSAGES = message_classes()
POD = "p" * 64
ONE, TWO, DEAD = "1" * 64, "12" * 32, "dead" * 16
EXITED = 2  # ContainerState.CONTAINER_EXITED
CONTAINERS = {ONE: RUNNING, TWO: RUNNING, DEAD: EXITED}

# (request, context) -> fields of the response
Answer = Callable[[Any, Any], Mapping[str, object]]


class CriServer:
    """It listens at `path` for the length of a with statement. answers: by method."""

    def __init__(self, path: Path, answers: Mapping[str, Answer]) -> None:
        self.path = path
        self._server = grpc.server(ThreadPoolExecutor(4))
        by_service: dict[str, dict[str, Any]] = {}
        for method, answer in answers.items():
            request, response = METHODS[method]
            handler = grpc.unary_unary_rpc_method_handler(
                _handle(answer, getattr(MESSAGES, response)),
                request_deserializer=getattr(MESSAGES, request).FromString,
                response_serializer=getattr(MESSAGES, response).SerializeToString,
            )
            whole = method if method.startswith("/") else f"/{SERVICE}/{method}"
            _, service, name = whole.split("/")
            by_service.setdefault(service, {})[name] = handler
        self._server.add_generic_rpc_handlers(
            tuple(
                grpc.method_handlers_generic_handler(service, handlers)
                for service, handlers in by_service.items()
            )
        )
        self._server.add_insecure_port(f"unix:{path}")

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.stop(0).wait()


def _handle(answer: Answer, response: Any) -> Callable[[Any, Any], Any]:
    return lambda request, context: response(**answer(request, context))


def inventory(runtime: str, version: str, containers: Mapping[str, int]) -> dict[str, Answer]:
    """Answers of a runtime that runs these containers, id -> state, in the pod default/web."""
    pod = {"id": POD, "metadata": {"name": "web", "namespace": "default"}}
    listed = [
        {
            "id": identifier,
            "pod_sandbox_id": POD,
            "metadata": {"name": f"c{number}"},
            "state": state,
        }
        for number, (identifier, state) in enumerate(containers.items())
    ]
    return {
        "Version": lambda request, context: {
            "runtime_name": runtime,
            "runtime_version": version,
        },
        "ListPodSandbox": lambda request, context: {"items": [pod]},
        "ListContainers": lambda request, context: {"containers": listed},
    }


def refuse(code: grpc.StatusCode, details: str) -> Answer:
    def answer(request: Any, context: Any) -> dict[str, object]:
        context.abort(code, details)
        raise AssertionError("abort raises")

    return answer


class Paused:
    """A runtime whose container stands still once a checkpoint was begun, until it is resumed."""

    def __init__(self) -> None:
        self.paused = False
        self.begun = threading.Event()
        self.ended = threading.Event()

    def answers(self) -> dict[str, Answer]:
        def never(request: Any, context: Any) -> dict[str, object]:
            self.paused = True
            self.begun.set()
            self.ended.wait(60)
            return {}

        def get(request: Any, context: Any) -> dict[str, object]:
            metadata = dict(context.invocation_metadata())
            assert metadata["containerd-namespace"] == "k8s.io"
            return {"process": {"status": TASK_PAUSED if self.paused else TASK_RUNNING}}

        def resume(request: Any, context: Any) -> dict[str, object]:
            self.paused = False
            return {}

        known = inventory("containerd", "v2.1.9", CONTAINERS)
        return known | {"CheckpointContainer": never, GET_TASK: get, RESUME_TASK: resume}
