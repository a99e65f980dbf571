# SPDX-License-Identifier: Apache-2.0
"""The agent itself: its parts put together, from its start to its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from gpustasis.agent.aftermath import settle
from gpustasis.agent.config import Config
from gpustasis.agent.drains import Drains
from gpustasis.agent.http import Http
from gpustasis.agent.metrics import Metrics
from gpustasis.agent.notify import notify, watchdog_s
from gpustasis.agent.operations import Journal, Operation
from gpustasis.agent.periodic import Periodic
from gpustasis.agent.queue import Queue
from gpustasis.agent.ranks import Ranks
from gpustasis.agent.requests import Requests
from gpustasis.agent.server import Server
from gpustasis.agent.space import free_disk, require_own_way
from gpustasis.agent.threads import in_thread
from gpustasis.errors import AgentError, UnsupportedError
from gpustasis.files import make_directories
from gpustasis.image.arena import Tier
from gpustasis.jobs import server as jobs
from gpustasis.text import mib

log = logging.getLogger(__name__)

_TICK_S = 0.5
_LOOK_S = 30.0  # for what is looked at by the clock
STOP_S = 80.0  # for what is at work; the unit gives the agent longer


class JsonLines(logging.Formatter):
    """A record is one JSON object on a line."""

    def format(self, record: logging.LogRecord) -> str:
        found: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if operation := getattr(record, "operation", None):
            found["operation"] = operation
        if record.exc_info:
            found["traceback"] = self.formatException(record.exc_info)
        return json.dumps(found)


def start_log(level: int) -> None:
    """Records go to stderr, as JSON lines."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.captureWarnings(True)


def run(config: Config) -> None:
    """Until SIGTERM or SIGINT. Raises CheckpointError if it cannot start."""
    if os.geteuid() != 0:
        raise UnsupportedError("the agent dumps processes of others: run it as root")
    sockets = (config.socket, config.http_socket, config.jobs_socket, config.ranks_socket)
    for place in (config.store, *sockets):
        if place is not None:
            require_own_way(place)
    try:
        make_directories(str(config.store.parent), 0o755)
    except OSError as exc:
        raise AgentError(f"cannot make {config.store.parent}: {exc.strerror}") from exc
    journal = Journal(config.store / "operations")
    try:
        asyncio.run(_Agent(config, journal).run())
    finally:
        journal.close()


class _Agent:
    def __init__(self, config: Config, journal: Journal) -> None:
        self._config = config
        self._journal = journal
        self._metrics = Metrics()
        self._queue = Queue(config, journal, self._ended)
        self._drains = Drains(config, self._queue.note_drained)
        unfinished = self._load()
        self._periodic = Periodic(config, self._queue, time.time())
        self._server = Server(config, Requests(config, self._queue, self._periodic.next_due))
        self._http = Http(config, self._metrics, self._queue.counts, self._drains.count)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped = threading.Event()
        # Each by itself: one whose criu or driver does not answer holds up no other.
        self._settling = [
            threading.Thread(target=self._settle, args=(one,), daemon=True) for one in unfinished
        ]

    async def run(self) -> None:
        self._loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, stop.set)
        with contextlib.ExitStack() as held:
            await self._server.start()
            held.callback(self._config.socket.unlink, missing_ok=True)
            await self._http.start()
            held.callback(self._http.close)
            if self._config.jobs_socket is not None:
                store = jobs.Server(self._config.jobs_socket, self._config.store / "jobs.journal")
                held.callback(store.close)
            if self._config.ranks_socket is not None:
                ranks = Ranks(self._config)
                ranks.start()
                held.callback(ranks.close)
            if not self._metrics.is_there:
                log.warning("no metrics: prometheus_client is not installed")
            self._drains.start(self._queue.not_over().__contains__, self._local())
            for thread in self._settling:
                thread.start()
            log.info("ready at %s", self._config.socket)
            notify("READY=1")
            await self._until(stop)
            notify("STOPPING=1")
            log.info("stopping")
            self._stopped.set()
            end = time.monotonic() + STOP_S
            done = await in_thread(partial(self._queue.close, STOP_S))
            if not done:
                log.warning("a checkpoint is still at work: criu ends it without the agent")
            left_s = max(0.0, end - time.monotonic())
            if not await in_thread(partial(self._drains.close, left_s)):
                log.warning("checkpoints are in memory alone: the next agent drains them")
            await asyncio.sleep(0)  # whoever waits hears of the end first
            await self._server.close()
        log.info("stopped")

    async def _until(self, stop: asyncio.Event) -> None:
        beat = watchdog_s()
        last = 0.0
        looking, begun = threading.Thread(target=self._look), 0.0
        while not stop.is_set():
            # A pidfile in a file system that does not answer holds up what is to be done by the
            # clock, not the agent.
            if not looking.is_alive():
                looking, begun = threading.Thread(target=self._look, daemon=True), time.monotonic()
                looking.start()
            elif time.monotonic() > begun + _LOOK_S:
                self._http.wrong = f"a target or the store has not answered for {_LOOK_S:.0f} s"
            if beat is not None and time.monotonic() >= last + min(beat, _TICK_S):
                notify("WATCHDOG=1")
                last = time.monotonic()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(_TICK_S, beat or _TICK_S)):
                    await stop.wait()

    def _look(self) -> None:
        """What is to be done by the clock."""
        try:
            self._periodic.submit_due(time.time())
            self._http.wrong = _why_not_writable(self._config)
        except Exception as exc:
            log.exception("what is to be done by the clock")
            self._http.wrong = f"this is a bug in gpustasis: {exc!r}"

    def _load(self) -> list[Operation]:
        """Those that an agent before this one did not see the end of."""
        unfinished = []
        for operation in self._journal.load():
            self._queue.add_known(operation)
            if not operation.state.is_over:
                unfinished.append(operation)
        return unfinished

    def _local(self) -> list[Path]:
        """Where those are that were in memory when the last agent wrote them down."""
        return [
            Path(one.place)
            for one in self._queue.known()
            if one.figures is not None and one.figures.tier == Tier.LOCAL
        ]

    def _settle(self, operation: Operation) -> None:
        try:
            settle(operation, self._config, self._stopped.is_set)
            if operation.state.is_over:
                with contextlib.suppress(AgentError):
                    self._journal.write(operation)
                self._ended(operation)
            elif not self._stopped.is_set():
                self._add_to_drains(operation)
        except Exception:
            log.exception("what became of operation %s", operation.id)
            self._add_to_drains(operation)
        finally:
            self._queue.settled(operation)
        log.warning("an operation of an agent before", extra={"operation": operation.as_json()})

    def _ended(self, operation: Operation) -> None:
        """In any thread."""
        self._metrics.note(operation)
        self._periodic.note(operation)
        self._add_to_drains(operation)
        if self._loop is not None:
            call: Callable[[Operation], None] = self._server.tell
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(call, operation)

    def _add_to_drains(self, operation: Operation) -> None:
        if operation.place and not operation.subject.engine:
            self._drains.add(Path(operation.place))


def _why_not_writable(config: Config) -> str:
    if not os.access(config.store, os.W_OK):
        return f"{config.store} cannot be written to"
    try:
        free = free_disk(config.store)
    except OSError as exc:
        return f"{config.store}: {exc.strerror}"
    if free < config.disk_reserve:
        return f"{mib(free)} are free in {config.store}, and disk_reserve is more"
    return ""
