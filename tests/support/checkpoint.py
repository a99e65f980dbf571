# SPDX-License-Identifier: Apache-2.0
"""Dump and restore a job with the package's plugin, as the command line does, and check it."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpustasis.criu import run
from gpustasis.criu.find import Criu
from gpustasis.criu.plugin import Scalar, plugin_directory
from support.job import Job
from support.pids import await_free


@dataclass(frozen=True, slots=True)
class Checkpointer:
    """One CRIU, and the environment (the emulator's) that it and the plugin run in."""

    criu: Criu
    environ: Mapping[str, str] = field(repr=False)

    def dump(self, job: Job, images: Path, **options: Any) -> run.Run:
        """Dump `job`. Options: leave_running, leave_stopped; plugin (a dict) and the other fields
        of gpustasis.criu.run.Settings. A job that the dump ends is reaped."""
        lives = options.get("leave_running", False) or options.get("leave_stopped", False)
        leave = {
            key: options.pop(key) for key in ("leave_running", "leave_stopped") if key in options
        }
        outcome = run.dump(self.criu, job.pid, images, self._settings(options), **leave)
        if not lives:
            assert job.wait() == -signal.SIGKILL
        return outcome

    def restore(self, job: Job, images: Path, **options: Any) -> run.Run:
        """Restore the tree of `job`, which must have ended; options as for dump."""
        await_free(images)
        outcome = run.restore(self.criu, images, self._settings(options))
        assert outcome.pid == job.pid
        return outcome

    def dump_command(
        self, job: Job, images: Path, *extra: str, config: Path | None = None
    ) -> tuple[list[str], dict[str, str]]:
        """Argument list and environment of the same dump, for a test that runs criu itself (and
        kills it, say). The log is images/dump.log."""
        request = run.Dump(
            pid=job.pid,
            images=images,
            log=images / "dump.log",
            plugin_dir=plugin_directory(self.environ),
            config=config,
            extra=extra,
        )
        arguments = run.dump_arguments(request, self.criu.version)
        return self._words(arguments), self._environment(config)

    def _settings(self, options: dict[str, Any]) -> run.Settings:
        plugin: Mapping[str, Scalar] | None = options.pop("plugin", None)
        return run.Settings(plugin=plugin, environ=self.environ, **options)

    def _words(self, arguments: list[str]) -> list[str]:
        return [*self.criu.command(self.environ), *arguments]

    def _environment(self, config: Path | None) -> dict[str, str]:
        return dict(self.environ) | run.plugin_environment(config, self.criu.version)
