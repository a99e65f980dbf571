# SPDX-License-Identifier: Apache-2.0
"""What clients can ask for, and the answers: JSON objects. docs/agent.md, "Protocol".

Whatever a client sends is hostile until it is checked here. Answers that take long are not waited
for here: the server does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpustasis.agent.config import PROTOCOL_VERSION, Config, Target
from gpustasis.agent.operations import Operation
from gpustasis.agent.peers import Peer, may_see, require_same_pids
from gpustasis.agent.queue import Queue
from gpustasis.agent.subjects import (
    Held,
    Subject,
    from_pidfile,
    parse_container,
    require_all_of,
    require_not_ours,
)
from gpustasis.errors import AgentError

SHOWN = 50  # operations in a status
_MAX_PID = 1 << 22  # PID_MAX_LIMIT of linux/threads.h


class RequestError(AgentError):
    """A request that is none."""


@dataclass(frozen=True, slots=True)
class Answer:
    """wait_for: the client wants to hear when that has ended; then it is answered."""

    fields: dict[str, Any]
    wait_for: Operation | None = None


def parse(line: bytes) -> dict[str, Any]:
    """Raises RequestError."""
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError) as exc:
        raise RequestError("a request is one JSON object on a line") from exc
    if not isinstance(raw, dict):
        raise RequestError("a request is one JSON object on a line")
    if raw.get("version") != PROTOCOL_VERSION:
        raise RequestError(
            f"a request of version {str(raw.get('version'))[:20]!r}; this agent speaks "
            f"{PROTOCOL_VERSION}"
        )
    return raw


class Requests:
    """What the agent does when it is asked."""

    def __init__(self, config: Config, queue: Queue, next_due: Callable[[str], float]) -> None:
        """next_due: of a target by its name: when it is due again, in seconds since 1970; 0: not by
        itself."""
        self._config = config
        self._queue = queue
        self._next_due = next_due
        self._since = time.time()
        self._known: dict[str, tuple[Callable[[Peer, dict[str, Any]], Answer], set[str]]] = {
            "checkpoint": (
                self._checkpoint,
                {"pid", "start_time", "container", "target", "stop", "wait"},
            ),
            "cancel": (self._cancel, {"id"}),
            "show": (self._show, {"id", "wait"}),
            "status": (self._status, set()),
        }

    def answer(self, peer: Peer, raw: dict[str, Any]) -> Answer:
        """Raises AgentError."""
        verb = raw.get("do")
        if not isinstance(verb, str) or verb not in self._known:
            raise RequestError(f"a request does one of {', '.join(self._known)}")
        act, keys = self._known[verb]
        if unknown := raw.keys() - keys - {"version", "do"}:
            raise RequestError(f"{verb}: there is no key {min(unknown)[:40]!r}")
        return act(peer, raw)

    def _checkpoint(self, peer: Peer, raw: dict[str, Any]) -> Answer:
        stop, wait = _flag(raw, "stop"), _flag(raw, "wait")
        named = [key for key in ("pid", "container", "target") if key in raw]
        if len(named) != 1 or ("start_time" in raw and named != ["pid"]):
            raise RequestError("checkpoint: name one of 'pid', 'container' and 'target'")
        process, target = None, None
        if "pid" in raw:
            process = self._process(peer, raw)
            subject = process.subject()
        elif not peer.is_root:
            raise AgentError(f"user {peer.uid} may checkpoint processes of their own, by pid")
        elif "container" in raw:
            found = parse_container(_text(raw, "container"))
            if found is None:
                raise RequestError("checkpoint: 'container' is ENGINE:NAME")
            subject = found
        else:
            target = self._config.target(_text(raw, "target"))
            if target is None:
                raise AgentError(f"the configuration has no target {raw['target']!r}")
            process, subject = find(target)
        operation = Operation(
            subject=subject, uid=peer.uid, stop=stop, target=target.name if target else ""
        )
        self._queue.submit(operation, process, target)
        return Answer({"operation": operation.as_json()}, operation if wait else None)

    def _process(self, peer: Peer, raw: dict[str, Any]) -> Held:
        pid, start_time = _number(raw, "pid", 2, _MAX_PID), None
        if "start_time" in raw:
            start_time = _number(raw, "start_time", 0, 1 << 63)
        require_same_pids(peer)
        process = Held(pid, start_time)
        try:
            if not peer.is_root:
                require_all_of(pid, peer.uid)
                process.require_alive(pid)  # what was looked at was of this one
            require_not_ours(pid)
        except AgentError:
            process.close()
            raise
        return process

    def _cancel(self, peer: Peer, raw: dict[str, Any]) -> Answer:
        operation = self._find(peer, raw)
        done = self._queue.cancel(operation)
        return Answer({"operation": operation.as_json(), "done": done})

    def _show(self, peer: Peer, raw: dict[str, Any]) -> Answer:
        operation = self._find(peer, raw)
        wait = _flag(raw, "wait")
        return Answer({"operation": operation.as_json()}, operation if wait else None)

    def _status(self, peer: Peer, raw: dict[str, Any]) -> Answer:
        waiting, at_work = self._queue.counts()
        seen = [one.as_json() for one in self._queue.known() if may_see(peer, one)]
        targets = [
            {"name": one.name, "next_due": self._next_due(one.name)} for one in self._config.targets
        ]
        return Answer(
            {
                "since": self._since,
                "waiting": waiting,
                "at_work": at_work,
                "targets": targets if peer.is_root else [],
                "operations": seen[-SHOWN:],
            }
        )

    def _find(self, peer: Peer, raw: dict[str, Any]) -> Operation:
        found = self._queue.operations.get(_text(raw, "id"))
        if found is None or not may_see(peer, found):
            raise AgentError(f"there is no operation {raw['id'][:40]!r}")
        return found


def find(target: Target) -> tuple[Held | None, Subject]:
    """The process or container of a target, as it is now. Raises AgentError."""
    if target.container is not None:
        return None, target.container
    assert target.pidfile is not None
    process = from_pidfile(target.pidfile)
    return process, process.subject()


def _flag(raw: dict[str, Any], key: str) -> bool:
    value = raw.get(key, False)
    if not isinstance(value, bool):
        raise RequestError(f"{key!r} is true or false")
    return value


def _number(raw: dict[str, Any], key: str, low: int, high: int) -> int:
    value = raw[key]
    if type(value) is not int or not low <= value <= high:
        raise RequestError(f"{key!r} is a number from {low} to {high}")
    return value


def _text(raw: dict[str, Any], key: str) -> str:
    value = raw.get(key)
    if not isinstance(value, str) or not value:
        raise RequestError(f"{key!r} is a text")
    return value
