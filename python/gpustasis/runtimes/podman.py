# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of Podman's containers, through its service.

Podman runs runc or crun, they run criu, and criu loads our plugin: what is asked for here can as
well be asked for with `podman container checkpoint`. What is added: our figures beside CRIU's,
reasons from CRIU's log, an export that loses nothing if the archive cannot be written, and checks
of an archive before it is restored.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from gpustasis.archive.layout import CHECKPOINT, Engine
from gpustasis.archive.opened import open_archive
from gpustasis.criu import log
from gpustasis.criu.images import INVENTORY_NAME, dump_figures
from gpustasis.criu.statistics import Stage, Statistics, find_statistics
from gpustasis.errors import ArchiveError, CheckpointError, EngineError
from gpustasis.files import give_name, open_new, sync
from gpustasis.runtimes.parent_store import keep_parents, require_parent
from gpustasis.runtimes.podman_service import RefusedError, Report, Service

_NOT_FOUND = 404
_ATTEMPTS = 3  # of an export that leaves the container running


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOptions:
    """As Podman's options of the same names. export: the archive to write; it must not exist yet.
    An archive is not compressed: GPU images are already."""

    export: Path | None = None
    leave_running: bool = False
    pre_checkpoint: bool = False
    with_previous: bool = False
    keep: bool = False
    tcp_established: bool = False
    file_locks: bool = False
    ignore_rootfs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreOptions:
    """As Podman's options of the same names. name: of the container that an archive becomes; None:
    that of the one it was."""

    name: str | None = None
    keep: bool = False
    tcp_established: bool = False
    tcp_close: bool = False
    file_locks: bool = False
    ignore_rootfs: bool = False
    ignore_volumes: bool = False


def checkpoint(service: Service, name: str, options: CheckpointOptions | None = None) -> Report:
    """Checkpoint a running container. Raises EngineError if it is not there or Podman fails; the
    container then runs on. If an export fails after the dump, its images stay in Podman's storage
    and `restore` works in place; the error says so."""
    use = options or CheckpointOptions()
    found = _inspect(service, name)
    params = _params(use, {"export"})
    begin = time.monotonic()
    started_ns = time.time_ns()
    try:
        if use.export is not None:
            return _export(service, found, use.export, params, begin)
        answer = service.act(found.id, "checkpoint", params | {"printStats": True})
    except RefusedError as exc:
        raise found.failed("checkpoint", exc, "dump.log", started_ns) from exc
    # A pre-checkpoint is of CPU memory, and elsewhere; what lies in `images` is older than it.
    plugin = None if use.pre_checkpoint else found.statistics("dump")
    return _report("dump", found.id, begin, answer, plugin)


def restore(service: Service, name: str, options: RestoreOptions | None = None) -> Report:
    """Restore a container that was checkpointed in place. With `keep` the report has our figures.

    Raises EngineError if it is not there, or Podman fails; its images are kept then.
    """
    use = options or RestoreOptions()
    found = _inspect(service, name)
    begin = time.monotonic()
    started_ns = time.time_ns()
    try:
        answer = service.act(found.id, "restore", _params(use, {"name"}) | {"printStats": True})
    except RefusedError as exc:
        raise found.failed("restore", exc, "restore.log", started_ns) from exc
    return _report("restore", found.id, begin, answer, found.statistics("restore"))


