# SPDX-License-Identifier: Apache-2.0
"""Containers that are ranks of a job: the agent is their keeper, and answers CRIU's action script
(src/rank_script), which waits at a socket of its own.

A script says one line, `ACTION CONTAINER PID IMAGES`, and is answered by one, `go`, or `no` and a
reason; or not at all, if the agent ends. It then asks the next agent if its tasks stand, else it
ends, and there is no dump. One whose tasks stand gets no other answer than what was decided: after
a no they run.
"""

from __future__ import annotations

import logging
import os
import re
import select
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

from gpustasis import policy
from gpustasis.agent import containers
from gpustasis.agent.config import Config
from gpustasis.agent.members import Member, has_left
from gpustasis.agent.peers import Peer, peer_of
from gpustasis.agent.server import listen
from gpustasis.errors import AgentError, CheckpointError, JobError
from gpustasis.files import open_own_directory
from gpustasis.jobs.store import Store
from gpustasis.jobs.stores import open_named
from gpustasis.jobs.visits import Visit, leaves_running
from gpustasis.task import read_task

log = logging.getLogger(__name__)

_LINE = re.compile(
    r"(pre-dump|post-dump|post-restore|pre-resume) ([0-9a-f]{64}) ([1-9][0-9]{0,9}) "
    r"(/proc/[0-9]+/fd/[0-9]+)\n"
)
_HOLDING = (b"post-dump ", b"pre-resume ")  # the tasks stand
_MAX_LINE = 4096
_SAID_S = 5.0  # for a line to come
_POLL_S = 0.1
_AGAIN_S = 1.0  # before a script that is not answered asks again
_SCAN_S = 1.0
_MAX_TOLD = 1000
_RUNNING_S = 5.0  # how often it is looked which containers run


