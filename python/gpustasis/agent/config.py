# SPDX-License-Identifier: Apache-2.0
"""The agent's configuration: one TOML file, which only root can change. docs/agent.md has the
table."""

from __future__ import annotations

import grp
import os
import pwd
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from gpustasis.agent.subjects import CONTAINERS, Subject, parse_container
from gpustasis.errors import AgentError
from gpustasis.files import read_trusted
from gpustasis.image.prune import parse_duration

DEFAULT_FILE = Path("/etc/gpustasis/agent.toml")
DEFAULT_SOCKET = Path("/run/gpustasis/agent.sock")
_MAX_BYTES = 1 << 20
_MAX_TARGETS = 256
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_SIZE = re.compile(r"(\d{1,15})([KMGT]?)")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_PORTS = (0, 65535)
_SOCKET_LIMIT = 107  # bytes of a Unix socket's path
MIN_INTERVAL_S = 1.0
PROTOCOL_VERSION = 1  # of what goes over the socket


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is checkpointed by its name.

    pidfile: of a process; None: it is a container. interval_s: None: only on request. auto: the
    interval is computed; mtbf_s: the mean time between failures of the job that it is computed
    from. keep_last: older checkpoints are removed. max_chain: one that is built on so many others
    is full again; 0: each is full. verify: each is read again and checked.
    """

    name: str
    pidfile: Path | None = None
    container: Subject | None = None
    interval_s: float | None = None
    auto: bool = False
    mtbf_s: float = 86400.0
    keep_last: int = 3
    max_chain: int = 8
    verify: bool = False

    @property
    def is_periodic(self) -> bool:
        return self.auto or self.interval_s is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Sizes in bytes; docs/agent.md says what each is for. groups, users: by number."""

    store: Path = Path("/var/lib/gpustasis/agent")
    socket: Path = DEFAULT_SOCKET
    users: frozenset[int] = frozenset()
    groups: frozenset[int] = frozenset()
    concurrency: int = 1
    queue: int = 64
    queue_per_user: int = 8
    memory_reserve: int = 1 << 30
    disk_reserve: int = 1 << 30
    disk_per_user: int = 20 << 30
    keep_last: int = 2
    cpu_memory: str = "auto"
    tier: str = "disk"
    drain_rate: int = 0
    http_socket: Path | None = Path("/run/gpustasis/agent-http.sock")
    http_port: int = 0
    jobs_socket: Path | None = Path("/run/gpustasis/jobs.sock")
    ranks_socket: Path | None = Path("/run/gpustasis/ranks.sock")
    jobs_store: tuple[str, ...] = ()
    jobs_store_ca: Path | None = None
    jobs_store_cert: Path | None = None
    jobs_store_key: Path | None = None
    jobs_store_user: str = ""
    jobs_store_password_file: Path | None = None
    jobs_ttl: float = 10.0
    jobs_away: float = 8.0
    jobs_look_limit: float = 30.0
    jobs_cuda_limit: float = 30.0
    jobs_network_limit: float = 10.0
    jobs_dump_limit: float = 1800.0
    criu: str | None = None
    podman: str | None = None
    containerd: str | None = None
    crio: str | None = None
    targets: tuple[Target, ...] = ()

    def target(self, name: str) -> Target | None:
        return next((one for one in self.targets if one.name == name), None)


def load(path: Path | None) -> Config:
    """Of the file; None: of DEFAULT_FILE, which need not be there. Raises AgentError that names the
    file and the key."""
    place = path or DEFAULT_FILE
    try:
        return parse(tomllib.loads(read_trusted(place, _MAX_BYTES)))
    except FileNotFoundError as exc:
        if path is None:
            return Config()
        raise AgentError(f"there is no configuration {place}") from exc
    except OSError as exc:
        raise AgentError(f"cannot read the configuration {place}: {exc.strerror}") from exc
    except ValueError as exc:  # not UTF-8, not TOML, or not as it should be
        raise AgentError(f"configuration {place}: {exc}") from exc


def parse(raw: Mapping[str, Any]) -> Config:
    """Raises ValueError that names the key."""
    taken = dict(raw)
    targets = taken.pop("target", [])
    if type(targets) is not list or len(targets) > _MAX_TARGETS:
        raise ValueError(f"'target' is no list of at most {_MAX_TARGETS} tables")
    values = _values(taken, _KEYS, "")
    found = tuple(_target(one) for one in targets)
    names = [one.name for one in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"target {twice!r} stands twice")
    return Config(**values, targets=found)


def _target(raw: object) -> Target:
    if type(raw) is not dict or type(raw.get("name")) is not str:
        raise ValueError("a target has no 'name'")
    name = raw["name"]
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a target: {_NAME.pattern}")
    values = _values({key: one for key, one in raw.items() if key != "name"}, _TARGET_KEYS, name)
    if ("pidfile" in values) == ("container" in values):
        raise ValueError(f"target {name!r} needs one of 'pidfile' and 'container'")
    interval = values.pop("interval", None)
    return Target(
        name=name,
        auto=interval == "auto",
        interval_s=interval if isinstance(interval, float) else None,
        **values,
    )


