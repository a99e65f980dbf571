# SPDX-License-Identifier: Apache-2.0
"""Reduce a trace to what must be the same on a GPU and on the emulator, and compare two of them.

Not compared: numbers of descriptors, sizes, addresses and times. They differ between GPUs as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

Facts = dict[str, Any]

_RESTORE_THREAD = re.compile(r"^cuda[0-9a-f]{11}$")
_DRIVER_SOCKET = re.compile(r"^@cuda-uvmfd-\d+-\d+@?$")
_HARMLESS_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/tty", "/dev/pts/")
_MAPPED_STAND_IN = "io_uring"  # what the emulator maps in place of a GPU's registers
_NOT_THE_DRIVERS = {"sd"}  # VmFlags that depend on the kernel's configuration
_LEAST_MAPPING = 64 << 10  # bytes; allocators and thread caches move less than this about

_TRANSITIONS = (
    ("Lock", "running", "locked"),
    ("Checkpoint", "locked", "checkpointed"),
    ("the second after Checkpoint", "checkpointed", "checkpointed_later"),
    ("Restore", "checkpointed_later", "restored"),
    ("Unlock", "restored", "unlocked"),
    ("the round trip", "running", "unlocked"),
)


def facts(trace: Mapping[str, Any]) -> Facts:
    """Return the facts of a trace: sorted lists, numbers, truth values, by a readable name."""
    found: Facts = {}
    caller = trace["caller"]["stages"]
    changes = [("cuInit in a caller", caller["loaded"], caller["initialized"])]
    changes += [(n, trace["stages"][a], trace["stages"][b]) for n, a, b in _TRANSITIONS]
    for name, before, after in changes:
        seen = _without_daemon if trace["emulator"] else dict
        _add_changes(found, name, seen(before), seen(after))
    _add_restore_thread(found, trace)
    _add_staging(found, trace)
    for call in trace["calls"]:
        if call["call"] == "GetState":
            found.setdefault("states reported", []).append(call["value"])
    charged = trace["cgroup"].get("charged_bytes")
    if charged and any(charged.values()):
        grown = charged["checkpointed"] - charged["running"]
        found["staging is charged to the target's cgroup"] = grown >= trace["gpu_bytes"] // 2
    for mistake, outcomes in trace["mistakes"].items():
        for call, outcome in outcomes.items():
            answer = [outcome["name"]]
            if "state_after" in outcome:
                answer.append(f"then state {outcome['state_after']}")
            found[f"{mistake}: {call}"] = answer
    return found


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return a line for each fact that two traces do not share; facts only one could see are kept
    out if they hang on the machine (cgroups), and reported otherwise."""
    left, right = facts(one), facts(other)
    machine_bound = {"staging is charged to the target's cgroup"}
    lines = []
    for name in sorted(left.keys() | right.keys()):
        if name in machine_bound and (name not in left or name not in right):
            continue
        if left.get(name) != right.get(name):
            lines.append(
                f"{name}: {one['backend']} {left.get(name)!r}, "
                f"{other['backend']} {right.get(name)!r}"
            )
    return lines


def _add_changes(
    found: Facts, name: str, before: Mapping[str, Any], after: Mapping[str, Any]
) -> None:
    for what, kinds_of in (("descriptors", _descriptor_kinds), ("threads", _thread_kinds)):
        old, new = kinds_of(before[what]), kinds_of(after[what])
        found[f"{name}: {what} gone"] = sorted(old - new)
        found[f"{name}: {what} new"] = sorted(new - old)
    found[f"{name}: mappings gone"] = _mapping_kinds_only_in(before["mappings"], after["mappings"])
    found[f"{name}: mappings new"] = _mapping_kinds_only_in(after["mappings"], before["mappings"])


def _without_daemon(stage: Mapping[str, Any]) -> dict[str, Any]:
    """A stage without the sockets that lead to the emulator's GPUs: no driver has such."""
    kept = [
        one
        for one in stage["descriptors"]
        if not (
            one["socket"] and one["socket"]["type"] == "seqpacket" and not one["socket"]["name"]
        )
    ]
    return {**stage, "descriptors": kept}


def _descriptor_kinds(descriptors: Iterable[Mapping[str, Any]]) -> set[str]:
    kinds = set()
    for one in descriptors:
        kind = _descriptor_kind(one)
        if kind is not None:
            kinds.add(kind)
    return kinds