class Ranks:
    """From start() until close(). Scripts that wait then are not answered."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._members: dict[tuple[str, int], Member] = {}
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._store: Store | None = None
        self._sock: socket.socket | None = None
        self._told: dict[str, str] = {}  # what was wrong last, by whom

    def start(self) -> None:
        """Raises AgentError, StoreError."""
        config = self._config
        assert config.ranks_socket is not None
        places = config.jobs_store
        if not places and config.jobs_socket is not None:
            places = (str(config.jobs_socket),)
        if places:
            try:
                self._store = open_named(
                    places,
                    ca=config.jobs_store_ca,
                    certificate=config.jobs_store_cert,
                    key=config.jobs_store_key,
                    user=config.jobs_store_user,
                    password_file=config.jobs_store_password_file,
                )
            except ValueError as exc:
                raise AgentError(f"jobs_store: {exc}") from exc
        self._sock = listen(config.ranks_socket, 0o600)
        for act in (self._accept, self._scan_again):
            threading.Thread(target=act, daemon=True).start()

    def close(self) -> None:
        """Nobody is answered any more."""
        self._over.set()
        if self._sock is not None:
            self._sock.close()
        assert self._config.ranks_socket is not None
        self._config.ranks_socket.unlink(missing_ok=True)
        with self._lock:
            for one in self._members.values():
                one.stop()

    def _accept(self) -> None:
        assert self._sock is not None
        while not self._over.is_set():
            with suppress(OSError, ValueError):  # closed
                if select.select([self._sock], [], [], _POLL_S)[0]:
                    conn, _ = self._sock.accept()
                    try:
                        threading.Thread(target=self._serve, args=(conn,), daemon=True).start()
                    except RuntimeError as exc:  # there are too many
                        conn.close()
                        self._tell("an action script", str(exc))
                        self._over.wait(_AGAIN_S)

    def _serve(self, conn: socket.socket) -> None:
        with conn:
            said = b""
            try:
                said = _line(conn)
                visit, member = self._visit(said, peer_of(conn))
            except CheckpointError as exc:
                if said.startswith(_HOLDING):
                    self._tell(f"{said!r}, of tasks that stand until it is known", str(exc))
                    self._over.wait(_AGAIN_S)
                else:
                    _say(conn, f"no {' '.join(str(exc).split())}")
                return
            except OSError:
                return
            try:
                self._answer(conn, visit, member)
            finally:
                with self._lock:
                    member.visitors -= 1

    def _answer(self, conn: socket.socket, visit: Visit, member: Member) -> None:
        member.arrives(visit)
        try:
            while not visit.over.wait(_POLL_S) and not self._over.is_set():
                if _has_hung_up(conn):
                    visit.over.set()
                member.look_after(visit)
            if visit.said:
                _say(conn, visit.said)
        finally:
            member.visits.remove(visit)

    def _visit(self, said: bytes, peer: Peer) -> tuple[Visit, Member]:
        """The member counts it already. Raises CheckpointError."""
        if not peer.is_root:
            raise AgentError(f"user {peer.uid} is not root")
        match = _LINE.fullmatch(said.decode("ascii", "replace"))
        if match is None:
            raise AgentError("this agent does not know what the action script has said")
        action, container, pid, images = match[1], match[2], int(match[3]), Path(match[4])
        try:
            stat = Path(f"/proc/{peer.pid}/stat").read_text(errors="replace")
            criu = int(stat.rpartition(")")[2].split()[1])
            start = read_task(criu).start_time
        except (OSError, ValueError, IndexError) as exc:
            raise AgentError("criu is in a pid namespace out of the agent's sight") from exc
        visit = Visit(
            action=action,
            container=container,
            pid=pid,
            criu=criu,
            criu_start=start,
            images=images,
            leaves_running=leaves_running(criu),
        )
        rank = _read_rank(container)
        if rank is None:
            raise AgentError(f"container {container} is no rank of a job any more")
        if images.parts[2] != str(criu):  # the script is another's child by now
            raise AgentError("criu has ended, or has other pids than the agent sees")
        return visit, self._member(rank, container, visits=1)

    def _member(self, rank: policy.Rank, container: str, *, visits: int = 0) -> Member:
        """Raises CheckpointError."""
        if self._store is None:
            raise JobError(
                "there is no store in which its ranks could agree: set jobs_store in the agent's "
                "configuration"
            )
        key = rank.job, rank.rank
        with self._lock:
            ending = self._members.get(key)
            if ending and not (ending.stops or ending.is_of_another_world(rank, container)):
                ending = None
            if ending:
                ending.stop()
        has_ended = ending is not None and ending.has_stopped()  # it may need the lock for that
        with self._lock:
            if self._over.is_set():
                raise AgentError("the agent is about to end")
            found = self._members.get(key)
            if found is not None and found is ending and has_ended:
                self._remove(found)
                found = None
            if found is None:
                found = Member(self._config, self._store, rank, container, self._leave)
                self._members[key] = found
            found.require(rank, container)
            found.visitors += visits
            return found

    def _leave(self, member: Member) -> bool:
        """Whether it is over; if not, it is needed again."""
        with self._lock:
            if member.is_needed:
                return False
            self._remove(member)
            return True

    def _remove(self, member: Member) -> None:
        self._members = {key: one for key, one in self._members.items() if one is not member}
        member.close()

    def _scan_again(self) -> None:
        """Containers that have started, so that somebody takes part for them who was not asked by
        their engine; and what an agent before this one has left of those that have ended."""
        known: dict[str, tuple[int, int]] = {}
        looked = 0.0
        while not self._over.wait(_SCAN_S if looked else 0):
            policies = _policies()
            new = {one for one, stamp in policies.items() if known.get(one) != stamp}
            if not new and time.monotonic() < looked + _RUNNING_S:
                continue
            looked = time.monotonic()
            try:
                failed = self._look_at(new)
            except Exception:
                log.exception("containers that are ranks")
                failed = new
            known = {one: stamp for one, stamp in policies.items() if one not in failed}

    def _look_at(self, new: set[str]) -> set[str]:
        """At containers with a new policy, and whether those that are known run still. Those that
        have to be looked at once more."""
        with self._lock:
            known = {one: one.known for one in self._members.values()}
        running = containers.running(new.union(*known.values()))
        with self._lock:
            for member, before in known.items():
                if not member.visitors:  # else one of them is coming back just now
                    member.drop(before - running)
        failed = set()
        for container in new:
            try:
                rank = _read_rank(container)
                if rank is not None and (container in running or has_left(self._config, rank)):
                    self._member(rank, container)
            except (CheckpointError, OSError) as exc:
                self._tell(container, str(exc))
                failed.add(container)
        return failed

    def _tell(self, who: str, what: str) -> None:
        """Once, until it is something else."""
        if self._told.get(who) != what:
            log.error("%s: %s", who, what)
            if len(self._told) >= _MAX_TOLD:
                self._told.clear()
            self._told[who] = what


def _policies() -> dict[str, tuple[int, int]]:
    """Of which containers there are some, and what tells each from the one before: a container that
    is started again has the same id, and that of a rank stays when it has ended."""
    found = {}
    for path in Path(policy.POLICY_DIRECTORY).glob("*.toml"):
        with suppress(OSError):  # it has ended
            stat = path.lstat()
            found[path.stem] = (stat.st_ino, stat.st_mtime_ns)
    return found


def _read_rank(container: str) -> policy.Rank | None:
    """Raises CheckpointError."""
    name = f"{container}.toml"
    path = f"{policy.POLICY_DIRECTORY}/{name}"
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        directory = open_own_directory(policy.POLICY_DIRECTORY, 2)
        try:
            with open(os.open(name, flags, dir_fd=directory), "rb") as file:
                text = file.read(policy.MAX_FILE_BYTES).decode(errors="replace")
        finally:
            os.close(directory)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise AgentError(f"cannot read {path}: {exc.strerror}") from exc
    return policy.rank_of(text)


def _line(conn: socket.socket) -> bytes:
    """What is said first, or as much of it as can be one. Raises OSError."""
    conn.settimeout(_SAID_S)
    said = b""
    while not said.endswith(b"\n") and len(said) < _MAX_LINE:
        piece = conn.recv(_MAX_LINE)
        if not piece:
            break
        said += piece
    return said


def _has_hung_up(conn: socket.socket) -> bool:
    try:
        return bool(select.select([conn], [], [], 0)[0]) and not conn.recv(1, socket.MSG_PEEK)
    except OSError:
        return True


def _say(conn: socket.socket, line: str) -> None:
    with suppress(OSError):
        conn.sendall(line[:_MAX_LINE].encode(errors="replace") + b"\n")