def restore_archive(
    service: Service,
    path: Path,
    options: RestoreOptions | None = None,
    parents: Sequence[Path] = (),
) -> Report:
    """Make a container of an archive; parents: archives of the checkpoints that it is built on.

    Raises ArchiveError for a bad archive; CheckpointError if it is no Podman's, if its parent is
    not there, or a container of that name is; EngineError if Podman fails: nothing of the new
    container is left then.
    """
    use = options or RestoreOptions()
    keep_parents(parents)
    with open_archive(path) as archive:
        facts = archive.facts()
        if facts.engine is not Engine.PODMAN:
            raise CheckpointError(f"{path} is a checkpoint of {facts.engine}, not of Podman")
        if service.local:
            require_parent(archive)
    _require_runtime(service, path, facts.runtime)
    name = use.name or facts.container_name
    if _exists(service, name):
        raise EngineError(f"there is a container {name} already: remove it, or give another --name")
    params = _params(use, {"name"}) | {"import": True, "printStats": True}
    if use.name is not None:
        params["name"] = use.name
    before = service.containers()
    begin = time.monotonic()
    started_ns = time.time_ns()
    try:
        with path.open("rb") as body:
            answer = service.act(name, "restore", params, body)
    except OSError as exc:
        raise CheckpointError(f"cannot read {path}: {exc.strerror}") from exc
    except RefusedError as exc:
        own_id = None if use.name else facts.container_id
        raise _forget(service, name, exc, started_ns, before, own_id) from exc
    container = str(answer.get("Id", ""))
    made = _inspect(service, container or name)
    return _report("restore", made.id, begin, answer, made.statistics("restore"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Container:
    """images, work: CRIU's directories for it; None if they are another machine's."""

    id: str
    name: str
    running: bool
    images: Path | None
    work: Path | None

    def statistics(self, stage: Stage) -> Statistics | None:
        return None if self.images is None else find_statistics(self.images, stage)

    def failed(self, verb: str, why: RefusedError, log_name: str, since_ns: int) -> EngineError:
        """The error to raise, with what CRIU's log says, if it was written since then."""
        text = f"Podman cannot {verb} {self.name}: {why}"
        reasons = [] if self.work is None else _reasons(self.work / log_name, since_ns)
        # crun quotes some of the log itself.
        new = [reason for reason in reasons if reason not in text]
        return EngineError(text + "".join(f"\n{reason}" for reason in new))


def _inspect(service: Service, name: str) -> _Container:
    try:
        found = service.inspect(name)
    except RefusedError as exc:
        if exc.status == _NOT_FOUND:
            raise EngineError(f"Podman at {service.url} has no container {name}") from exc
        raise EngineError(f"Podman cannot inspect {name}: {exc}") from exc
    try:
        work = Path(found["StaticDir"]) if service.local else None
        # Also State.CheckpointPath, but only when there has been a checkpoint.
        images = None if work is None else work / "checkpoint"
        running = bool(found["State"]["Running"])
        return _Container(
            id=found["Id"], name=found["Name"], running=running, images=images, work=work
        )
    except (KeyError, TypeError) as exc:
        raise EngineError(f"Podman's description of {name} lacks {exc}") from exc


def _exists(service: Service, name: str) -> bool:
    try:
        service.inspect(name)
    except RefusedError as exc:
        if exc.status == _NOT_FOUND:
            return False
        raise
    return True


def _export(
    service: Service,
    found: _Container,
    path: Path,
    params: dict[str, bool | str],
    begin: float,
) -> Report:
    """Podman deletes its images once it has sent them, whether we could store them or not: it is
    told to keep them, and they are deleted here, when the archive is safe."""
    if path.exists():
        raise CheckpointError(f"{path} exists already; name another file")
    if not service.local:
        raise EngineError(f"{service.url} is on another machine: an export needs a unix socket")
    wanted = params | {"export": True, "keep": True}
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        file = open_new(part)  # before the container is touched
    except OSError as exc:
        raise CheckpointError(f"cannot make {path}: {exc.strerror}") from exc
    try:
        with file:
            for attempt in range(_ATTEMPTS):
                with service.stream(found.id, "checkpoint", wanted) as pieces:
                    _write(file, pieces, found, params)
                last = attempt + 1 == _ATTEMPTS or not params["leaveRunning"]
                if not os.path.samestat(os.fstat(file.fileno()), part.lstat()):
                    raise CheckpointError(f"{part} was exchanged; {_left(found, params)}")
                if _is_whole(part, found, params, last):
                    break
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    try:
        give_name(part, path)  # only then are Podman's images deleted
    except OSError as exc:
        raise CheckpointError(
            f"the archive of {found.name} is complete and kept as {part}: it cannot get its name "
            f"{path}: {exc.strerror}; {_left(found, params)}"
        ) from exc
    plugin = None if params["preCheckpoint"] else found.statistics("dump")
    figures: dict[str, int] = {}
    if found.work is not None:
        with suppress(OSError):
            figures = dump_figures((found.work / "stats-dump").read_bytes())
    if not params["keep"] and not params["preCheckpoint"]:
        _discard(found)
    return _report("dump", found.id, begin, {"criu_statistics": figures}, plugin, path)


def _write(
    file: BinaryIO, pieces: Iterable[bytes], found: _Container, params: dict[str, bool | str]
) -> None:
    """Write a file anew, by its descriptor. Raises CheckpointError that says what became of the
    container."""
    try:
        file.seek(0)
        file.truncate()
        file.writelines(pieces)
        sync(file)
    except OSError as exc:
        raise CheckpointError(
            f"cannot write the archive of {found.name}: {exc.strerror}; {_left(found, params)}"
        ) from exc
    except EngineError as exc:
        raise EngineError(f"{exc}; if {found.name} was dumped, {_left(found, params)}") from exc


def _is_whole(part: Path, found: _Container, params: dict[str, bool | str], last: bool) -> bool:
    """Podman packs the container's log as well. If that grows meanwhile, which with leaveRunning it
    may, the archive ends there, and Podman says nothing (tried with 5.8). Raises EngineError at the
    last attempt."""
    if params["preCheckpoint"]:
        return True
    try:
        with open_archive(part) as archive:
            if CHECKPOINT + INVENTORY_NAME in archive.members:
                return True
            why = f"it lacks {CHECKPOINT}{INVENTORY_NAME}"
    except ArchiveError as exc:
        why = str(exc).removeprefix(f"{part}: ")
    if last:
        raise EngineError(
            f"Podman's archive of {found.name} is not whole ({why}); {_left(found, params)}"
        )
    return False


def _left(found: _Container, params: dict[str, bool | str]) -> str:
    """What became of the container when there is no archive of it."""
    if params["leaveRunning"] or params["preCheckpoint"]:
        return "it runs on"
    return (
        f"its images are in Podman's storage: `podman container restore {found.name}` restores it"
    )


def _discard(found: _Container) -> None:
    """As Podman does it without --keep. The directory is no checkpoint from one moment on."""
    if found.images is None or found.work is None:
        return
    trash = found.images.with_name(f".gpustasis-exported.{os.getpid()}")
    with suppress(FileNotFoundError):  # the container was removed meanwhile, and they with it
        found.images.rename(trash)
        shutil.rmtree(trash, ignore_errors=True)
    for name in ("dump.log", "stats-dump"):
        (found.work / name).unlink(missing_ok=True)


def _require_runtime(service: Service, path: Path, made_by: str) -> None:
    """Podman's service takes its default runtime for every import; it has to be the archive's."""
    runtime = str(service.info().get("host", {}).get("ociRuntime", {}).get("name", ""))
    if made_by and runtime and Path(made_by).name != runtime:
        raise EngineError(
            f"{path} was made with {made_by}, and Podman's service restores with {runtime}: set "
            f'runtime = "{made_by}" below [engine] in /etc/containers/containers.conf, or use '
            f"`podman --runtime {made_by} container restore --import {path}`"
        )


def _forget(
    service: Service,
    name: str,
    why: RefusedError,
    since_ns: int,
    before: set[str],
    own_id: str | None,
) -> EngineError:
    """Remove the container that a failed import has made, and no other that has its name by now;
    the error to raise.

    before: the ids of all that there were. own_id: of the one in the archive, which an import
    without another name makes again.
    """
    plain = EngineError(f"Podman cannot restore {name}: {why}")
    try:
        found = _inspect(service, name)
    except EngineError:  # it did not come so far
        return plain
    is_ours = (
        not why.exists
        and found.id not in before
        and not found.running
        and (own_id is None or found.id == own_id)
    )
    if not is_ours:
        return plain
    error = found.failed("restore", why, "restore.log", since_ns)
    service.remove(found.id)
    return error


def _params(use: CheckpointOptions | RestoreOptions, other: set[str]) -> dict[str, bool | str]:
    """The options under the names that the service gives them, but for the others: ignore_rootfs is
    ignoreRootFS, all else camel case."""
    given = {name: value for name, value in asdict(use).items() if name not in other}
    camel = {re.sub("_(.)", lambda match: match[1].upper(), name): given[name] for name in given}
    return {name.replace("Rootfs", "RootFS"): value for name, value in camel.items()}


def _report(
    stage: Stage,
    container: str,
    begin: float,
    answer: dict[str, Any],
    plugin: Statistics | None,
    archive: Path | None = None,
) -> Report:
    verb = "checkpoint" if stage == "dump" else "restore"
    figures = answer.get("criu_statistics")
    return Report(
        stage=stage,
        container_id=container,
        duration_us=round(1e6 * (time.monotonic() - begin)),
        runtime_us=int(answer.get(f"runtime_{verb}_duration") or 0),
        criu=figures if isinstance(figures, dict) else {},
        plugin=plugin,
        archive=archive,
    )


def _reasons(path: Path, since_ns: int) -> list[str]:
    """What the log of CRIU at `path` says went wrong, our plugin's reasons first."""
    try:
        if path.stat().st_mtime_ns < since_ns - 1_000_000_000:  # clocks of file systems are coarse
            return []
    except OSError:
        return []
    return log.errors_in(path)