def _descriptor_kind(one: Mapping[str, Any]) -> str | None:
    words = [str(one["kind"]), str(one["access"])]
    if one["kind"] in ("file", "directory"):
        return None  # the program's own
    if one["kind"] in ("device", _MAPPED_STAND_IN):
        if str(one["link"]).startswith(_HARMLESS_DEVICES):
            return None
        words = ["GPU device"]  # nvidiactl, nvidia-uvm, nvidia0: the emulator has others for them
    if one["socket"]:
        socket = one["socket"]
        is_driver = _DRIVER_SOCKET.match(str(socket["name"])) is not None
        words = [f"{socket['type']} socket", "@cuda-uvmfd-…" if is_driver else "unnamed"]
        words += ["listening"] if socket["listening"] else []
    words += ["nonblocking"] if one["nonblock"] else []
    words += ["close-on-exec"] if one["cloexec"] else []
    return " ".join(words)


def _thread_kinds(threads: Iterable[Mapping[str, Any]]) -> set[str]:
    kinds = set()
    for one in threads:
        comm = str(one["comm"])
        kinds.add("the restore thread" if _RESTORE_THREAD.match(comm) else comm)
    return kinds


def _mapping_kind(one: Mapping[str, Any]) -> str | None:
    path = str(one["path"])
    if path.startswith(("/dev/zero", "/memfd:/dev/zero")):
        return f"{one['perms']} shared anonymous"
    if path.startswith("/dev/") or _MAPPED_STAND_IN in path:
        return "GPU device"
    if path.startswith("/") or path in ("[heap]", "[stack]", "[vdso]", "[vvar]", "[vsyscall]"):
        return None
    return f"{one['perms']} anonymous"


def _ranges(mappings: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[int, int]]]:
    ranges: dict[str, list[tuple[int, int]]] = {}
    for one in mappings:
        kind = _mapping_kind(one)
        if kind is not None:
            ranges.setdefault(kind, []).append((int(one["start"], 16), int(one["end"], 16)))
    return ranges


def _subtract(
    ranges: list[tuple[int, int]], without: list[tuple[int, int]]
) -> list[tuple[int, int]]:
    left = []
    for start, end in ranges:
        begin = start
        for cut_start, cut_end in sorted(without):
            if cut_end <= begin or cut_start >= end:
                continue
            if cut_start > begin:
                left.append((begin, cut_start))
            begin = max(begin, cut_end)
        if begin < end:
            left.append((begin, end))
    return left


def _mapping_kinds_only_in(
    mappings: Iterable[Mapping[str, Any]], others: Iterable[Mapping[str, Any]]
) -> list[str]:
    mine, theirs = _ranges(mappings), _ranges(others)
    kinds = []
    for kind, ranges in mine.items():
        only = _subtract(ranges, theirs.get(kind, []))
        if any(end - start >= _LEAST_MAPPING for start, end in only):
            kinds.append(kind)
    return sorted(kinds)


def _add_restore_thread(found: Facts, trace: Mapping[str, Any]) -> None:
    stage = trace["stages"]["running"]
    tid = trace["restore_thread"]
    thread = next((t for t in stage["threads"] if t["tid"] == tid), None)
    named = thread is not None and _RESTORE_THREAD.match(thread["comm"]) is not None
    found["the restore thread is named cuda and 11 digits"] = named
    if thread is None or not named:
        return
    value = int(thread["comm"][4:], 16)
    ends = {d["fd"]: (d["kind"], d["access"]) for d in stage["descriptors"]}
    found["its name holds a pipe's write end and a pipe's read end"] = ends.get(value >> 22) == (
        "pipe",
        "w",
    ) and ends.get(value & 0x3FFFFF) == ("pipe", "r")
    found["it waits in poll"] = "poll" in thread["wchan"]


def _add_staging(found: Facts, trace: Mapping[str, Any]) -> None:
    """Where the GPU's memory is after Checkpoint: the kinds of new resident memory, by mapping."""
    before = _ranges(trace["stages"]["locked"]["mappings"])
    kinds: dict[str, int] = {}
    flags: set[str] = set()
    for one in trace["stages"]["checkpointed"]["mappings"]:
        kind = _mapping_kind(one)
        if kind is None or one["rss_bytes"] < _LEAST_MAPPING:
            continue
        here = [(int(one["start"], 16), int(one["end"], 16))]
        new = sum(end - start for start, end in _subtract(here, before.get(kind, [])))
        if new >= _LEAST_MAPPING:
            kinds[kind] = kinds.get(kind, 0) + min(new, one["rss_bytes"])
            flags.update(one["vm_flags"])
    found["staging: kinds of memory"] = sorted(kinds)
    found["staging holds all GPU memory"] = sum(kinds.values()) >= trace["gpu_bytes"]
    found["staging: VmFlags"] = sorted(flags - _NOT_THE_DRIVERS)
