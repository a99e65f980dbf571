# SPDX-License-Identifier: Apache-2.0
"""Containers that are ranks of a job: the agent is their keeper, and answers CRIU's action script
(src/rank_script), which waits at a socket of its own.

A script says one line, `ACTION CONTAINER PID IMAGES`, and is answered by one, `go`, or `no` and a
reason; or not at all, if the agent ends. It then asks the next agent if its tasks stand, else it
ends, and there is no dump.
"""

from __future__ import annotations

import logging
import os
import re
import select
import socket
import threading
from contextlib import suppress
from pathlib import Path

from gpustasis import policy
from gpustasis.agent.config import Config
from gpustasis.agent.members import Member
from gpustasis.agent.peers import peer_of
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
_MAX_LINE = 4096
_SAID_S = 5.0  # for a line to come
_POLL_S = 0.1
_SCAN_S = 1.0


class Ranks:
    """From start() until close(). Scripts that wait then are not answered."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._members: dict[tuple[str, int], Member] = {}
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._store: Store | None = None
        self._sock: socket.socket | None = None

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
                    threading.Thread(target=self._serve, args=(conn,), daemon=True).start()

    def _serve(self, conn: socket.socket) -> None:
        with conn:
            try:
                visit, member = self._received(conn)
            except CheckpointError as exc:
                _say(conn, f"no {' '.join(str(exc).split())}")
                return
            except OSError:
                return
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

    def _received(self, conn: socket.socket) -> tuple[Visit, Member]:
        """Raises CheckpointError, OSError."""
        conn.settimeout(_SAID_S)
        peer = peer_of(conn)
        if not peer.is_root:
            raise AgentError(f"user {peer.uid} is not root")
        said = b""
        while not said.endswith(b"\n") and len(said) < _MAX_LINE:
            piece = conn.recv(_MAX_LINE)
            if not piece:
                break
            said += piece
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
        return visit, self._member(rank, container)

    def _member(self, rank: policy.Rank, container: str) -> Member:
        """Raises CheckpointError."""
        if self._store is None:
            raise JobError(
                "there is no store in which its ranks could agree: set jobs_store in the agent's "
                "configuration"
            )
        with self._lock:
            found = self._members.get((rank.job, rank.rank))
            if found is None:
                found = Member(self._config, self._store, rank)
                self._members[rank.job, rank.rank] = found
            found.require(rank, container)
            return found

    def _scan_again(self) -> None:
        """Containers that have started, so that somebody takes part for them who was not asked by
        their engine; and what an agent before this one has left of those that have ended."""
        known: set[str] = set()
        while not self._over.wait(0 if not known else _SCAN_S):
            names = {path.stem for path in Path(policy.POLICY_DIRECTORY).glob("*.toml")}
            for container in names - known:
                with suppress(CheckpointError, OSError):
                    if (rank := _read_rank(container)) is not None:
                        self._member(rank, container)
            known = names | {""}
            with self._lock:
                for one in self._members.values():
                    one.keep_only(names)


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


def _has_hung_up(conn: socket.socket) -> bool:
    try:
        return bool(select.select([conn], [], [], 0)[0]) and not conn.recv(1, socket.MSG_PEEK)
    except OSError:
        return True


def _say(conn: socket.socket, line: str) -> None:
    with suppress(OSError):
        conn.sendall(line[:_MAX_LINE].encode() + b"\n")
