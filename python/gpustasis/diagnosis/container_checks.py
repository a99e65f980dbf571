# SPDX-License-Identifier: Apache-2.0
"""Whether a container can be checkpointed as it is now. Nothing is changed, and nobody stopped."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from gpustasis import nccl, nvml
from gpustasis.answering import ANSWER_S, TimedOutError, answer_within
from gpustasis.criu.plugin import RUNC_FILE, parse_options
from gpustasis.diagnosis import Finding, note, ok, problem
from gpustasis.diagnosis.container import PROC, Container, read_mounts, unknown
from gpustasis.driver import Driver, ProcessState, list_devices_within
from gpustasis.errors import CheckpointError, CriuError, DriverError
from gpustasis.task import misleading_thread, read_task, restore_pipes
from gpustasis.text import mib, plural

_GROUPS = Path("/sys/fs/cgroup")
_ESTABLISHED = "01"  # TCP_ESTABLISHED, linux/tcp_states.h
_UNDUMPABLE = {  # what /proc/PID/fd says, as far as CRIU knows no way to dump it
    "anon_inode:[io_uring]": "io_uring",
    "anon_inode:[perf_event]": "perf events",
    "anon_inode:[userfaultfd]": "a userfaultfd",
}
_TAKE_ALONG = "tcp-established"
_MARGIN = 64 << 20  # bytes that have to stay free, as the plugin has it
_SHOWN = 5
_MISLED = "end that process: it would have the driver, asked by root, write to that file"


def check(container: Container, driver_library: str, nvml_library: str) -> list[Finding]:
    """All findings. Processes that end meanwhile are passed over."""
    frozen = _frozen(container)
    misled = [text for pid in container.tasks if (text := misleading_thread(pid))]
    driver: Driver | DriverError
    users: list[int] = []
    try:
        loaded = Driver(driver_library)
        if not misled:
            users = _users(container, loaded)
        driver = loaded
    except DriverError as exc:
        driver = exc
    return [
        _container(container, frozen),
        *(problem("threads", text, _MISLED) for text in misled),
        *_tasks(container),
        *_mounts(container),
        *_files(container, _stand_ins(driver, users)),
        *_connections(container),
        *_gpu_files(container, driver, users),
        *_nccl(users, driver),
        *([] if isinstance(driver, DriverError) else _states(users, frozen, driver)),
        *([_memory(container, nvml_library)] if users else []),
    ]


def _users(container: Container, driver: Driver) -> list[int]:
    """The processes that use CUDA. Raises TimedOutError, and asks no more."""
    found = []
    for pid in container.tasks:
        try:
            ask = partial(driver.get_restore_thread_id, pid)
            answer_within(ANSWER_S, f"GetRestoreThreadId on process {pid}", ask)
        except TimedOutError:
            raise
        except DriverError:
            continue
        found.append(pid)
    return found


def _stand_ins(driver: Driver | DriverError, users: list[int]) -> list[int]:
    """Users of the emulator: io_uring and perf events stand for its GPU's files in them."""
    if isinstance(driver, DriverError) or not users:
        return []
    try:
        return users if any(device.emulated for device in list_devices_within(driver)) else []
    except DriverError:
        return []


def _container(container: Container, frozen: bool) -> Finding:
    count = len(container.tasks)
    text = f"{container.name}: {plural(count, 'process', 'es')}, first {container.init}"
    if frozen and container.resume:
        text += "; it is paused, as a checkpoint may leave it"
        return problem("container", text, container.resume)
    if frozen:
        return note("container", f"{text}; it is paused, criu >= 4.1 thaws it for the GPU")
    return ok("container", text)


def _frozen(container: Container) -> bool:
    path = container.group.lstrip("/")
    for place, frozen in (
        (_GROUPS / path / "cgroup.freeze", ("1",)),
        # FREEZING: some tasks do not stand yet.
        (_GROUPS / "freezer" / path / "freezer.state", ("FREEZING", "FROZEN")),
    ):
        try:
            if place.read_text().strip() in frozen:
                return True
        except OSError:
            continue
    return False


def _tasks(container: Container) -> Iterator[Finding]:
    for pid in container.tasks:
        try:
            task = read_task(pid)
        except CheckpointError:
            continue
        if task.tracer:
            text = (
                f"process {pid} is traced by process {task.tracer}, and CRIU would have to trace it"
            )
            yield problem("debugger", text, "end the debugger, or let it detach")


