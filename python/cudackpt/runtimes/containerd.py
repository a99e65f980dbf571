"""Checkpoints of containers that run under containerd's CRI: a Kubernetes node's.

containerd writes one archive (tar) and leaves the container running. Source of behaviour and error
texts: containerd 2.1, internal/cri/server. CRI-O answers the same calls.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cudackpt.criu.log import criu_errors, plugin_errors
from cudackpt.errors import EngineError
from cudackpt.runtimes.cri import CallError, Cri, printable
from cudackpt.runtimes.cri_messages import CONTAINER_STATES, RUNNING

DEFAULT_ADDRESS = "/run/containerd/containerd.sock"
DEFAULT_TIMEOUT_S = 600
_LOG_LIMIT = 4 << 20  # bytes of criu's log that are read, counted from its end
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


def containers(cri: Cri) -> list[Container]:
    """All containers, running or not, by namespace, pod and name. Raises EngineError."""
    try:
        pods = {pod.id: pod.metadata for pod in cri.call("ListPodSandbox").items}
        answer = cri.call("ListContainers")
    except CallError as exc:
        runtime = cri.runtime()
        raise EngineError(f"{runtime} does not list its containers: {exc} ({exc.code})") from exc
    found = []
    for item in answer.containers:
        pod = pods.get(item.pod_sandbox_id)
        known = 0 <= item.state < len(CONTAINER_STATES)
        found.append(
            Container(
                id=item.id,
                namespace=pod.namespace if pod else "",
                pod=pod.name if pod else "",
                name=item.metadata.name,
                image=item.image.user_specified_image or item.image.image,
                state=CONTAINER_STATES[item.state] if known else "unknown",
            )
        )
    return sorted(found, key=lambda one: (one.path, one.id))


def find(cri: Cri, name: str) -> Container:
    """The running container that `name` names: the beginning of its id, or NAMESPACE/POD/CONTAINER.

    Raises EngineError if there is none, if there are several, or if it does not run.
    """
    if "/" in name:
        if name.count("/") != 2 or not all(name.split("/")):
            raise EngineError(f"{name!r} is no NAMESPACE/POD/CONTAINER, and no container's id")
        named = [one for one in containers(cri) if one.path == name]
    else:
        if not re.fullmatch(r"[0-9a-zA-Z_.-]+", name):
            raise EngineError(f"{name!r} is no container's id")
        named = [one for one in containers(cri) if one.id.startswith(name)]
    running = [one for one in named if one.state == CONTAINER_STATES[RUNNING]]
    if len(running) == 1:
        return running[0]
    if running:
        raise EngineError(
            f"{name} names {len(running)} running containers: "
            + ", ".join(str(one) for one in running[:8])
            + "; give more of the id"
        )
    if named:
        raise EngineError(
            f"container {named[0]} does not run (state: {named[0].state}); only a running "
            "container can be checkpointed"
        )
    raise EngineError(
        f"{cri.runtime()} at {cri.path} has no container {name}; "
        "cudackpt containerd list shows what it has"
    )


def checkpoint(
    cri: Cri, container: Container, export: Path, timeout_s: int = DEFAULT_TIMEOUT_S
) -> Exported:
    """Checkpoint a running container into the archive `export`; it runs on.

    The archive has its name only once it is complete and on the disk. timeout_s: after that many
    seconds containerd is told to give up; the container runs on then as well.

    Raises EngineError; nothing is left of an archive that was not finished.
    """
    archive = Path(os.path.abspath(export))
    if os.path.lexists(archive):
        raise EngineError(f"{archive} exists already; name another file")
    if not archive.parent.is_dir():
        raise EngineError(f"{archive}: {archive.parent} is no directory")
    part = archive.with_name(f".{archive.name[:200]}.{secrets.token_hex(4)}.part")
    begin = time.monotonic()
    try:
        try:
            cri.call(
                "CheckpointContainer",
                timeout_s=timeout_s,
                container_id=container.id,
                location=str(part),
                timeout=timeout_s,
            )
        except CallError as exc:
            raise EngineError(_explain(cri, container, exc, timeout_s)) from exc
        seconds = time.monotonic() - begin
        size = _publish(cri, part, archive)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise
    return Exported(archive=archive, size=size, seconds=seconds)


def _publish(cri: Cri, part: Path, archive: Path) -> int:
    """Give a finished archive its name; its size in bytes."""
    try:
        handle = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError as exc:
        raise EngineError(
            f"{cri.runtime()} says that it wrote {part}, and it is not there: the runtime sees "
            "other directories than this command; name one that both see"
        ) from exc
    except OSError as exc:
        raise EngineError(f"cannot open {part}, the new archive: {exc.strerror}") from exc
    try:
        os.fsync(handle)
        size = os.fstat(handle).st_size
        os.link(part, archive)  # unlike a rename, it takes no other's place
        part.unlink()
        directory = os.open(archive.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as exc:
        raise EngineError(f"cannot give {part} its name {archive}: {exc.strerror}") from exc
    finally:
        os.close(handle)
    return size


def _explain(cri: Cri, container: Container, error: CallError, timeout_s: int) -> str:
    """A sentence for a checkpoint that was refused or failed, with what to do."""
    runtime = cri.runtime()
    if error.code == "UNIMPLEMENTED":
        return (
            f"{runtime} has no CheckpointContainer, so container {container} was not "
            "checkpointed; containerd has it from 2.0 on. Without an upgrade: "
            f"ctr -n k8s.io tasks checkpoint --image-path DIR {container.id}, or CRI-O"
        )
    if error.code == "DEADLINE_EXCEEDED":
        return (
            f"checkpointing container {container} took longer than {timeout_s} s; {runtime} was "
            "told to give up and the container runs on; --timeout gives it longer"
        )
    text = f"{runtime} did not checkpoint container {container}: {error} ({error.code})"
    if "CRIU binary not found or too old" in str(error):
        return f"{text}; install criu 4.1 or later into a directory of the runtime's PATH"
    if "cannot pause a paused container" in str(error):
        return f"{text}; another checkpoint of it is under way, or somebody has paused it"
    if error.code == "UNAVAILABLE":
        return f"{text}; the runtime has ended or was restarted meanwhile"
    lines = _criu_log(cri, container)
    return "\n".join([text, *(f"  criu: {line}" for line in lines)])


def _criu_log(cri: Cri, container: Container) -> list[str]:
    """What criu's log says of the failure, if the runtime keeps it where containerd does."""
    try:
        info = cri.call("Status", verbose=True).info
        root = json.loads(info["config"])["rootDir"]
        with (Path(root) / "containers" / container.id / "dump.log").open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_LIMIT))
            text = log.read(_LOG_LIMIT).decode("utf-8", "replace")
    except (CallError, OSError, KeyError, TypeError, ValueError):
        return []
    return [printable(line) for line in plugin_errors(text) or criu_errors(text)]
