# SPDX-License-Identifier: Apache-2.0
"""A rank's TCP connections: which there are, and the lock on them that lasts from before the first
dump until every rank of the job stands again.

The lock is a table of nftables in the network namespace of the rank. What belongs to a connection
of the rank is dropped, both ways, and so is each attempt to connect to one of its ports. Nothing is
answered with a reset then, whether the rank stands, is gone, or is being restored; TCP sends again.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
import shutil
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpustasis import process
from gpustasis.errors import JobError, UnsupportedError

MAX_CONNECTIONS = 10_000
_LISTEN, _TIME_WAIT, _CLOSED = "0A", "06", "07"  # tcp_states.h
_LOCAL = re.compile(r"\|-- (\S+)\n\s+/32 host LOCAL")
_IN_USE = re.compile(r"^TCP6?: inuse (\d+)", re.MULTILINE)
_SETTLE = 20  # looks, until no connection is new
_TIMEOUT_S = 20.0
_TABLE = """\
table inet {name}
delete table inet {name}
table inet {name} {{
  set pairs4 {{ type ipv4_addr . inet_service . ipv4_addr . inet_service; {pairs4} }}
  set pairs6 {{ type ipv6_addr . inet_service . ipv6_addr . inet_service; {pairs6} }}
  set ports {{ type inet_service; {ports} }}
  chain out {{
    type filter hook output priority -300; policy accept;
    ip saddr . tcp sport . ip daddr . tcp dport @pairs4 drop
    ip6 saddr . tcp sport . ip6 daddr . tcp dport @pairs6 drop
  }}
  chain in {{
    type filter hook input priority -300; policy accept;
    ip daddr . tcp dport . ip saddr . tcp sport @pairs4 drop
    ip6 daddr . tcp dport . ip6 saddr . tcp sport @pairs6 drop
    tcp dport @ports tcp flags & (syn | ack) == syn drop
  }}
}}
"""


@dataclass(frozen=True, slots=True, order=True)
class Connection:
    """Addresses as `ipaddress` writes them; both of one family."""

    local: str
    local_port: int
    remote: str
    remote_port: int

    def __post_init__(self) -> None:
        try:
            families = {ipaddress.ip_address(one).version for one in (self.local, self.remote)}
        except ValueError as exc:
            raise JobError(f"connection {self.local!r} to {self.remote!r}: {exc}") from exc
        # After a "%" any text is an address to `ipaddress`; nft would be told it as it is.
        if "%" in self.local + self.remote:
            raise JobError(f"connection {self.local!r} to {self.remote!r}: one has a scope")
        if len(families) != 1 or not _are_ports(self.local_port, self.remote_port):
            raise JobError(f"connection {self.local!r} to {self.remote!r} is none")

    def __str__(self) -> str:
        return f"{self.local} port {self.local_port} to {self.remote} port {self.remote_port}"


@dataclass(frozen=True, slots=True)
class Network:
    """What of a rank has to do with TCP. ports: that it listens on."""

    ports: frozenset[int] = frozenset()
    connections: frozenset[Connection] = frozenset()

    def to_json(self) -> dict[str, Any]:
        pairs = [[c.local, c.local_port, c.remote, c.remote_port] for c in sorted(self.connections)]
        return {"ports": sorted(self.ports), "connections": pairs}


def network_of_json(value: Any) -> Network:
    """Raises JobError unless Network.to_json could have made it."""
    try:
        ports, pairs = value["ports"], value["connections"]
        if set(value) != {"ports", "connections"} or len(pairs) > MAX_CONNECTIONS:
            raise ValueError
        if not isinstance(ports, list) or not all(_are_ports(port) for port in ports):
            raise ValueError
        connections = set()
        for local, local_port, remote, remote_port in pairs:
            if not isinstance(local, str) or not isinstance(remote, str):
                raise TypeError
            connections.add(Connection(local, local_port, remote, remote_port))
    except (KeyError, TypeError, ValueError) as exc:
        raise JobError("a record's ports and connections are not what they should be") from exc
    return Network(frozenset(ports), frozenset(connections))


def look(pids: Collection[int]) -> Network:
    """Of these processes, which share the network namespace of the first."""
    inodes = _sockets(pids)
    rows = [row for pid in list(pids)[:1] for row in _rows(pid, closed=False)]
    ports = frozenset(row.port for row in rows if row.state == _LISTEN and row.inode in inodes)
    found = set()
    for row in rows:
        if row.state in {_LISTEN, _TIME_WAIT, _CLOSED}:
            continue
        # One that nobody has accepted yet is no process's, and comes in at a port of theirs.
        if row.inode in inodes or (row.inode == 0 and row.port in ports):
            found.add(Connection(row.address, row.port, row.remote, row.remote_port))
    if len(found) > MAX_CONNECTIONS:
        raise JobError(f"the rank has {len(found)} connections, at most {MAX_CONNECTIONS} can be")
    return Network(ports, frozenset(found))


def owned(wanted: Collection[Connection]) -> set[Connection]:
    """Those that a process of this network namespace has."""
    return {one for one, inode in _here() if inode and one in wanted}


def remembered(wanted: Collection[Connection]) -> set[Connection]:
    """Those that this network namespace knows, of no process."""
    return {one for one, inode in _here() if not inode and one in wanted}


def _here() -> Iterable[tuple[Connection, int]]:
    for row in _rows("self", closed=True):
        if row.state != _LISTEN and row.remote_port:
            yield Connection(row.address, row.port, row.remote, row.remote_port), row.inode


def own_addresses(pid: int | str = "self") -> frozenset[str]:
    """Of the network namespace of a process, loopback among them."""
    place = Path(f"/proc/{pid}/net")
    found = set(_LOCAL.findall((place / "fib_trie").read_text()))
    if (place / "if_inet6").exists():
        for line in (place / "if_inet6").read_text().splitlines():
            found.add(str(ipaddress.ip_address(bytes.fromhex(line.split()[0]))))
    return frozenset(found)


class Lock:
    """The table of one rank, of the network namespace that this process is in; or of that of the
    process `pid`. Others may be in that one as well, such as a pod's, and it outlives the process:
    from hold() on so does the lock."""

    def __init__(self, job: str, rank: int, pid: int = 0) -> None:
        self._name = f"gpustasis_{hashlib.sha256(job.encode()).hexdigest()[:16]}_{rank}"
        self._pid = pid
        self._namespace = -1  # a descriptor

    def hold(self) -> bool:
        """False: the process has ended."""
        if self._pid and self._namespace < 0:
            try:
                flags = os.O_RDONLY | os.O_CLOEXEC
                self._namespace = os.open(f"/proc/{self._pid}/ns/net", flags)
            except OSError:
                return False
        return True

    def close(self) -> None:
        """Let go of the namespace."""
        if self._namespace >= 0:
            os.close(self._namespace)
            self._namespace = -1

    def take(self, network: Network) -> None:
        """Replaces what this rank had locked. Raises JobError, UnsupportedError."""
        if not self.hold():
            raise JobError(f"process {self._pid} has ended: there is no network to lock")
        self._nft(_script(self._name, network))

    def take_of(self, pids: Collection[int], seen: Network) -> Network:
        """Lock whatever these processes have, until nothing is new; what that is. seen: what they
        had a moment ago."""
        network = seen
        for _ in range(_SETTLE):
            self.take(network)
            now = look(pids)
            if now.ports <= network.ports and now.connections <= network.connections:
                return now
            network = now
        raise JobError("the rank makes new connections faster than they can be locked")

    def release(self) -> None:
        """Whether or not it is held."""
        if not self.hold():
            return
        self._nft(f"table inet {self._name}\ndelete table inet {self._name}\n")
        self.close()

    def _nft(self, script: str) -> None:
        program = find_nft()
        if program is None:
            raise UnsupportedError(
                "the network cannot be locked: there is no nft; install nftables"
            )
        descriptor = os.memfd_create("gpustasis-nft")
        try:
            os.write(descriptor, script.encode())
            os.lseek(descriptor, 0, os.SEEK_SET)
            words = [program, "-f", "-"]
            if self._namespace >= 0:
                place = f"/proc/{os.getpid()}/fd/{self._namespace}"
                words = ["nsenter", f"--net={place}", "--", *words]
            ended = process.run(words, stdin=descriptor, timeout_s=_TIMEOUT_S)
        except OSError as exc:
            raise JobError(f"nft: {exc}") from exc
        finally:
            os.close(descriptor)
        if ended.status != 0:
            raise JobError(f"nft failed ({ended.ending}): {ended.output.strip()[-400:]}")


def find_nft() -> str | None:
    """The program; None: there is none."""
    return shutil.which("nft", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")


def _script(name: str, network: Network) -> str:
    pairs: dict[int, list[str]] = {4: [], 6: []}
    for one in sorted(network.connections):
        words = (one.local, one.local_port, one.remote, one.remote_port)
        pairs[ipaddress.ip_address(one.local).version].append(" . ".join(map(str, words)))
    return _TABLE.format(
        name=name,
        pairs4=_elements(pairs[4]),
        pairs6=_elements(pairs[6]),
        ports=_elements(map(str, sorted(network.ports))),
    )


def _elements(items: Iterable[str]) -> str:
    text = ", ".join(items)
    return f"elements = {{ {text} }};" if text else ""


@dataclass(frozen=True, slots=True)
class _Row:
    """A line of /proc/PID/net/tcp."""

    address: str
    port: int
    remote: str
    remote_port: int
    state: str
    inode: int


def _rows(pid: int | str, *, closed: bool) -> Iterable[_Row]:
    """closed: also if all that is left is connections that no process has any more."""
    for name, counted in (("tcp", "sockstat"), ("tcp6", "sockstat6")):
        place = Path(f"/proc/{pid}/net/{name}")
        if not place.exists():
            continue
        # The kernel goes through a table of all namespaces for each file, which takes milliseconds.
        if not closed and not _are_in_use(place.with_name(counted)):
            continue
        for line in place.read_text().splitlines()[1:]:
            words = line.split()
            local, _, port = words[1].partition(":")
            remote, _, remote_port = words[2].partition(":")
            yield _Row(
                *(_address(local), int(port, 16), _address(remote), int(remote_port, 16)),
                *(words[3], int(words[9])),
            )


def _are_in_use(sockstat: Path) -> bool:
    """Whether the namespace has TCP sockets of that family, listening ones too: without one it has
    no connection that a process has, and none that comes in. Also if that cannot be told."""
    found = _IN_USE.search(sockstat.read_text()) if sockstat.exists() else None
    return found is None or found[1] != "0"


def _address(text: str) -> str:
    """Words of 32 bits in the machine's order. A v4 address in a v6 socket is a v4 one: so are its
    packets."""
    raw = b"".join(
        int(text[at : at + 8], 16).to_bytes(4, "little") for at in range(0, len(text), 8)
    )
    address = ipaddress.ip_address(raw)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def _sockets(pids: Iterable[int]) -> set[int]:
    """Inodes of what these processes have open; of one that has ended, none."""
    found = set()
    for pid in pids:
        try:
            names = os.listdir(f"/proc/{pid}/fd")
        except (FileNotFoundError, ProcessLookupError):
            continue
        for name in names:
            try:
                target = os.readlink(f"/proc/{pid}/fd/{name}")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if target.startswith("socket:["):
                found.add(int(target[8:-1]))
    return found


def _are_ports(*values: object) -> bool:
    return all(
        isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 16
        for value in values
    )