def _mounts(container: Container) -> Iterator[Finding]:
    name = "mounts"
    if container.config is None:
        yield note(name, "its config.json was not found, so they cannot be compared with it")
        return
    found = unknown(read_mounts(container.init), container.config)
    if not found:
        yield ok(name, "all in its config.json")
    for mount in found[:_SHOWN]:
        yield problem(
            name,
            f"{mount.point} ({mount.root} of {mount.source}, {mount.kind}) is in no config.json: a "
            "hook or a person has mounted it, and CRIU cannot find it again",
            "give the container this file by a volume or, for a GPU, by CDI; unmount it otherwise",
        )
    if len(found) > _SHOWN:
        yield problem(name, f"and {len(found) - _SHOWN} more like these", "see above")


def _files(container: Container, stand_ins: list[int]) -> Iterator[Finding]:
    for pid in container.tasks:
        if pid in stand_ins:
            continue
        kinds = {_UNDUMPABLE[target] for target in _targets(pid) if target in _UNDUMPABLE}
        for kind in sorted(kinds):
            yield problem(
                "open files",
                f"process {pid} uses {kind}, which CRIU cannot dump",
                "start it so that it does not (for io_uring: UV_USE_IO_URING=0 for libuv, or "
                "sysctl kernel.io_uring_disabled=2)",
            )


def _targets(pid: int) -> list[str]:
    """What its descriptors lead to."""
    found: list[str] = []
    with suppress(OSError):  # it is gone
        for entry in os.scandir(PROC / str(pid) / "fd"):
            with suppress(FileNotFoundError):  # the descriptor is closed
                found += [os.readlink(entry.path)]
    return found


