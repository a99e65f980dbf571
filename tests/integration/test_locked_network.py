# SPDX-License-Identifier: Apache-2.0
"""A job with a network namespace of its own, which CRIU locks while it dumps: whatever a dump fails
for, the network is open again when the job runs on. CRIU unlocks it in a child, which inherits what
went wrong before."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from campaigns.rig import Rig, small_filesystem
from campaigns.steady_job import SteadyJob
from support.packet_filters import put_iptables

# Within the namespace. What a locked network drops is asked for again for seconds.
ASK = """
import socket, sys
with socket.create_server(("127.0.0.1", 0)) as server:
    socket.create_connection(server.getsockname(), timeout=float(sys.argv[1])).close()
"""
ASK_S = 5.0
KIB = 1 << 10


@pytest.fixture(params=["iptables", "nftables"])
def lock(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """By programs that CRIU runs, or by a library that it is linked with."""
    return ("--network-lock", str(request.param))


@pytest.fixture
def net_rig(newest_rig: Rig) -> Rig:
    """Its CRIU finds iptables."""
    programs = newest_rig.scratch / "bin"
    put_iptables(programs)
    path = f"{programs}:{newest_rig.environ.get('PATH', os.defpath)}"
    return replace(newest_rig, environ=dict(newest_rig.environ) | {"PATH": path})


@contextmanager
def networked(rig: Rig) -> Iterator[SteadyJob]:
    program = rig.scratch / "networked_job"
    program.write_text(
        "#!/bin/sh\nexec unshare --net sh -c 'ip link set lo up && exec \"$@\"' sh "
        f'{rig.programs.job} "$@"\n'
    )
    program.chmod(0o755)
    job = SteadyJob(program, rig.scratch / "networked.log", rig.environ, mib=4)
    try:
        yield job
    finally:
        job.end()


def answers(job: SteadyJob, timeout_s: float = ASK_S) -> bool:
    words = ["nsenter", f"--net=/proc/{job.pid}/ns/net", sys.executable, "-c", ASK, str(timeout_s)]
    return subprocess.run(words, stderr=subprocess.DEVNULL, timeout=60, check=False).returncode == 0


def test_a_locked_network_does_not_answer(net_rig: Rig, lock: tuple[str, ...]) -> None:
    """What the others look at can be seen."""
    rig = net_rig
    with networked(rig) as job:
        assert answers(job)
        seen, script = rig.scratch / "seen", rig.scratch / "script"
        script.write_text(
            '#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" = post-dump ] || exit 0\n'
            f"nsenter --net=/proc/{job.pid}/ns/net {sys.executable} -c '{ASK}' 1 2>{seen}\nexit 0\n"
        )
        script.chmod(0o755)
        words = ("--leave-running", *lock, "--action-script", str(script))
        dumped = rig.dump(job, rig.images(), *words)
        assert dumped.status == 0, dumped.errors
        assert "TimeoutError" in seen.read_text()
        assert answers(job)
        job.run_on()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("leave", [("--leave-running",), ()])
def test_a_full_disk_leaves_the_network_open(
    net_rig: Rig, lock: tuple[str, ...], leave: tuple[str, ...]
) -> None:
    rig = net_rig
    cut = 0
    with networked(rig) as job:
        for number, room in enumerate(range(64, 20_000, 256)):
            with small_filesystem(rig.scratch / f"{number}-full", room * KIB, 0) as images:
                dumped = rig.dump(job, images, *leave, *lock)
                rig.settle(images)
                if dumped.status == 0:
                    break
                assert answers(job), (room, dumped.errors)
                job.run_on()
                cut += "Error flushing image" in dumped.log
        else:
            raise AssertionError("the dump never succeeds")
    assert cut > 0
