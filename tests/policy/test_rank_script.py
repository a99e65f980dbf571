# SPDX-License-Identifier: Apache-2.0
"""CRIU's action script, where it cannot be told whether a container is a rank of a job. Containers
are in tests/runtimes/test_ranks.py."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from gpustasis.criu.plugin import rank_script
from support.container import Container, container, process_in

TIMEOUT_S = 60.0
WRONG = "is no TOML"


@pytest.fixture
def made() -> Iterator[Container]:
    """Its policy is damaged."""
    with container() as found:
        found.policy.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        found.policy.write_text("[[[")
        found.policy.chmod(0o600)
        yield found


@pytest.fixture
def pid(made: Container) -> Iterator[int]:
    with process_in(made) as found:
        yield found


def start(action: str, pid: int) -> subprocess.Popen[str]:
    """As criu does, which is a shell here."""
    return subprocess.Popen(
        ["/bin/sh", "-c", '"$0"; exit $?', str(rank_script())],
        env={"CRTOOLS_SCRIPT_ACTION": action, "CRTOOLS_INIT_PID": str(pid)},
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("action", ["pre-dump", "post-dump", "post-restore"])
def test_it_is_a_no(pid: int, action: str) -> None:
    with start(action, pid) as criu:
        said = criu.communicate(timeout=TIMEOUT_S)[1]
        assert criu.returncode == 1
        assert WRONG in said and "it cannot be told whether the container is a rank" in said


def test_restored_tasks_stand_until_it_can_be_told(made: Container, pid: int) -> None:
    """CRIU would let them run, whatever the script's status were."""
    with start("pre-resume", pid) as criu:
        assert criu.stderr is not None
        assert "the restored tasks stand until this is mended" in criu.stderr.readline()
        with pytest.raises(subprocess.TimeoutExpired):
            criu.wait(0.5)
        made.policy.unlink()
        assert criu.wait(TIMEOUT_S) == 0


def test_it_does_not_wait_for_tasks_that_have_ended() -> None:
    with subprocess.Popen(["/bin/true"]) as ended:
        ended.wait(TIMEOUT_S)
    with start("pre-resume", ended.pid) as criu:
        criu.communicate(timeout=TIMEOUT_S)
        assert criu.returncode == 1
