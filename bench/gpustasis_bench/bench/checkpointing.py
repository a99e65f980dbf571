# SPDX-License-Identifier: Apache-2.0
"""Dump and restore a target as one contender does it, and take the times of both."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpustasis.criu import run
from gpustasis.criu.find import Criu
from gpustasis.criu.plugin import Setting, format_config, plugin_directory
from gpustasis.criu.statistics import Stage, statistics_path
from gpustasis_bench.bench.contenders import Contender
from gpustasis_bench.bench.criu_statistics import frozen_seconds
from gpustasis_bench.bench.target import Target
from gpustasis_bench.bench.timing import TimedRun, run_timed
from gpustasis_bench.errors import BenchError

_TIMEOUT_S = 900.0
# Phases in which the driver, not criu or the plugin, is at work; docs/operating.md lists all.
_DRIVER_PREFIX = "driver_"
_DRIVER_PHASES = ("lock", "unlock", "check_machine")
_BEFORE_LOCK = ("driver_facts",)  # of a dump
_OWN_RECORDS = (".log", ".json")  # kept beside the images, no part of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Dumped:
    """seconds and frozen_seconds: without driver_seconds. criu_seconds: without the tool after it,
    too. standing_driver_seconds: of driver_seconds, from lock to unlock. cpu_seconds: user and
    system, of criu, worker and guardians. stored_bytes: all files.

    record: the plugin's statistics.
    """

    seconds: float
    criu_seconds: float
    frozen_seconds: float
    driver_seconds: float
    standing_driver_seconds: float
    cpu_seconds: float
    stored_bytes: int
    peak_rss_bytes: int
    record: dict[str, Any]

    @property
    def staged_bytes(self) -> int:
        return sum(int(task["staged_bytes"]) for task in self.record["tasks"])

    @property
    def cpu_bytes(self) -> int:
        """CPU memory that the plugin stored."""
        return sum(int(task["bytes"]) for task in self.record.get("cpu_memory", []))

    def count(self, encoding: str) -> int:
        """Chunks stored as "zero", "lz4", "raw" or "ref"."""
        return sum(int(task[encoding]["chunks"]) for task in self.record["tasks"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """seconds: without driver_seconds. cpu_seconds: as of Dumped."""

    seconds: float
    driver_seconds: float
    cpu_seconds: float
    peak_rss_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointing:
    """criu, the environment it and the plugin run in, and a folder for logs, in which nothing is
    measured. settings: keys of the plugin's configuration that hold for all contenders."""

    criu: Criu
    environ: Mapping[str, str] = field(repr=False)
    logs: Path
    settings: Mapping[str, Setting] = field(default_factory=dict)

    def dump(
        self,
        target: Target,
        images: Path,
        contender: Contender,
        parent: Path | None = None,
        *,
        leave_running: bool = False,
    ) -> Dumped:
        """Dump `target` into the new folder `images`; it is killed by that, unless left running.

        parent: the earlier checkpoint that chunks may be taken from. Raises BenchError.
        """
        images.mkdir(mode=0o700)
        plugin = {**self.settings, **contender.plugin}
        if parent is not None:
            plugin["parent"] = str(parent.absolute())
        config = self._config(plugin) if contender.with_plugin else None
        request = run.Dump(
            pid=target.pid,
            images=images.absolute(),
            log=self.logs / "dump.log",
            plugin_dir=self._plugin_dir(contender),
            config=config,
            extra=contender.dump_options,
            leave_running=leave_running,
        )
        ran = self._run(run.dump_arguments(request, self.criu.version), config, request.log)
        if not leave_running:
            target.await_killed()
        record = _read_record(images, "dump", target.gpu_tasks)
        if parent is not None and record.get("parent") is None:
            raise BenchError(f"{images} is a full checkpoint: {record.get('full_because')}")
        driver = driver_seconds(record)
        packed = None
        if contender.codec is not None:
            packed = contender.codec.pack(images, self.logs / "codec.txt")
        return Dumped(
            seconds=ran.seconds - driver + (packed.seconds if packed else 0.0),
            criu_seconds=ran.seconds - driver,
            frozen_seconds=frozen_seconds(images) - driver,
            driver_seconds=driver,
            standing_driver_seconds=driver_seconds(record, but=_BEFORE_LOCK),
            cpu_seconds=ran.cpu_seconds,
            stored_bytes=stored_bytes(images),
            peak_rss_bytes=max(ran.peak_rss_bytes, packed.peak_rss_bytes if packed else 0),
            record=record,
        )

    def restore(self, target: Target, images: Path, contender: Contender) -> Restored:
        """Restore `target`, which is dead, from `images`. Raises BenchError."""
        unpacked = None
        if contender.codec is not None:
            unpacked = contender.codec.unpack(images, self.logs / "codec.txt")
        config = None
        if contender.with_plugin:
            config = self._config({**self.settings, **contender.plugin})
        pidfile = self.logs / "pid"
        pidfile.unlink(missing_ok=True)
        request = run.Restore(
            images=images.absolute(),
            log=self.logs / "restore.log",
            plugin_dir=self._plugin_dir(contender),
            config=config,
            extra=contender.restore_options,
            pidfile=pidfile,
        )
        ran = self._run(run.restore_arguments(request, self.criu.version), config, request.log)
        target.expect_restored(int(pidfile.read_text()))
        driver = driver_seconds(_read_record(images, "restore", target.gpu_tasks))
        return Restored(
            seconds=ran.seconds - driver + (unpacked.seconds if unpacked else 0.0),
            driver_seconds=driver,
            cpu_seconds=ran.cpu_seconds,
            peak_rss_bytes=max(ran.peak_rss_bytes, unpacked.peak_rss_bytes if unpacked else 0),
        )

    def _plugin_dir(self, contender: Contender) -> Path:
        if contender.with_plugin:
            return plugin_directory(self.environ)
        empty = self.logs / "no-plugin"
        empty.mkdir(exist_ok=True)
        return empty

    def _config(self, plugin: Mapping[str, Setting]) -> Path:
        # Always a file of ours: what the machine has in /etc/gpustasis is not to be measured.
        path = self.logs / "config.toml"
        path.write_text(format_config(plugin), encoding="utf-8")
        return path

    def _run(self, arguments: list[str], config: Path | None, log: Path) -> TimedRun:
        log.unlink(missing_ok=True)
        environ = dict(self.environ) | run.plugin_environment(config, self.criu.version)
        words = [*self.criu.command(self.environ), *arguments]
        output = self.logs / "output.txt"
        try:
            return run_timed(words, environ, output, _TIMEOUT_S, with_worker=True)
        except BenchError as exc:
            text = log.read_text(errors="replace") if log.exists() else ""
            errors = [line for line in text.splitlines() if "Error" in line][:4]
            kept = log.with_name(f"failed-{log.name}")
            if text:
                log.replace(kept)
            raise BenchError("\n  ".join([str(exc), *errors, f"log: {kept}"])) from exc


