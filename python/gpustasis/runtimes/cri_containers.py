# SPDX-License-Identifier: Apache-2.0
"""Containers that containerd or CRI-O has: which there are, which of them stand still, and having
one run on.

Source: containerd 2.1, api/services/tasks/v1; CRI-O 1.36, which has no such calls: its containers'
control groups say which are paused.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpustasis.errors import EngineError
from gpustasis.files import open_own_directory
from gpustasis.runtimes.cri import (
    CALL_TIMEOUT_S,
    CONTAINER_STATES,
    GET_TASK,
    RESUME_TASK,
    RUNNING,
    TASK_PAUSED,
    TASK_RUNNING,
    CallError,
    Cri,
    printable,
)
from gpustasis.runtimes.crio import CRIO_NAME, unpause
from gpustasis.runtimes.freezer import frozen_groups, thaw
from gpustasis.runtimes.instance import require_sight_of_server
from gpustasis.task import open_files

_RUNNING = CONTAINER_STATES[RUNNING]
# A containerd that was started anew takes a paused container for one in an unknown state.
PERHAPS_PAUSED = (_RUNNING, "unknown")
CRIU, CRIO = "criu", "crio"  # processes that are at a checkpoint, by name
SETTLE_S = 0.5  # there are moments between two steps of a checkpoint
# conmon's, of a container: CRI-O has it open for as long as somebody is attached to that.
_CONTROL = "/userdata/ctl"
_NO_SUCH_METHOD = "UNIMPLEMENTED"  # by a runtime that is not containerd
_UNAVAILABLE, _NOT_FOUND = "UNAVAILABLE", "NOT_FOUND"
_RESUME_TIMEOUT_S = 600.0  # a dump that is under way ends first
_POLL_S = 0.1
_RESTARTED_S = 15.0  # for an engine that is being started anew
LOCKS = Path("/run/gpustasis/containerd")
_SHORT_ID = 13  # characters of an id that are shown, as crictl does


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """A container that a runtime knows. state: one of CONTAINER_STATES."""

    id: str
    namespace: str
    pod: str
    name: str
    image: str
    state: str

    @property
    def path(self) -> str:
        return f"{self.namespace}/{self.pod}/{self.name}"

    def __str__(self) -> str:
        return f"{self.path} ({self.id[:_SHORT_ID]})"


def containers(cri: Cri, stop: Callable[[], bool] = lambda: False) -> list[Container]:
    """All containers, running or not, by namespace, pod and name. stop: asked again and again
    whether to give up. Raises EngineError."""
    try:
        pods = {pod.id: pod.metadata for pod in cri.call("ListPodSandbox", stop=stop).items}
        answer = cri.call("ListContainers", stop=stop)
    except CallError as exc:
        runtime = cri.runtime()
        raise EngineError(f"{runtime} does not list its containers: {exc} ({exc.code})") from exc
    found = []
    for item in answer.containers:
        pod = pods.get(item.pod_sandbox_id)
        known = 0 <= item.state < len(CONTAINER_STATES)
        found.append(
            Container(
                id=printable(item.id),
                namespace=printable(pod.namespace) if pod else "",
                pod=printable(pod.name) if pod else "",
                name=printable(item.metadata.name),
                image=printable(item.image.user_specified_image or item.image.image),
                state=CONTAINER_STATES[item.state] if known else "unknown",
            )
        )
    return sorted(found, key=lambda one: (one.path, one.id))


def find(cri: Cri, name: str, states: Collection[str] = (_RUNNING,)) -> Container:
    """The container that `name` names: the beginning of its id, or NAMESPACE/POD/CONTAINER.

    Raises EngineError if there is none, if there are several, or if it is in none of `states`.
    """
    if "/" in name:
        if name.count("/") != 2 or not all(name.split("/")):
            raise EngineError(f"{name!r} is no NAMESPACE/POD/CONTAINER, and no container's id")
        named = [one for one in containers(cri) if one.path == name]
    else:
        if not re.fullmatch(r"[0-9a-zA-Z_.-]+", name):
            raise EngineError(f"{name!r} is no container's id")
        named = [one for one in containers(cri) if one.id.startswith(name)]
    fit = [one for one in named if one.state in states]
    if len(fit) == 1:
        return fit[0]
    if fit:
        raise EngineError(
            f"{name} names {len(fit)} containers: "
            + ", ".join(str(one) for one in fit[:8])
            + "; give more of the id"
        )
    if named:
        raise EngineError(f"container {named[0]} does not run (state: {named[0].state})")
    raise EngineError(
        f"{cri.runtime()} at {cri.path} has no container {name}; "
        f"gpustasis containerd --address {cri.path} list shows what it has"
    )


@contextmanager
def alone(container: Container) -> Iterator[None]:
    """Hold the lock of a container's checkpoints. containerd collects what belongs into an archive
    in one directory for each container, and two at once get mixed up.

    Raises EngineError if another one of this command is under way.
    """
    if not re.fullmatch(r"[0-9A-Za-z_-]{1,128}", container.id):
        raise EngineError(f"{container.id!r} is no container's id")
    path = LOCKS / container.id
    busy = EngineError(f"another checkpoint of container {container} is under way")
    try:
        os.close(open_own_directory(str(LOCKS), 2, 0o700))
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(path, flags, 0o600)
    except OSError as exc:
        raise EngineError(f"cannot make {path}, a lock: {exc.strerror}") from exc
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(handle), path.stat()):
                raise busy  # the lock of one that ends just now
        except (BlockingIOError, FileNotFoundError):
            raise busy from None
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
    finally:
        os.close(handle)


def resume(cri: Cri, container: Container) -> bool:
    """Let a paused container run on; False if it was not paused. Waits for a dump under way.

    Raises EngineError if it stays paused, or if a checkpoint of it is under way.
    """
    with alone(container):
        return resume_alone(cri, container)


def resume_alone(cri: Cri, container: Container) -> bool:
    """As resume(), for those who hold the lock."""
    _wait_for_dump(cri, container)
    deadline = time.monotonic() + _RESTARTED_S
    while True:
        try:
            if not is_paused(cri, container):
                return False
            resume_task(cri, container)
            if not is_paused(cri, container):
                return True
            reason = "it is still paused"
            break
        except CallError as exc:
            reason = f"{exc} ({exc.code})"
            if exc.code != _UNAVAILABLE or time.monotonic() > deadline:
                break
        time.sleep(_POLL_S)
    raise EngineError(
        f"container {container} was not resumed and may stand still: {reason}; try "
        f"ctr -n k8s.io tasks resume {container.id}; with CRI-O crun resume {container.id} or "
        f"runc resume {container.id}, and restart CRI-O then"
    )


def is_paused(cri: Cri, container: Container) -> bool:
    """As containerd's own API has it, or its control groups: to CRI a paused container is a running
    one. To containerd so is one that runc could not freeze in time, and left to freeze later.
    Raises CallError."""
    try:
        status = _status(cri, container)
    except CallError as exc:
        if exc.code == _NO_SUCH_METHOD:
            return bool(frozen_groups(container.id))
        if exc.code == _NOT_FOUND:  # it has ended meanwhile
            return False
        raise
    if status == TASK_RUNNING:
        with suppress(EngineError):  # its groups are not to be seen from here
            return bool(frozen_groups(container.id))
    return status == TASK_PAUSED


def resume_task(cri: Cri, container: Container, timeout_s: float = _RESUME_TIMEOUT_S) -> None:
    """Ask for a container to be resumed: what counts is how it is afterwards. Raises EngineError if
    its control groups are not to be seen or changed; CallError if nobody is there to ask."""
    try:
        _task_call(cri, RESUME_TASK, container, timeout_s)
    except CallError as exc:
        if exc.code == _UNAVAILABLE:
            raise
        if exc.code != _NO_SUCH_METHOD and not _runs(cri, container, timeout_s):
            return
        if exc.code == _NO_SUCH_METHOD and cri.runtime().startswith(CRIO_NAME):
            unpause(cri.path, container.id)
        for group in frozen_groups(container.id):  # of one that is not paused to its runtime
            thaw(group)


def files_at_work() -> dict[str, dict[int, list[str]]]:
    """What CRIU and CRIO have open, as open_files(): files of a checkpoint, or a restore."""
    opened = open_files(CRIU, CRIO)
    for names in opened[CRIO].values():
        names[:] = [name for name in names if not name.endswith(_CONTROL)]
    return opened


def at_work(container: Container) -> list[int]:
    """The processes of these that are, at a checkpoint of it."""
    every = [each for opened in files_at_work().values() for each in opened.items()]
    return [pid for pid, names in every if any(container.id in name for name in names)]


def _wait_for_dump(cri: Cri, container: Container) -> None:
    """Wait until neither criu nor CRI-O has a file of this container open. criu would pause it
    again at its end; CRI-O packs the archive after that, of a container that must stand still.

    Raises EngineError if that takes too long, or would not be seen.
    """
    require_sight_of_server(cri.path, f"container {container} was not resumed and may stand still")
    deadline = time.monotonic() + _RESUME_TIMEOUT_S
    clear_since = time.monotonic()
    while time.monotonic() - clear_since < SETTLE_S:
        busy = at_work(container)
        if busy:
            clear_since = time.monotonic()
            if clear_since > deadline:
                raise EngineError(
                    f"container {container} was not resumed: process {busy[0]} is still at its "
                    f"checkpoint after {_RESUME_TIMEOUT_S:.0f} s"
                )
        time.sleep(_POLL_S)


def _runs(cri: Cri, container: Container, timeout_s: float) -> bool:
    """To containerd, which may not answer, or have no such container any more."""
    with suppress(CallError):
        return _status(cri, container, min(timeout_s, CALL_TIMEOUT_S)) == TASK_RUNNING
    return False


def _status(cri: Cri, container: Container, timeout_s: float = CALL_TIMEOUT_S) -> int:
    """As containerd has it. Raises CallError."""
    return int(_task_call(cri, GET_TASK, container, timeout_s).process.status)


def _task_call(cri: Cri, method: str, container: Container, timeout_s: float) -> Any:
    return cri.call(
        method,
        timeout_s=timeout_s,
        metadata=(("containerd-namespace", "k8s.io"),),
        container_id=container.id,
    )
