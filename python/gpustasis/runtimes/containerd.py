# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of containers that run under containerd's CRI: a Kubernetes node's.

containerd writes one archive (tar) and leaves the container running. Source of behaviour and error
texts: containerd 2.1, internal/cri/server. CRI-O 1.36 answers the same calls; whether a container
is paused say its control groups there.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpustasis.criu.log import errors_in
from gpustasis.errors import EngineError
from gpustasis.files import give_name, open_own_directory
from gpustasis.runtimes import freezer
from gpustasis.runtimes.cri import (
    CANCELLED,
    CONTAINER_STATES,
    DEADLINE_EXCEEDED,
    GET_TASK,
    RESUME_TASK,
    RUNNING,
    TASK_PAUSED,
    CallError,
    Cri,
    printable,
)
from gpustasis.runtimes.crio import CRIO_NAME, unpause
from gpustasis.runtimes.instance import require_sight_of_server
from gpustasis.task import find_openers

DEFAULT_ADDRESS = "/run/containerd/containerd.sock"
CRIO_ADDRESS = "/run/crio/crio.sock"
DEFAULT_TIMEOUT_S = 600
_RESUME_TIMEOUT_S = 600.0  # a dump that is under way ends first
# Codes of a call that was not answered; when it is, containerd has resumed the container itself.
_CUT_OFF = (DEADLINE_EXCEEDED, CANCELLED, "UNAVAILABLE")
_RUNNING = CONTAINER_STATES[RUNNING]
# A containerd that was started anew takes a paused container for one in an unknown state.
PERHAPS_PAUSED = (_RUNNING, "unknown")
_NO_SUCH_METHOD = "UNIMPLEMENTED"  # by a runtime that is not containerd
CRIU, CRIO = "criu", "crio"  # processes that are at a checkpoint, by name
_SETTLE_S = 0.5
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """An archive that was made. size: bytes. seconds: of the call."""

    archive: Path
    size: int
    seconds: float


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


def checkpoint(
    cri: Cri,
    container: Container,
    export: Path,
    timeout_s: int = DEFAULT_TIMEOUT_S,
    stop: Callable[[], bool] = lambda: False,
) -> Exported:
    """Checkpoint a running container into the archive `export`; it runs on.

    The archive has its name only once it is complete and on the disk. timeout_s: after that many
    seconds containerd is told to give up; the container runs on then as well. (What containerd 2.1
    leaves paused when a call is cut off, or CRI-O with crun when one fails, is resumed, once no
    dump is under way.) stop: asked again and again whether to give up earlier, in the same way.

    Raises EngineError; nothing is left of an archive that was not finished. One that is finished
    and cannot get its name is kept, and the error says where.
    """
    archive = Path(os.path.abspath(export))
    if os.path.lexists(archive):
        raise EngineError(f"{archive} exists already; name another file")
    if not archive.parent.is_dir():
        raise EngineError(f"{archive}: {archive.parent} is no directory")
    require_sight_of_server(cri.path)  # else nobody could resume it after a call that is cut off
    with alone(container):
        return _checkpoint(cri, container, archive, timeout_s, stop)


def _checkpoint(
    cri: Cri, container: Container, archive: Path, timeout_s: int, stop: Callable[[], bool]
) -> Exported:
    part = archive.with_name(f".{archive.name[:200]}.{secrets.token_hex(4)}.part")
    paused_before = False
    with suppress(EngineError):  # if it cannot be told, its runtime refuses to pause it twice
        paused_before = is_paused(cri, container)
    begin = time.monotonic()
    try:
        try:
            cri.checkpoint(container.id, str(part), timeout_s, stop)
        except BaseException as exc:
            more = "" if paused_before else _have_it_run_on(cri, container, exc)
            if isinstance(exc, CallError):
                raise EngineError(_explain(cri, container, exc, timeout_s) + more) from exc
            raise
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise
    seconds = time.monotonic() - begin
    return Exported(archive=archive, size=_publish(cri, part, archive), seconds=seconds)


def _have_it_run_on(cri: Cri, container: Container, error: BaseException) -> str:
    """After a checkpoint that failed. What else is to be said. Raises EngineError."""
    if not isinstance(error, CallError) or error.code in _CUT_OFF:
        if not _resume(cri, container):
            time.sleep(_SETTLE_S)  # a pause that was under way when the call was cut off
            _resume(cri, container)
    elif freezer.may_be_left_paused(str(error)):
        try:
            return "; it was left paused, and was resumed" if _resume(cri, container) else ""
        except EngineError as exc:
            return f"; {exc}"
    return ""


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
        return _resume(cri, container)


def _resume(cri: Cri, container: Container) -> bool:
    """For those who hold the lock."""
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
            if exc.code != "UNAVAILABLE" or time.monotonic() > deadline:
                break
        time.sleep(_POLL_S)
    raise EngineError(
        f"container {container} was not resumed and may stand still: {reason}; try "
        f"ctr -n k8s.io tasks resume {container.id}, or with CRI-O: runc resume or crun resume"
    )