def driver_seconds(record: dict[str, Any], but: Collection[str] = ()) -> float:
    """What a dump or restore spent in calls of the driver, from the plugin's statistics. but:
    phases that are not counted."""
    phases = [record["phases_ms"], *(task["phases_ms"] for task in record["tasks"])]
    return sum(
        float(milliseconds) / 1000
        for each in phases
        for name, milliseconds in each.items()
        if (name.startswith(_DRIVER_PREFIX) or name in _DRIVER_PHASES) and name not in but
    )


def stored_bytes(images: Path) -> int:
    """The bytes of a checkpoint's files, without logs and statistics."""
    files = (path for path in images.iterdir() if path.is_file())
    return sum(path.stat().st_size for path in files if path.suffix not in _OWN_RECORDS)


def _read_record(images: Path, stage: Stage, tasks: int) -> dict[str, Any]:
    path = statistics_path(images, stage)
    if tasks == 0 and not path.exists():  # nothing was for the plugin to do, or there was none
        return {"tasks": [], "phases_ms": {}}
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise BenchError(f"the plugin left no statistics of the {stage}: {exc}") from exc
    if record["result"] != "ok" or len(record["tasks"]) != tasks:
        raise BenchError(f"{path}: {record['error'] or f'not {tasks} CUDA processes'}")
    return record
