# SPDX-License-Identifier: Apache-2.0
"""How the driver's calls behave: how fast, several at once, interrupted, on kinds of memory.

One experiment for each name in PARTS, each with its own processes and its own time. One that fails
is recorded as {"error": …}, beside what it had found, and the next goes on. What a target says of
its memory is in "memory", wherever that is looked at.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from gpustasis import process
from gpustasis.errors import CheckpointError
from gpustasis_bench.gpucheck import behaviour_faults as faults
from gpustasis_bench.gpucheck.cuda_process import (
    CHECKPOINT,
    LOCK,
    RESTORE,
    ROUND_TRIP,
    UNLOCK,
    Call,
    CudaTarget,
    Found,
    Lab,
    counters,
    gpu_bytes_used,
)
from gpustasis_bench.gpucheck.target import TargetError

Save = Callable[[], None]

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
_MALLOC_ASKS = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}  # malloc asks for huge pages itself
_RATES_GIB = ((1, 0), (1, 50), (4, 0), (16, 0))  # and how much of it is zeroes, in percent
_ONCE_GIB = 16  # from there on one round trip must do: a GiB may take a second
_HUGE_GIB = 4
_HALF_GIB = 3  # each of two at once
_ROUND_TRIPS = 10
_KIND_GIB = 1 / 16
_KINDS = ("plain", "managed", "vmm", "pool", "registered", "pinned")


def _rates(lab: Lab, found: Found, save: Save) -> None:
    caller = lab.caller()
    for gib, zero_percent in _RATES_GIB:
        run: Found = {"bytes": lab.bytes_of(gib), "zero_percent": zero_percent}
        found[f"{gib} GiB, {zero_percent} % zero"] = run
        run["gpu_bytes_before"] = gpu_bytes_used()
        target = lab.target(gib, zero_percent=zero_percent)
        for name in ("first",) if gib >= _ONCE_GIB else ("first", "second"):
            trip = run[name] = {}
            trip["gpu_bytes_running"] = gpu_bytes_used()
            for call in ROUND_TRIP:
                trip[call] = lab.measured(caller, call, target)
                if call in {CHECKPOINT, RESTORE}:
                    trip[f"gpu_bytes_after_{call}"] = gpu_bytes_used()
        run["memory"] = lab.verify(target)
        target.kill()
        save()


def _huge_pages(lab: Lab, found: Found, save: Save) -> None:
    enabled = _HUGE_PAGES / "enabled"
    for name in ("enabled", "defrag", "shmem_enabled"):
        found[name] = (_HUGE_PAGES / name).read_text(encoding="ascii").strip()
    runs = found["runs"] = []
    caller = lab.caller()

    def run(mode: str, env: dict[str, str]) -> None:
        target = lab.target(_HUGE_GIB, env=env)
        is_set = enabled.read_text(encoding="ascii").strip()
        runs.append({"mode": mode, "enabled": is_set, **lab.round_trip(caller, target)})
        target.kill()
        save()

    if lab.emulated:  # no finding of an emulator is worth a setting of the whole system
        run("as found", {})
    else:
        _set_by_turns(enabled, found, run)
    run("as found, malloc asks", _MALLOC_ASKS)


def _set_by_turns(enabled: Path, found: Found, run: Callable[[str, dict[str, str]], None]) -> None:
    with _kept(enabled):
        for mode in ("madvise", "always", "madvise", "always"):
            try:
                enabled.write_text(mode, encoding="ascii")
            except OSError as exc:
                found["not_set"] = str(exc)
                run("as found", {})
                return
            run(mode, {})


@contextmanager
def _kept(enabled: Path) -> Iterator[None]:
    """Set it back to what it is: "always [madvise] never" has the one that holds in brackets."""
    was = enabled.read_text(encoding="ascii").partition("[")[2].partition("]")[0]
    try:
        yield
    finally:
        try:
            enabled.write_text(was, encoding="ascii")
        except OSError as exc:
            sys.stderr.write(f"gpu-check: {enabled} is not set to {was} again: {exc}\n")


def _two_at_once(lab: Lab, found: Found, save: Save) -> None:
    callers = [lab.caller(), lab.caller()]
    targets = [lab.target(_HALF_GIB), lab.target(_HALF_GIB)]

    def each(name: str) -> list[Found]:
        return [lab.measured(callers[0], name, target) for target in targets]

    def two_processes(name: str) -> list[Found]:
        calls = [Call(lab, callers[i], name, targets[i]) for i in range(2)]
        return [call.wait(lab.left) for call in calls]

    def two_threads(name: str) -> Found:
        return _from_threads(lab, name, targets)

    for way in (each, two_processes, two_threads):
        run: Found = {}
        found[way.__name__] = run
        for name in ROUND_TRIP:
            run[name] = way(name) if name in {CHECKPOINT, RESTORE} else each(name)
        run["brought_back"] = [lab.bring_back(lab.caller(), target) for target in targets]
        save()
    found["memory"] = [lab.verify(target) for target in targets]


def _from_threads(lab: Lab, name: str, targets: list[CudaTarget]) -> Found:
    argv = [sys.executable, "-m", "gpustasis_bench.gpucheck.thread_caller", name]
    argv += [str(target.pid) for target in targets]
    try:
        ended = process.run(argv, timeout_s=lab.left, apart=True)
    except TimeoutError as exc:
        raise TargetError(f"{name} from two threads: {exc}") from exc
    try:
        return dict(json.loads(ended.output.splitlines()[-1]))
    except (ValueError, IndexError):
        raise TargetError(f"{name} from two threads, {ended.ending}: {ended.output}") from None


def _kinds_of_memory(lab: Lab, found: Found, save: Save) -> None:
    caller = lab.caller()
    for kind in _KINDS:
        try:
            target = lab.target(_KIND_GIB, kind)
            found[kind] = steps_on(lab, target)
            target.kill()
        except TargetError as exc:
            found[kind] = {"not_made": str(exc)}
        save()
    try:
        exporter = lab.target(_KIND_GIB, "ipc exporter", name="exporter")
        importer = lab.target(_KIND_GIB, "ipc importer", name="importer")
    except TargetError as exc:
        found["ipc"] = {"not_made": str(exc)}
        return
    found["ipc exporter"] = steps_on(lab, exporter)
    save()
    found["ipc importer"] = steps_on(lab, importer)
    save()
    # What a job needs: both locked, then both checkpointed.
    both = found["ipc, both"] = {}
    for name in ROUND_TRIP:
        both[name] = [lab.call(caller, name, target) for target in (exporter, importer)]
    both["brought_back"] = [lab.bring_back(lab.caller(), t) for t in (exporter, importer)]
    both["memory"] = [lab.verify(target) for target in (exporter, importer)]


def steps_on(lab: Lab, target: CudaTarget) -> Found:
    """Each call until one fails, and the state after it; then whether its memory is right."""
    caller = lab.caller()
    found: Found = {"before": counters(target.pid), "state": lab.state(caller, target)}
    for name in ROUND_TRIP:
        found[name] = lab.measured(caller, name, target)
        if found[name]["result"] is None:
            caller = lab.caller()
        found[name]["state_after"] = lab.state(caller, target)
        if found[name]["result"] != 0:
            found["brought_back"] = lab.bring_back(caller, target)
            break
    found["memory"] = lab.verify(target)
    return found


def _round_trips(lab: Lab, found: Found, save: Save) -> None:
    caller, target = lab.caller(), lab.target(1 / 4)
    found["before"] = counters(target.pid)
    trips = found["trips"] = []
    for _ in range(_ROUND_TRIPS):
        seconds = {}
        for name in ROUND_TRIP:
            answer = lab.call(caller, name, target)
            if answer["result"] != 0:
                raise TargetError(f"round trip {len(trips) + 1}, {name}: {answer['name']}")
            seconds[name] = answer["seconds"]
        trips.append({"seconds": seconds, **counters(target.pid)})
        trips[-1]["caller"] = counters(caller.pid)
    found["memory"] = lab.verify(target)


def _sync_while_locked(lab: Lab, found: Found, save: Save) -> None:
    caller, target = lab.caller(), lab.target(_KIND_GIB, "sync")
    found[LOCK] = lab.call(caller, LOCK, target)
    found["rounds_locked"] = faults.rounds_in(target, 0.2)
    found["rounds_locked_later"] = faults.rounds_in(target, 0.8)
    found[UNLOCK] = lab.call(caller, UNLOCK, target)
    found["rounds_unlocked"] = faults.rounds_in(target, 0.2)
    found["memory"] = lab.verify(target)


_Part = tuple[float, Callable[[Lab, Found, Save], None]]

_PARTS: dict[str, _Part] = {  # seconds and body, the most wanted first
    "rates": (60.0, _rates),
    "huge pages": (60.0, _huge_pages),
    "two at once": (40.0, _two_at_once),
    "caller killed": (60.0, faults.caller_killed),
    "kinds of memory": (40.0, _kinds_of_memory),
    "long kernel": (40.0, faults.long_kernel),
    "round trips": (20.0, _round_trips),
    "target killed": (30.0, faults.target_killed),
    "stopped target": (20.0, faults.stopped_target),
    "sync while locked": (20.0, _sync_while_locked),
}

PARTS = tuple(_PARTS)


def fill_behaviour(
    record: Found,
    parts: Collection[str],
    *,
    emulated: bool,
    module: Path | None,
    save: Save,
    tell: Callable[[str], None],
) -> None:
    """Do these of PARTS and put what they find into `record`, by their names.

    module: as Lab's. save: called whenever there is more in `record`. tell: gets a line for each
    part.
    """
    for name in PARTS:
        if name not in parts:
            continue
        seconds, body = _PARTS[name]
        found: Found = {}
        record[name] = found
        with Lab(emulated=emulated, seconds=seconds, module=module) as lab:
            try:
                body(lab, found, save)
            except (CheckpointError, OSError, KeyError, ValueError) as exc:
                found["error"] = f"{type(exc).__name__}: {exc}"
            found["seconds"] = round(seconds - lab.margin, 1)
            save()
        tell(f"  {name}: {found['seconds']} s {found.get('error', '')}".rstrip())


def memories(found: object, *path: str) -> Iterator[tuple[str, str]]:
    """Each verdict on a target's memory in what was found, with where it is: names of experiments,
    and of what is in them."""
    if isinstance(found, str) and "memory" in path:
        yield ", ".join(path), found
    elif isinstance(found, Mapping):
        for name, one in found.items():
            yield from memories(one, *path, name)
    elif isinstance(found, list):
        for number, one in enumerate(found, 1):
            yield from memories(one, *path, str(number))