def _connections(container: Container) -> Iterator[Finding]:
    sockets = {
        match[1]
        for pid in container.tasks
        for target in _targets(pid)
        if (match := re.fullmatch(r"socket:\[(\d+)\]", target))
    }
    count = 0
    for table in ("tcp", "tcp6"):
        try:
            lines = (PROC / str(container.init) / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        rows = [line.split() for line in lines]
        count += sum(len(r) > 9 and r[3] == _ESTABLISHED and r[9] in sockets for r in rows)
    name, line = "TCP connections", f"the line {_TAKE_ALONG} in {RUNC_FILE}"
    if count and _takes_connections():
        yield ok(name, f"{count} open; {RUNC_FILE} has them taken along")
    elif count and container.resume:
        yield problem(name, f"{count} open: the checkpoint fails without {line}", f"add {line}")
    elif count:
        yield note(
            name,
            f"{count} open: the checkpoint fails unless it is told to take them along",
            f"podman container checkpoint --{_TAKE_ALONG}, or {line}",
        )


def _takes_connections() -> bool:
    try:
        options = parse_options(Path(RUNC_FILE).read_text(errors="replace"), RUNC_FILE)
    except (OSError, CriuError):  # the finding on CRIU's configuration says what is wrong with it
        return False
    return any(option.name == _TAKE_ALONG for option in options)


def _gpu_files(
    container: Container, driver: Driver | DriverError, users: list[int]
) -> Iterator[Finding]:
    name = "GPU processes"
    holders = [pid for pid in container.tasks if _holds_gpu_files(pid)]
    if isinstance(driver, TimedOutError) or (isinstance(driver, DriverError) and holders):
        known = f"{_pids(holders)}; " if holders else ""
        remedy = "see gpustasis doctor without --container"
        yield problem(name, f"{known}{driver}", remedy)
        return
    yield ok(name, _pids(users) if users else "none uses CUDA")
    for pid in sorted(set(holders) - set(users)):
        if any(was_forked_by(pid, user) for user in users):
            yield ok(
                name, f"process {pid} has inherited a GPU's files: a checkpoint leaves them out"
            )
            continue
        yield problem(
            name,
            f"process {pid} has a GPU's files open and does not use CUDA, so the driver does not "
            "close them, and it has not inherited them from a process that does",
            "end it before a checkpoint; workers of a process that uses CUDA can be forked by it",
        )


def _nccl(users: list[int], driver: Driver | DriverError) -> Iterator[Finding]:
    seen = [nccl.look(pid) for pid in users]
    try:
        version = None if isinstance(driver, DriverError) else driver.version()
    except DriverError:
        version = None
    shares = sum(one.has_nccl for one in seen) > 1
    for one in seen:
        for found in nccl.findings(one, version, shares_host=shares, stands=False):
            make = problem if found.breaks else note
            yield make("NCCL", f"{found.text} ({found.name})", found.remedy)


def _states(users: list[int], frozen: bool, driver: Driver) -> Iterator[Finding]:
    """The driver answers through a thread of the process, so one that stands still is not asked."""
    name = "driver state"
    silent = False
    for pid in users:
        try:
            stopped = frozen or read_task(pid).state in ("T", "t")
        except CheckpointError:
            continue
        if stopped:
            yield note(name, f"process {pid} stands still, so the driver was not asked")
            continue
        if silent:
            yield note(name, f"process {pid}: not asked, for the driver does not answer")
            continue
        try:
            state = answer_within(ANSWER_S, "GetState", partial(driver.get_state, pid))
        except DriverError as exc:
            silent = isinstance(exc, TimedOutError)
            yield problem(name, f"process {pid}: {exc}", "see what the kernel's log says")
            continue
        if state is ProcessState.RUNNING:
            yield ok(name, f"process {pid}: running")
        elif state in (ProcessState.LOCKED, ProcessState.CHECKPOINTED):
            yield problem(
                name,
                f"process {pid} is {state.name.lower()}: a dump or a tool has left it so",
                f"gpustasis recover {pid} -D DIR with the directory of that dump",
            )
        else:
            text = f"process {pid} is {state.name.lower()}"
            yield problem(name, text, "wait, or start the job anew if it stays so")


def _memory(container: Container, nvml_library: str) -> Finding:
    """The driver stages GPU memory in memory of the task, charged to its control group."""
    name = "memory"
    try:
        used = nvml.memory_used(nvml_library)
    except DriverError as exc:
        return note(name, f"how much GPU memory is in use is not known: {exc}")
    free, where = room(container.group)
    text = f"{mib(used)} of GPU memory are in use on this host, {mib(free)} free {where}"
    text += f", of which {mib(_MARGIN)} are to stay so"
    if used + _MARGIN > free:
        return problem(
            name,
            f"{text}: staging it there for a dump may not fit, and the job be killed",
            "raise the limit, or free memory; as much host memory as GPU memory is needed",
        )
    return ok(name, text)


def room(group: str, groups: Path = _GROUPS) -> tuple[int, str]:
    """Bytes that a control group may still take, and by whose limit: each one above it may have one
    too, as a pod's has. Cached files are given up first. groups: where hierarchies are mounted."""
    meminfo = (PROC / "meminfo").read_text()
    match = re.search(r"^MemAvailable:\s*(\d+) kB", meminfo, re.MULTILINE)
    free, where = (int(match[1]) * 1024 if match else 0), "on the host"
    path = Path(group.lstrip("/"))
    for level in (path, *path.parents):
        for base, limit, usage, cached in (
            (groups, "memory.max", "memory.current", "(?:in)?active_file"),
            (
                groups / "memory",
                *("memory.limit_in_bytes", "memory.usage_in_bytes", "total_(?:in)?active_file"),
            ),
        ):
            try:
                text = (base / level / limit).read_text().strip()
                used = int((base / level / usage).read_text())
                stat = (base / level / "memory.stat").read_text()
                files = map(int, re.findall(rf"^{cached} (\d+)$", stat, re.MULTILINE))
                left = int(text) - max(0, used - sum(files)) if text != "max" else free
            except (OSError, ValueError):
                continue
            if left < free:
                free, where = max(0, left), f"by {limit} of control group /{level}"
    return free, where


_GPU_MAPPING = re.compile(r"^(\S+) \S+ (\S+ \S+ \d+) +(/dev/nvidia.*)$", re.MULTILINE)


def _holds_gpu_files(pid: int) -> bool:
    if any(target.startswith("/dev/nvidia") for target in _targets(pid)):
        return True
    return bool(_gpu_mappings(pid))


def _gpu_mappings(pid: int) -> set[tuple[str, ...]]:
    """Addresses, offset and file of each mapping of a GPU's; of a process that is gone, none."""
    try:
        return set(_GPU_MAPPING.findall((PROC / str(pid) / "maps").read_text(errors="replace")))
    except OSError:
        return set()


def was_forked_by(pid: int, user: int) -> bool:
    """As the plugin sees it, which looks closer (src/cuda_plugin/inherited_files.cpp): it holds the
    pipes of the other's restore thread, or has no file open and maps what the other maps."""
    if restore_pipes(pid):
        return False  # it has a driver of its own
    pipes = [(number, f"{PROC}/{user}/fd/{number}") for number in restore_pipes(user)]
    with suppress(OSError):
        if pipes and all(
            os.readlink(theirs) == os.readlink(f"{PROC}/{pid}/fd/{number}")
            for number, theirs in pipes
        ):
            return True
    mapped = _gpu_mappings(pid)
    return (
        bool(mapped)
        and mapped <= _gpu_mappings(user)
        and not any(target.startswith("/dev/nvidia") for target in _targets(pid))
    )


def _pids(pids: list[int]) -> str:
    return f"process{'es' if len(pids) > 1 else ''} {', '.join(map(str, pids))}"
