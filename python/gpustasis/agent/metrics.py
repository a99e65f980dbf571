# SPDX-License-Identifier: Apache-2.0
"""Figures for Prometheus. Needs the extra `agent`; without it nothing is counted.

No label holds what a client has chosen: their number is bounded by the configuration.
"""

from __future__ import annotations

import importlib
from typing import Any

from gpustasis.agent.operations import Operation, State
from gpustasis.text import extra

MISSING = f"prometheus_client is not installed: {extra('agent')}"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
_PREFIX = "gpustasis_checkpoint_"


class Metrics:
    """Of this agent, since it began."""

    def __init__(self) -> None:
        try:
            self._client: Any = importlib.import_module("prometheus_client")
        except ImportError:
            self._client = None
            return
        made = self._client
        self._registry = made.CollectorRegistry()
        keys: dict[str, Any] = {"registry": self._registry}
        label = ["target"]
        self._duration = made.Histogram(
            f"{_PREFIX}duration_seconds",
            "From the begin of a checkpoint to its end",
            label,
            buckets=_SECONDS,
            **keys,
        )
        self._downtime = made.Histogram(
            f"{_PREFIX}downtime_seconds",
            "How long the job stood for a checkpoint",
            label,
            buckets=_SECONDS,
            **keys,
        )
        self._size = made.Gauge(f"{_PREFIX}size_bytes", "Memory in the last one", label, **keys)
        self._stored = made.Gauge(
            f"{_PREFIX}stored_bytes", "What the last one takes on the disk", label, **keys
        )
        self._last = made.Gauge(
            f"{_PREFIX}last_success_timestamp_seconds", "When the last one ended", label, **keys
        )
        self._total = made.Counter(
            f"{_PREFIX}operations", "All, by how they ended", ["operation", "result"], **keys
        )
        self._waiting = made.Gauge("gpustasis_agent_waiting", "Operations in the queue", **keys)
        self._at_work = made.Gauge("gpustasis_agent_at_work", "Operations at work", **keys)
        self._local = made.Gauge(
            "gpustasis_agent_local", "Checkpoints that are in memory, to be drained", **keys
        )
        for result in (one for one in State if one.is_over):
            self._total.labels("checkpoint", result.value)

    @property
    def is_there(self) -> bool:
        return self._client is not None

    def note(self, operation: Operation) -> None:
        """One that has ended."""
        if self._client is None:
            return
        self._total.labels("checkpoint", operation.state.value).inc()
        figures = operation.figures
        if operation.state is not State.DONE or figures is None:
            return
        target = operation.target
        self._duration.labels(target).observe(figures.duration_s)
        if figures.downtime_s is not None:
            self._downtime.labels(target).observe(figures.downtime_s)
        self._size.labels(target).set(figures.size_bytes)
        self._stored.labels(target).set(figures.stored_bytes)
        self._last.labels(target).set(operation.ended)

    def text(self, waiting: int, at_work: int, local: int) -> bytes:
        """All of them, as Prometheus reads them."""
        self._waiting.set(waiting)
        self._at_work.set(at_work)
        self._local.set(local)
        found: bytes = self._client.generate_latest(self._registry)
        return found
