# SPDX-License-Identifier: Apache-2.0
"""The agent's socket: connections, their bounds, and when a client hears of what it asked for."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from collections import Counter, defaultdict
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from gpustasis.agent.config import PROTOCOL_VERSION, Config
from gpustasis.agent.operations import Operation
from gpustasis.agent.peers import Peer, may_connect, peer_of
from gpustasis.agent.requests import Answer, RequestError, Requests, parse
from gpustasis.agent.space import require_own_way
from gpustasis.agent.threads import in_thread
from gpustasis.errors import AgentError, CheckpointError

log = logging.getLogger(__name__)

MAX_LINE_BYTES = 4096
MAX_CONNECTIONS = 256
MAX_PER_USER = 32  # of each user but root
IDLE_S = 30.0  # for a whole request
_SEND_S = 10.0  # for an answer to be taken
_BACKLOG = 128
_BUG = 1


class Server:
    """Serves from start() until close()."""

    def __init__(self, config: Config, requests: Requests, idle_s: float = IDLE_S) -> None:
        self._config = config
        self._requests = requests
        self._idle_s = idle_s
        self._open: Counter[int] = Counter()
        self._turns: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)  # of each user
        self._ended: dict[str, list[asyncio.Event]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Raises AgentError."""
        others = bool(self._config.users or self._config.groups)
        sock = listen(self._config.socket, 0o666 if others else 0o600)
        self._server = await asyncio.start_unix_server(
            self._connected, sock=sock, limit=MAX_LINE_BYTES, backlog=_BACKLOG
        )

    async def close(self) -> None:
        """Every connection ends."""
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def tell(self, operation: Operation) -> None:
        """It has ended: who waits for it hears of it. In the loop's thread."""
        for event in self._ended.pop(operation.id, []):
            event.set()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            peer = peer_of(writer.get_extra_info("socket"))
            if refused := self._why_not(peer):
                await _say(writer, _error(AgentError(refused)))
                return
            self._open[peer.uid] += 1
            try:
                await self._converse(peer, reader, writer)
            finally:
                self._open[peer.uid] -= 1
                if not self._open[peer.uid]:
                    del self._open[peer.uid]
                    self._turns.pop(peer.uid, None)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass  # it is gone, or too slow
        except asyncio.CancelledError:
            pass  # the agent stops
        except Exception:
            log.exception("a connection")
        finally:
            self._tasks.discard(task)
            writer.transport.abort() if writer.transport.get_write_buffer_size() else writer.close()

    def _why_not(self, peer: Peer) -> str:
        if not may_connect(peer, self._config):
            return (
                f"user {peer.uid} may not use this agent: see users and groups in its configuration"
            )
        if self._open.total() >= MAX_CONNECTIONS and not peer.is_root:
            return f"there are {MAX_CONNECTIONS} connections already"
        if self._open[peer.uid] >= (MAX_CONNECTIONS if peer.is_root else MAX_PER_USER):
            return f"user {peer.uid} has {self._open[peer.uid]} connections already"
        return ""

    async def _converse(
        self, peer: Peer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while True:
            try:
                async with asyncio.timeout(self._idle_s):
                    line = await reader.readuntil(b"\n")
            except asyncio.LimitOverrunError:
                text = f"a request has more than {MAX_LINE_BYTES} bytes"
                await _say(writer, _error(RequestError(text)))
                return
            try:
                raw = parse(line)
                async with self._turns[peer.uid]:
                    answer = await in_thread(partial(self._requests.answer, peer, raw))
                fields = await self._waited(answer, reader)
                if fields is None:
                    return
            except CheckpointError as exc:
                fields = _error(exc)
            except Exception as exc:
                log.exception("a request of user %s", peer.uid)
                fields = _error(exc)
            await _say(writer, fields)

    async def _waited(self, answer: Answer, reader: asyncio.StreamReader) -> dict[str, Any] | None:
        """The answer, once what it waits for has ended; None: the client does not wait for it."""
        operation = answer.wait_for
        if operation is None:
            return answer.fields
        if operation.state.is_over:
            return {"operation": operation.as_json()}
        event = asyncio.Event()  # tell() comes after this: in this thread, once it is over
        self._ended.setdefault(operation.id, []).append(event)
        ended = asyncio.ensure_future(event.wait())
        gone = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait((ended, gone), return_when=asyncio.FIRST_COMPLETED)
            # One that hangs up, or goes on before it has its answer, gets none.
            return None if gone.done() else {"operation": operation.as_json()}
        finally:
            for one in (ended, gone):
                one.cancel()
            await asyncio.gather(ended, gone, return_exceptions=True)
            with suppress(KeyError, ValueError):
                self._ended[operation.id].remove(event)


def listen(place: Path, mode: int) -> socket.socket:
    """A socket at `place`, which nobody but root, or this user, can put something else at. One that
    nobody answers at any more is replaced. Raises AgentError."""
    require_own_way(place)
    try:
        place.parent.mkdir(mode=0o755, exist_ok=True)
        with socket.socket(socket.AF_UNIX) as asking:
            asking.settimeout(1.0)
            asking.connect(str(place))
        raise AgentError(f"there is an agent at {place} already")
    except (FileNotFoundError, ConnectionRefusedError):
        pass
    except OSError as exc:
        raise AgentError(f"cannot listen at {place}: {exc.strerror or exc}") from exc
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        place.unlink(missing_ok=True)
        # With its mode from the first moment: chmod() would follow a link in its place.
        mask = os.umask(0o777 & ~mode)
        try:
            sock.bind(str(place))
        finally:
            os.umask(mask)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError as exc:
        sock.close()
        raise AgentError(f"cannot listen at {place}: {exc.strerror or exc}") from exc
    return sock


def _error(exc: BaseException) -> dict[str, Any]:
    code = exc.exit_code if isinstance(exc, CheckpointError) else _BUG
    return {"error": {"code": code, "name": type(exc).__name__, "message": str(exc)}}


async def _say(writer: asyncio.StreamWriter, fields: dict[str, Any]) -> None:
    text = json.dumps({"version": PROTOCOL_VERSION, **fields}, separators=(",", ":"))
    writer.write(text.encode() + b"\n")
    async with asyncio.timeout(_SEND_S):
        await writer.drain()
