# SPDX-License-Identifier: Apache-2.0
"""What the agent answers at its socket for CRIU's action script. Containers are in
tests/runtimes/test_ranks.py."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from gpustasis import policy
from support.agent import Agent, say

ID = "0123456789abcdef" * 4
LINE = f"pre-dump {ID} 1 /proc/1/fd/5\n"


@pytest.fixture
def agent(agents: Callable[..., Agent]) -> Agent:
    return agents()


@pytest.mark.parametrize(
    "said",
    [
        *("", "\n", "pre-dump\n", LINE.upper(), LINE[:-1], LINE * 2),
        *(f"{LINE[:-1]}/..\n", LINE.replace("pre-dump", "post-resume"), "\0" * 5000),
        *(
            LINE.replace("/proc/1/fd/5", "/etc"),
            LINE.replace(" 1 ", " -1 "),
            LINE.replace(ID, ".."),
        ),
    ],
)
def test_what_no_script_says_is_a_no(agent: Agent, said: str) -> None:
    answer = say(agent.place / "ranks.sock", said.encode()).decode()
    assert answer == "no this agent does not know what the action script has said\n"


@pytest.mark.parametrize("action", ["post-dump", "pre-resume"])
def test_tasks_that_stand_are_told_nothing_else_than_what_was_decided(
    agent: Agent, action: str
) -> None:
    """The agent cannot tell what that is; after a no they would run. The script asks again."""
    for said in (f"{action} {ID} 1 /proc/1/fd/5\n", f"{action} in other words\n"):
        assert say(agent.place / "ranks.sock", said.encode()) == b""


def test_a_container_without_a_policy_is_a_no(agent: Agent) -> None:
    assert not Path(policy.POLICY_DIRECTORY, f"{ID}.toml").exists()
    answer = say(agent.place / "ranks.sock", LINE.encode()).decode()
    assert answer == f"no container {ID} is no rank of a job any more\n"


def test_only_its_owner_gets_there(agent: Agent) -> None:
    found = (agent.place / "ranks.sock").stat()
    assert (stat.S_IMODE(found.st_mode), found.st_uid) == (0o600, os.geteuid())
