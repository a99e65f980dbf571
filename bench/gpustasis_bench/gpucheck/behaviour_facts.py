# SPDX-License-Identifier: Apache-2.0
"""Reduce what the step behaviour found to what must be the same on a GPU and on the emulator, and
compare two such records.

Not compared: seconds, sizes and numbers of descriptors, mappings and threads. They differ between
GPUs and programs as well. Compared is whether they grow, come back, or are waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gpustasis_bench.gpucheck.cuda_process import CHECKPOINT, LOCK, RESTORE, ROUND_TRIP

Facts = dict[str, Any]
_Seen = Mapping[str, Any]

# What the emulator cannot act out, and why.
NOT_EMULATED = {
    "vmm": "it has no virtual memory management",
    "pool": "it has no memory pools",
    "ipc exporter": "it has no CUDA IPC; a setting makes every program an importer",
    "ipc, both": "the same; and the importer was lost before these calls were made",
}

_STAGED = 64 << 10  # bytes; a heap grows by less beside it
_WAITED = 0.25  # seconds; an answer that waits for nothing takes milliseconds
_GROWING = ("descriptors", "mappings", "uvm_mappings", "threads")


def facts(record: _Seen) -> Facts:
    """The facts of a record, as far as it has the parts: words, numbers, truth values, by a
    readable name that begins with the part's. Of a part that failed: how."""
    found: Facts = {}
    for part, body in _BODIES.items():
        if part in record:
            error = record[part].get("error")
            here = {"error": error} if error else body(record[part])
            found |= {f"{part}: {name}": value for name, value in here.items()}
    return found


def differences(one: _Seen, other: _Seen) -> list[str]:
    """A line for each fact that two records do not share, of the parts that both have."""
    both = PARTS_WITH_FACTS & one.keys() & other.keys()
    left, right = (facts({part: record[part] for part in both}) for record in (one, other))
    return [
        f"{name}: {one['backend']} {left.get(name)!r}, {other['backend']} {right.get(name)!r}"
        for name in sorted(left.keys() | right.keys())
        if left.get(name) != right.get(name)
    ]


def _verdict(text: str) -> str:
    """One of "intact", "wrong" and "no answer", without bytes and seconds; or else what it says."""
    if text.startswith(("intact ", "wrong ")):
        return text.partition(" ")[0]
    return "no answer" if "did not look" in text else text


def _names(calls: _Seen) -> Facts:
    """{"Restore": its answer's name, …}, and what is no call's answer as it is."""
    return {n: call["name"] if isinstance(call, Mapping) else call for n, call in calls.items()}


def _caller_killed(part: _Seen) -> Facts:
    found: Facts = {"Checkpoint before Restore": part["Checkpoint, for Restore"]["name"]}
    for name in (CHECKPOINT, RESTORE, LOCK):
        seen = part[name]
        last = seen["states"][-1]["seen"]
        found[f"{name}: its caller was killed"] = seen["killed"]
        found[f"{name}: answer"] = seen["call"]["name"]
        found[f"{name}: state at last"] = last[:2]
        found[f"{name}: brought back"] = _names(seen["brought_back"])
        found[f"{name}: memory"] = _verdict(seen["memory"])
        found[f"{name}: Lock and Unlock later"] = [call["name"] for call in seen["locks_again"]]
        if name == LOCK:
            waited = seen["states"][0]["longest_seconds"] > _WAITED
            found["Lock: the next GetState waits for the kernel"] = waited
    return found


def _target_killed(part: _Seen) -> Facts:
    found: Facts = {"status of the target": part["status"], "answer": part["call"]["name"]}
    taken = part["gpu_bytes_with_target"] - part["gpu_bytes_before"]
    left = part["gpu_bytes_after"] - part["gpu_bytes_before"]
    found["GPU memory came back"] = left < taken / 10
    found["GetState"] = part["GetState"]["name"]
    other = part["another target"]
    found["another target"] = [other[call]["name"] for call in ROUND_TRIP if call in other]
    found["another target: memory"] = _verdict(other["memory"])
    return found


def _long_kernel(part: _Seen) -> Facts:
    found = _names({n: call for n, call in part.items() if isinstance(call, Mapping)})
    for name in ("state_after_limit", "state_locked"):
        found[name] = part[name]
    for name in ("goes_on_after_limit", "goes_on"):
        found[name] = name in part  # the seconds until the next round
    found["Lock waits for the kernel"] = part[LOCK]["seconds"] > _WAITED
    found["memory"] = _verdict(part["memory"])
    return found


def _round_trips(part: _Seen) -> Facts:
    found: Facts = {"trips": len(part["trips"]), "memory": _verdict(part["memory"])}
    for who in ("target", "caller"):
        trips = [trip["caller"] if who == "caller" else trip for trip in part["trips"]]
        for what in _GROWING:
            grows = any(trip[what] > trips[0][what] for trip in trips)
            found[f"{what} of the {who} grow after the first trip"] = grows
    return found


def _kinds_of_memory(part: _Seen) -> Facts:
    found: Facts = {}
    for kind, seen in part.items():
        if not isinstance(seen, Mapping) or kind in NOT_EMULATED or kind == "ipc":
            continue
        if "not_made" in seen:
            found[f"{kind}: not made"] = True
            continue
        found[f"{kind}: uvm_mappings"] = seen["before"]["uvm_mappings"]
        found[f"{kind}: state before"] = seen["state"]
        for call in ROUND_TRIP:
            if call in seen:
                answer = [seen[call]["name"], f"then state {seen[call]['state_after']}"]
                found[f"{kind}: {call}"] = [*answer, _moved(seen[call]["staged_bytes"])]
        if "brought_back" in seen:
            found[f"{kind}: brought back"] = _names(seen["brought_back"])
        found[f"{kind}: memory"] = _verdict(seen["memory"])
    return found


def _moved(staged_bytes: int) -> str:
    if abs(staged_bytes) < _STAGED:
        return "stages nothing"
    return "stages" if staged_bytes > 0 else "gives the staging back"


_BODIES: dict[str, Callable[[_Seen], Facts]] = {
    "caller killed": _caller_killed,
    "target killed": _target_killed,
    "long kernel": _long_kernel,
    "round trips": _round_trips,
    "kinds of memory": _kinds_of_memory,
}

PARTS_WITH_FACTS = frozenset(_BODIES)
