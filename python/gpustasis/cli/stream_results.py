# SPDX-License-Identifier: Apache-2.0
"""What the commands of streams say when they are done."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpustasis.cli.options import describe
from gpustasis.criu.find import find
from gpustasis.criu.run import Run
from gpustasis.streaming.send import Sent


def dump_of(sent: Sent, pid: int, options: dict[str, Any]) -> Run:
    """The dump; of a criu that has ended the job, and failed only then, what is known of it."""
    if sent.dump is not None:
        return sent.dump
    version = find(options.get("criu")).version_text
    return Run(
        pid=pid,
        criu_version=version,
        log=sent.images / "dump.log",
        seconds=sent.seconds,
        statistics=None,
    )


def describe_sent(sent: Sent) -> str:
    """What became of memory, for a line of text."""
    if sent.dump is None:
        return "criu failed after it had ended the job, and left no statistics"
    return describe(sent.dump.statistics)


def run_fields(done: Run, directory: Path | None) -> dict[str, Any]:
    """directory: where the checkpoint is; its log with it. None: nowhere any more."""
    log = done.log if done.log.exists() else None
    return {**asdict(done), "directory": directory, "log": log}


def sent_fields(sent: Sent, name: str) -> dict[str, Any]:
    """Of what was sent, for JSON."""
    return {
        "to": name,
        "stream_id": sent.stream_id.hex(),
        "files": sent.files,
        "bytes": sent.bytes,
        "spool": sent.spool,
        "restored": sent.restored,
    }
