# SPDX-License-Identifier: Apache-2.0
"""Dumps that are held, or killed, when all GPU memory is out of the job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from campaigns.rig import Rig, workers
from campaigns.steady_job import SteadyJob
from gpustasis.image.arena import stored_directory

TIMEOUT_S = 30.0


def break_off(rig: Rig, job: SteadyJob, images: Path, *kept: str) -> None:
    """Kill criu, and what the plugin has left beside it but processes named `kept`, when all GPU
    memory is in the images and out of the job."""
    kill_criu = dump_and_stop(rig, job, images)
    for pid in {*workers(images), *workers(stored_directory(images))}:
        if Path(f"/proc/{pid}/comm").read_text().strip() not in kept:
            os.kill(pid, signal.SIGKILL)
    kill_criu()


@dataclass(frozen=True, slots=True)
class HeldDump:
    """criu, whose post-dump script waits: all GPU memory is out of the job. script: its pid.
    may_go: the file that it waits for."""

    criu: subprocess.Popen[bytes]
    script: int
    may_go: Path

    def kill(self) -> None:
        """Kill criu and its script."""
        self.criu.kill()
        self.criu.wait()
        os.kill(self.script, signal.SIGKILL)

    def go_on(self) -> int:
        """Let the script end well, and criu after it. criu's exit status."""
        self.may_go.touch()
        return self.criu.wait(TIMEOUT_S)


def hold_dump(rig: Rig, job: SteadyJob, images: Path, *extra: str) -> HeldDump:
    """Dump until criu runs its post-dump script, which waits."""
    reached, may_go, script = (
        images.with_name(f"{images.name}.{kind}") for kind in ("reached", "may-go", "script")
    )
    script.write_text(
        '#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" = post-dump ] || exit 0\n'
        f"echo $$ >{reached}.part; mv {reached}.part {reached}\n"
        f"while [ ! -e {may_go} ] && kill -0 $PPID; do sleep 0.1; done\n"  # no longer than criu
    )
    script.chmod(0o755)
    criu = rig.start(rig.dump_words(job, images, [*extra, "--action-script", str(script)]))
    deadline = time.monotonic() + TIMEOUT_S
    while not reached.exists():
        assert criu.poll() is None, "criu ended before its post-dump script"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return HeldDump(criu, int(reached.read_text()), may_go)


def dump_and_stop(rig: Rig, job: SteadyJob, images: Path) -> Callable[[], None]:
    """Dump until all GPU memory is out of the job. The result kills criu."""
    return hold_dump(rig, job, images).kill


def recover(rig: Rig, pid: int, *words: str | Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "gpustasis", "recover", str(pid), *words],
        env=dict(rig.environ),
        check=True,
        timeout=60,
    )
