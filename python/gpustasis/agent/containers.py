# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of containers, through the engines that run them, into archives."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path

import gpustasis
from gpustasis.agent.config import Config
from gpustasis.agent.operations import Figures, Operation
from gpustasis.agent.subjects import Subject
from gpustasis.errors import AgentError, CheckpointError, EngineError
from gpustasis.runtimes import containerd, cri_containers, podman
from gpustasis.runtimes.cri import Cri
from gpustasis.runtimes.podman_service import RefusedError, Service

log = logging.getLogger(__name__)

# Engines that leave a container paused when nobody waits for the answer to its checkpoint.
LEFT_PAUSED = ("containerd", "crio")
_PODMAN_WORKS = 1e6  # its figures are in microseconds
_ID = re.compile(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")
_DELEGATED = re.compile(r"/user@[1-9][0-9]*\.service/")  # systemd's, of another user than root


def root_pid(subject: Subject, config: Config) -> int | None:
    """The first process of the container, if its engine says; None: that is not known.

    Raises EngineError if there is no such container, or its engine does not answer.
    """
    if subject.engine != "podman":
        return None
    with Service(config.podman) as service:
        try:
            found = service.inspect(subject.name)
        except RefusedError as exc:
            raise EngineError(f"{subject}: {exc}") from exc
    try:
        pid = int(found["State"]["Pid"])
    except (KeyError, TypeError, ValueError) as exc:
        raise EngineError(f"Podman's description of {subject.name} lacks its pid") from exc
    if pid < 2:
        raise AgentError(f"{subject} does not run")
    return pid


def checkpoint(
    operation: Operation,
    config: Config,
    archive: Path,
    begin: float,
    write_down: Callable[[Operation], None],
) -> Figures:
    """Raises CheckpointError: the container runs on then, unless it says otherwise. write_down:
    puts the operation on the disk, or raises."""
    subject = operation.subject
    if subject.engine == "podman":
        return _podman(operation, config, archive, begin)
    if operation.stop:
        raise AgentError(f"{subject} cannot be ended with its checkpoint: its engine leaves it on")
    with Cri(_address(subject.engine, config)) as cri:
        found = cri_containers.find(cri, subject.name)
        paused_before = False
        with suppress(EngineError):  # if it cannot be told, its runtime refuses to pause it twice
            paused_before = cri_containers.is_paused(cri, found)
        if not paused_before:
            operation.to_resume = found.id
            write_down(operation)
        made = containerd.checkpoint(cri, found, archive, stop=lambda: operation.cancel)
    return Figures(
        duration_s=time.monotonic() - begin,
        downtime_s=None,
        size_bytes=made.size,
        stored_bytes=made.size,
        gpu_bytes=0,
        incremental=False,
        emulated=False,
        verified=False,
    )


def engine_of(container: str) -> str:
    """The engine whose container this id is, by the cgroup of its processes. Raises AgentError if
    none of them runs."""
    for groups in _groups():
        if (name := groups.get(container)) is not None:
            for mark, engine in (("libpod", "podman"), ("crio-", "crio")):
                if mark in name:
                    return engine
            return "containerd"
    raise AgentError(f"container {container} does not run")


def running(wanted: Collection[str]) -> set[str]:
    """Those of these containers that have a process."""
    left = set(wanted)
    for groups in _groups() if left else ():
        left.difference_update(groups)
        if not left:
            break
    return set(wanted) - left


def _groups() -> Iterator[dict[str, str]]:
    """Of each process, as groups_of."""
    ours = frozenset(_ID.findall(Path("/proc/self/cgroup").read_text(errors="replace")))
    for place in Path("/proc").glob("[0-9]*/cgroup"):
        with suppress(OSError):
            yield groups_of(place.read_text(errors="replace"), ours)


def groups_of(text: str, ours: Collection[str] = ()) -> dict[str, str]:
    """The containers that a process is in, by its /proc/PID/cgroup, and the names of their groups.
    Of each hierarchy the first name counts: those below are the container's own to give. ours: ids
    of what this process is in itself. A pod of Podman's is no container, and an engine's monitor of
    a container is not in it. What a
    user has made in groups of his own is none either, whatever it is called."""
    found = {}
    for line in text.split("\n"):  # a name may have any byte but that one
        if _DELEGATED.search(line):
            continue
        above = ""
        for name in line.partition(":/")[2].split("/"):
            match = _ID.search(name)
            is_pod = "libpod_pod_" in name or (
                above == "libpod_parent" and _ID.fullmatch(name) is not None
            )
            above = name
            if match is not None and not is_pod and match[0] not in ours:
                if "conmon" not in name:
                    found[match[0]] = name
                break
    return found


def dump_rank(
    container: str, config: Config, archive: Path, *, leave_running: bool, stop: Callable[[], bool]
) -> None:
    """Have a container's engine dump it, which is a rank of a job: it is all that the dump waits
    for. With Podman it stays in its storage, from which `podman container restore` takes it; with
    others it is in the archive. Raises CheckpointError."""
    engine = engine_of(container)
    if engine == "podman":
        with Service(config.podman) as service:
            options = podman.CheckpointOptions(leave_running=leave_running, tcp_established=True)
            podman.checkpoint(service, container, options)
        return
    if not leave_running:
        raise AgentError(
            f"container {container} cannot be ended with its checkpoint: {engine} leaves it on; "
            "checkpoint the job with --leave-running"
        )
    limits = (config.jobs_look_limit, config.jobs_cuda_limit, config.jobs_network_limit)
    timeout_s = round(sum(limits) + config.jobs_dump_limit) + containerd.DEFAULT_TIMEOUT_S
    with Cri(_address(engine, config)) as cri:
        found = cri_containers.find(cri, container)
        containerd.checkpoint(cri, found, archive, timeout_s, stop)


def resume_rank(container: str, config: Config) -> None:
    """Have it run on if dump_rank was cut off: engines of LEFT_PAUSED leave it paused then. Waits
    for a dump that is under way. Raises CheckpointError."""
    engine = engine_of(container)
    if engine in LEFT_PAUSED:
        with Cri(_address(engine, config)) as cri:
            cri_containers.resume(
                cri, cri_containers.find(cri, container, cri_containers.PERHAPS_PAUSED)
            )


def resume(operation: Operation, config: Config) -> bool:
    """Have the container run on that an agent which has ended had its engine pause; False: it was
    not paused, or before that already. Waits for a dump that is under way.

    Raises CheckpointError if it may stand still.
    """
    if not operation.to_resume:
        return False
    with Cri(_address(operation.subject.engine, config)) as cri:
        found = cri_containers.find(cri, operation.to_resume, cri_containers.PERHAPS_PAUSED)
        return cri_containers.resume(cri, found)


def _address(engine: str, config: Config) -> str:
    return {
        "containerd": config.containerd or containerd.DEFAULT_ADDRESS,
        "crio": config.crio or containerd.CRIO_ADDRESS,
    }[engine]


def _podman(operation: Operation, config: Config, archive: Path, begin: float) -> Figures:
    options = podman.CheckpointOptions(export=archive, leave_running=not operation.stop)
    with Service(config.podman) as service:
        made = podman.checkpoint(service, operation.subject.name, options)
    stood = [made.criu[name] for name in ("freezing_time", "frozen_time") if name in made.criu]
    plugin = made.plugin
    size = archive.stat().st_size
    return Figures(
        duration_s=time.monotonic() - begin,
        downtime_s=sum(stood) / _PODMAN_WORKS if stood else None,
        size_bytes=size,
        stored_bytes=size,
        gpu_bytes=0 if plugin is None else plugin.staged_bytes,
        incremental=plugin is not None and plugin.same_bytes > 0,
        emulated=plugin is not None and plugin.emulated,
        verified=False,
    )


def keep_last(made: Path, count: int) -> None:
    """Remove all but the newest archives beside the one that was just made, which stays although by
    its name it may be the oldest, as a clock is set. Where any of them is built on an earlier
    checkpoint, or it cannot be told whether, all stay."""
    directory = made.parent
    archives = sorted(directory.glob("*.tar"))
    try:
        if any(gpustasis.open(one).inspect().parent is not None for one in archives):
            log.info("archives in %s are built on others: all stay", directory)
            return
    except CheckpointError as exc:
        log.warning("archives in %s stay: %s", directory, exc)
        return
    for one in set(archives[:-count]) - {made}:
        with suppress(OSError):
            one.unlink()
