# SPDX-License-Identifier: Apache-2.0
"""What downtimes and restores could be here at best: seconds of all that must be done, at the
bandwidths of the same run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gpustasis_bench.bench.bounds import WRITING
from gpustasis_bench.bench.contenders import DIRECT, OURS, OURS_KEPT, RATES, STAGED
from gpustasis_bench.bench.model import (
    PUBLISHED_WAYS,
    Host,
    Predicted,
    Rates,
    Shape,
    Way,
    driver_seconds,
    host_of,
    predict,
    returning_seconds,
    storing_seconds,
)

Parts = dict[str, float]
_DOWN, _STORE, _UP = "the driver, to the host", "storing", "the driver, back"
_PARTS = {
    "down": _DOWN,
    "store": _STORE,
    "drop": "dropping the pages",
    "refill": "putting them back",
    "up": _UP,
}
DRIVER_PARTS = (_DOWN, _UP)
# Direct memory is stored while the driver hands it over, and comes back while the driver takes it:
# named after the slowest of them.
_DISK_MEANWHILE = "the disk, while the driver hands memory over"
_STORING_MEANWHILE = "storing, while the driver hands memory over"
_READING_MEANWHILE = "reading back, while the driver takes memory"
_COPYING_MEANWHILE = "copying back, while the driver takes memory"
_FILLING = "the driver, back: the emulator fills GPU memory"
_READ, _HASH, _LZ4 = "reading the process", "hashing it", "LZ4 of what is new"
_NEW = "writing what is new"


class Limits:
    """Of a report (build/bench.json without `bounds`). A shape is one of its part `downtime`, or a
    content, whose rates are not divided. Where the machine was not measured, nothing is known."""

    def __init__(self, report: Mapping[str, Any]) -> None:
        self._limits: Mapping[str, Any] | None = report["limits"]
        found = report["downtime"] or {}
        self._medium: str = found.get("medium", "-")
        self._scale: float = found.get("scale", 1.0)
        self._media: Mapping[str, str] = report["machine"]["media"]
        # The medium that is a tmpfs; empty: none was measured.
        tmpfs = (each for each, kind in self._media.items() if kind == "tmpfs")
        self._in_memory = next(tmpfs, "")

    def predicted(self, name: str, shape: Mapping[str, Any]) -> Predicted | None:
        """What the model says of a shape, with what a dump of nearly nothing takes."""
        way = PUBLISHED_WAYS[name]
        host = self._host(way, shape, shape["fixed_seconds"][name])
        if host is None:
            return None
        return predict(way, job_of(shape), self._rates(way, shape), host)

    def of_dump(self, name: str, shape: Mapping[str, Any]) -> Parts | None:
        """One after the other, of a dump of ours that leaves the job running; without what another
        setting would save, which is to take staging out of tasks. A disk takes as long as it did in
        the same rounds, and works beside the processors. What goes into memory first has no such
        rounds."""
        way = PUBLISHED_WAYS[name]
        way = replace(way, keeps=not way.direct)
        host = self._host(way, shape)
        if host is None:
            return None
        job, rates = job_of(shape), self._rates(way, shape)
        one = shape["contenders"].get(name, {})
        if not way.in_memory:  # they stand in the rounds, where these have them
            writing = one.get("writing_seconds", job.filled / host.storage)
            reading = one.get("reading_seconds", job.filled / host.read_back)
            host = replace(host, storage=float("inf"), read_back=float("inf"))
        else:
            writing = reading = 0.0
        if not way.direct:
            parts = _named(predict(way, job, rates, host))
            parts[_STORE] = round(max(parts[_STORE], writing), 4)
            return parts
        down, _ = driver_seconds(way, job, rates)
        storing = storing_seconds(way, job, host)
        there = _slowest({_DOWN: down, _STORING_MEANWHILE: storing, _DISK_MEANWHILE: writing})
        back = _slowest({**_back(way, job, rates, host), _READING_MEANWHILE: reading})
        return there | back

    def of_restore(
        self, name: str, shape: Mapping[str, Any], fixed: float, reading: float
    ) -> tuple[Parts, float] | None:
        """What a restore must do, and seconds of all of it. The emulator's GPU memory is a file in
        memory of this machine, one for each GPU, that it makes and fills within the driver's time.
        reading: how long the images took to read from the disk; 0: they are in memory, and are
        written from where they lie."""
        way = PUBLISHED_WAYS[name]
        way = replace(way, in_memory=not reading)
        host = self._host(way, shape)
        if host is None:
            return None
        job = job_of(shape)
        back = _slowest(_back(way, job, self._rates(way, shape), host))
        (driver,) = back.values()
        parts = {"all but the bytes": fixed} | back
        if reading:
            parts[f"reading from {self._medium}"] = round(reading, 4)
        if way.direct:  # the driver takes what was read while more is read
            return parts, fixed + max(driver, reading)
        # It never takes what is not in the task; a disk works while processors write it there.
        writing = job.filled / host.refill
        parts[WRITING] = round(writing, 4)
        return parts, fixed + max(writing, reading) + driver

    def of_second(
        self, name: str, second: Mapping[str, Any], one: Mapping[str, Any]
    ) -> tuple[Parts, float] | None:
        """What an incremental dump must do without the driver, and seconds of all of it: all memory
        is read and hashed, and what is new is stored. On the way to a disk it is tried with LZ4, in
        memory it is not."""
        limits = self._limits
        if limits is None:
            return None
        read = limits["read_process"]
        threads = max(map(int, read))
        parts = {
            _READ: second["gpu_bytes"] / max(read.values()),
            _HASH: second["gpu_bytes"] / limits["xxh3"] / threads,
        }
        plain, stored = one.get("new_plain_bytes", 0), one.get("new_stored_bytes", 0)
        to_disk = name in (OURS, OURS_KEPT)
        if to_disk:
            parts[_LZ4] = plain / limits["lz4_random"] / threads
        seconds = sum(parts.values())
        if to_disk and self._media.get(self._medium) != "tmpfs":  # it works beside the processors
            parts[_NEW] = stored / max(limits[self._medium]["write"].values())
            seconds = max(seconds, parts[_NEW])
        elif to_disk or self._in_memory:
            tmpfs = limits[self._medium]["write"] if to_disk else limits[self._in_memory]["rewrite"]
            parts[_NEW] = stored / max(tmpfs.values())
            seconds += parts[_NEW]
        return {part: round(value, 4) for part, value in parts.items() if value}, seconds

    def _host(self, way: Way, shape: Mapping[str, Any], fixed: float = 0.0) -> Host | None:
        if self._limits is None or not self._in_memory or shape.get("rates") == "off":
            return None
        limits = dict(self._limits)
        return host_of(limits, self._medium, self._in_memory, fixed, job_of(shape), way)

    def _rates(self, way: Way, shape: Mapping[str, Any]) -> Rates:
        """Of the driver; those of contents, which have no `rates`, are not divided."""
        stage = DIRECT if way.direct else STAGED
        return RATES[stage].divided(self._scale if "rates" in shape else 1.0)


def job_of(shape: Mapping[str, Any]) -> Shape:
    """nonzero_bytes: of a content; shapes hold noise."""
    tasks, gpus, size = shape.get("tasks", 1), shape.get("gpus", 1), shape["gpu_bytes"]
    share = shape.get("nonzero_bytes", size) / size
    return Shape(tasks=tasks, gpus=gpus, size=size / tasks / gpus, filled_share=share)


def _back(way: Way, job: Shape, rates: Rates, host: Host) -> Parts:
    """Side by side, what the way back onto the GPUs takes."""
    _, up = driver_seconds(way, job, rates)
    if not way.direct:
        return {_UP: up, _FILLING: job.filled / host.unstage}
    copying = returning_seconds(way, job, host)
    return {_UP: up, _COPYING_MEANWHILE: copying, _FILLING: job.filled / host.filled}


def _slowest(parts: Parts) -> Parts:
    """It alone. Of those that take the same time the first."""
    name = max(parts, key=lambda part: parts[part])
    return {name: round(parts[name], 4)}


def _named(predicted: Predicted) -> Parts:
    parts = predicted.as_dict()
    return {title: parts[key] for key, title in _PARTS.items() if parts[key]}