_Take = Callable[[Any], Any]


def _values(raw: Mapping[str, Any], keys: Mapping[str, _Take], target: str) -> dict[str, Any]:
    where = f"target {target!r}: " if target else ""
    found: dict[str, Any] = {}
    for key, value in raw.items():
        if key not in keys:
            raise ValueError(f"{where}there is no key {key!r}; there are {', '.join(keys)}")
        try:
            found[_RENAMED.get(key, key)] = keys[key](value)
        except (ValueError, TypeError) as exc:
            raise ValueError(f"{where}{key!r} cannot be {value!r}: {exc}") from exc
    return found


def _whole(low: int, high: int) -> _Take:
    def take(value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"it is a number from {low} to {high}")
        return value

    return take


def _size(value: Any) -> int:
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError('it is a size such as "512M" or "16G"')
    return int(match[1]) * _UNITS[match[2]]


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError("it is a text")
    return value


def _path(value: Any) -> Path:
    if not _text(value).startswith("/"):
        raise ValueError("it is an absolute path")
    return Path(value)


def _socket(value: Any) -> Path:
    if len(os.fsencode(_path(value))) > _SOCKET_LIMIT:
        raise ValueError(f"a socket's path has at most {_SOCKET_LIMIT} bytes")
    return Path(value)


def _optional_socket(value: Any) -> Path | None:
    return None if value == "" else _socket(value)


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError("it is true or false")
    return value


def _seconds(value: Any) -> float:
    return parse_duration(_text(value)).total_seconds()


def _limit(value: Any) -> float:
    seconds = _seconds(value)
    if seconds < 1:
        raise ValueError("it is at least 1 s")
    return seconds


def _texts(value: Any) -> tuple[str, ...]:
    if type(value) is not list:
        raise ValueError("it is a list of texts")
    return tuple(map(_text, value))


def _interval(value: Any) -> float | str:
    if value == "auto":
        return "auto"
    seconds = _seconds(value)
    if seconds < MIN_INTERVAL_S:
        raise ValueError(f"it is at least {MIN_INTERVAL_S:g} s")
    return seconds


def _container(value: Any) -> Subject:
    found = parse_container(_text(value))
    if found is None:
        raise ValueError(f"it is ENGINE:NAME, ENGINE being one of {', '.join(CONTAINERS)}")
    return found


def _ids(look_up: Callable[[str], int]) -> _Take:
    def take(value: Any) -> frozenset[int]:
        if type(value) is not list:
            raise ValueError("it is a list of names or numbers")
        return frozenset(map(number, value))

    def number(one: Any) -> int:
        if isinstance(one, str):
            try:
                return look_up(one)
            except KeyError as exc:
                raise ValueError(f"this system knows no {one!r}") from exc
        if type(one) is not int or not 0 <= one < (1 << 32) - 1:
            raise ValueError(f"{one!r} is neither a name nor a number")
        return one

    return take


def _choice(*words: str) -> _Take:
    def take(value: Any) -> str:
        if value not in words:
            raise ValueError(f"it is one of {', '.join(words)}")
        return str(value)

    return take


_KEYS: dict[str, _Take] = {
    "store": _path,
    "socket": _socket,
    "users": _ids(lambda name: pwd.getpwnam(name).pw_uid),
    "groups": _ids(lambda name: grp.getgrnam(name).gr_gid),
    "concurrency": _whole(1, 16),
    "queue": _whole(1, 1024),
    "queue_per_user": _whole(1, 1024),
    "memory_reserve": _size,
    "disk_reserve": _size,
    "disk_per_user": _size,
    "keep_last": _whole(1, 1000),
    "cpu_memory": _choice("criu", "ours", "auto"),
    "tier": _choice("disk", "ram"),
    "drain_rate": _size,
    "http_socket": _optional_socket,
    "http_port": _whole(*_PORTS),
    "jobs_socket": _optional_socket,
    "ranks_socket": _optional_socket,
    "jobs_store": _texts,
    "jobs_store_ca": _path,
    "jobs_store_cert": _path,
    "jobs_store_key": _path,
    "jobs_store_user": _text,
    "jobs_store_password_file": _path,
    "jobs_ttl": _limit,
    "jobs_away": _limit,
    "jobs_look_limit": _limit,
    "jobs_cuda_limit": _limit,
    "jobs_network_limit": _limit,
    "jobs_dump_limit": _limit,
    "criu": _text,
    "podman": _text,
    "containerd": _text,
    "crio": _text,
}
_TARGET_KEYS: dict[str, _Take] = {
    "pidfile": _path,
    "container": _container,
    "interval": _interval,
    "mtbf": _seconds,
    "keep_last": _whole(1, 1000),
    "max_chain": _whole(0, 65535),
    "verify": _flag,
}
_RENAMED = {"mtbf": "mtbf_s"}
assert set(_KEYS) == {field.name for field in fields(Config)} - {"targets"}