def is_paused(cri: Cri, container: Container) -> bool:
    """As containerd's own API has it, or its control groups: to CRI a paused container is a running
    one. Raises CallError."""
    try:
        status: int = _task_call(cri, GET_TASK, container).process.status
    except CallError as exc:
        if exc.code == _NO_SUCH_METHOD:
            return bool(freezer.frozen_groups(container.id))
        if exc.code == "NOT_FOUND":  # it has ended meanwhile
            return False
        raise
    return status == TASK_PAUSED


def resume_task(cri: Cri, container: Container, timeout_s: float = _RESUME_TIMEOUT_S) -> None:
    """Ask for a container to be resumed: what counts is how it is afterwards. Raises EngineError if
    its control groups are not to be seen or changed."""
    try:
        _task_call(cri, RESUME_TASK, container, timeout_s)
    except CallError as exc:
        if exc.code == _NO_SUCH_METHOD:
            if cri.runtime().startswith(CRIO_NAME):
                unpause(cri.path, container.id)
            for group in freezer.frozen_groups(container.id):  # of one that is not paused to CRI-O
                freezer.thaw(group)


def _wait_for_dump(cri: Cri, container: Container) -> None:
    """Wait until neither criu nor CRI-O has a file of this container open. criu would pause it
    again at its end; CRI-O packs the archive after that, of a container that must stand still.

    Raises EngineError if that takes too long, or would not be seen.
    """
    require_sight_of_server(cri.path, f"container {container} was not resumed and may stand still")
    deadline = time.monotonic() + _RESUME_TIMEOUT_S
    clear_since = time.monotonic()
    while time.monotonic() - clear_since < _SETTLE_S:  # there are moments between two files
        busy = find_openers(container.id, CRIU, CRIO)
        if busy:
            clear_since = time.monotonic()
            if clear_since > deadline:
                raise EngineError(
                    f"container {container} was not resumed: process {busy[0]} is still at its "
                    f"checkpoint after {_RESUME_TIMEOUT_S:.0f} s"
                )
        time.sleep(_POLL_S)


def _task_call(
    cri: Cri, method: str, container: Container, timeout_s: float = _RESUME_TIMEOUT_S
) -> Any:
    return cri.call(
        method,
        timeout_s=timeout_s,
        metadata=(("containerd-namespace", "k8s.io"),),
        container_id=container.id,
    )


def _publish(cri: Cri, part: Path, archive: Path) -> int:
    """Give a finished archive its name; its size in bytes. Raises EngineError; it is kept then."""
    try:
        handle = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as exc:
        raise EngineError(
            f"{cri.runtime()} says that it wrote {part}, and it is not there: the runtime sees "
            "other directories than this command; name one that both see"
        ) from exc
    except OSError as exc:
        with suppress(OSError):
            part.unlink()  # a link, or something else that is no archive
        raise EngineError(f"cannot open {part}, the new archive: {exc.strerror}") from exc
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or not os.path.samestat(found, part.lstat()):
            raise EngineError(f"{part} is not the archive that {cri.runtime()} says it wrote")
        os.fsync(handle)
        size = os.fstat(handle).st_size
        give_name(part, archive)
    except OSError as exc:
        raise EngineError(
            f"the archive is complete and kept as {part}: it cannot get its name {archive}: "
            f"{exc.strerror}"
        ) from exc
    finally:
        os.close(handle)
    return size


def _explain(cri: Cri, container: Container, error: CallError, timeout_s: int) -> str:
    """A sentence for a checkpoint that was refused or failed, with what to do."""
    runtime = cri.runtime()
    if error.code == "UNIMPLEMENTED":
        if re.match(r"containerd v?1\.", runtime):
            return (
                f"{runtime} has no CheckpointContainer, so container {container} was not "
                "checkpointed; containerd has it from 2.0 on. Without an upgrade: "
                f"ctr -n k8s.io tasks checkpoint --image-path DIR {container.id}"
            )
        return (
            f"{runtime} does not offer CheckpointContainer ({error}), so container {container} was "
            "not checkpointed; containerd 2.0 says so also when it finds no criu in its PATH, and "
            "CRI-O when enable_criu_support is off"
        )
    if error.code == CANCELLED:
        return f"interrupted: container {container} runs on, and there is no archive"
    if error.code == DEADLINE_EXCEEDED:
        return (
            f"checkpointing container {container} took longer than {timeout_s} s; it runs on and "
            "there is no archive; --timeout gives it longer"
        )
    text = f"{runtime} did not checkpoint container {container}: {error} ({error.code})"
    if "CRIU binary not found or too old" in str(error):
        return f"{text}; install criu 4.1 or later into a directory of the runtime's PATH"
    if "cannot pause a paused container" in str(error):
        return f"{text}; another checkpoint of it is under way, or somebody has paused it"
    if freezer.was_not_frozen(str(error)):
        return f"{text}; {freezer.TOO_BUSY}"
    if error.code == "UNAVAILABLE":
        return f"{text}; the runtime has ended or was restarted meanwhile"
    # containerd's error says where it has put criu's log, which may not be seen from here.
    log = re.search(rf"path= (/[^\s:]*/{re.escape(container.id)}/criu-dump\.log)", str(error))
    lines = map(printable, errors_in(Path(log[1]))) if log else ()
    return "\n".join([text, *(f"  criu: {line}" for line in lines)])
