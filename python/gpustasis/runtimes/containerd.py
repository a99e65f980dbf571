# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of containers that run under containerd's CRI: a Kubernetes node's.

containerd writes one archive (tar) and leaves the container running. Source of behaviour and error
texts: containerd 2.1, internal/cri/server. CRI-O 1.36 answers the same calls; whether a container
is paused say its control groups there.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpustasis.criu.log import errors_in
from gpustasis.errors import EngineError
from gpustasis.files import give_name
from gpustasis.runtimes import freezer
from gpustasis.runtimes.cri import CANCELLED, DEADLINE_EXCEEDED, CallError, Cri, printable
from gpustasis.runtimes.cri_containers import (
    SETTLE_S,
    Container,
    alone,
    at_work,
    is_paused,
    resume_alone,
)
from gpustasis.runtimes.crio import CRIO_NAME
from gpustasis.runtimes.instance import require_sight_of_server

DEFAULT_ADDRESS = "/run/containerd/containerd.sock"
CRIO_ADDRESS = "/run/crio/crio.sock"
DEFAULT_TIMEOUT_S = 600
_CUT_OFF = (DEADLINE_EXCEEDED, CANCELLED, "UNAVAILABLE")  # codes of a call that was not answered


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """An archive that was made. size: bytes. seconds: of the call."""

    archive: Path
    size: int
    seconds: float


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
    leaves paused when a call is cut off, or CRI-O with crun, is resumed, once no dump is under
    way.) stop: asked again and again whether to give up earlier, in the same way.

    Raises EngineError; nothing is left of an archive that was not finished. One that is finished
    and cannot get its name is kept, and the error says where; so is one whose container stays
    paused.
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
    paused_before = None
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
    why_paused = "" if paused_before is not False else _why_left_paused(cri, container)
    try:
        size = _publish(cri, part, archive)
    except EngineError as exc:
        raise EngineError("; ".join(filter(None, (str(exc), why_paused)))) from exc
    if why_paused:
        raise EngineError(f"{archive} is complete, but {why_paused}")
    return Exported(archive=archive, size=size, seconds=seconds)


def _why_left_paused(cri: Cri, container: Container) -> str:
    """After a checkpoint: have the container run on. Why it does not; "": it does, or has ended,
    or the next checkpoint of it has begun. containerd resumes it, whatever its state."""
    try:
        is_left = (
            cri.runtime().startswith(CRIO_NAME)
            and is_paused(cri, container)
            and not at_work(container)
        )
    except CallError as exc:
        return f"whether container {container} runs on cannot be told: {exc} ({exc.code})"
    except EngineError:
        return ""  # it has ended: before the checkpoint its groups were seen
    try:
        if is_left:
            resume_alone(cri, container)
    except EngineError as exc:
        return str(exc) if freezer.groups_by_container().get(container.id) else ""
    return ""


def _have_it_run_on(cri: Cri, container: Container, error: BaseException) -> str:
    """After a checkpoint that failed. What else is to be said. Raises EngineError."""
    if not isinstance(error, CallError) or error.code in _CUT_OFF:
        if not resume_alone(cri, container):
            time.sleep(SETTLE_S)  # a pause that was under way when the call was cut off
            resume_alone(cri, container)
    elif freezer.may_be_left_paused(str(error)):
        try:
            if is_paused(cri, container) and resume_alone(cri, container):
                return "; the container was left paused, and was resumed"
        except CallError as exc:
            return f"; whether the container runs on cannot be told: {exc} ({exc.code})"
        except EngineError as exc:
            return f"; {exc}"
    return ""


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
