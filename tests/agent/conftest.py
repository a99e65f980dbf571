# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests of the agent.

agents   agents(lines="", config={}) -> support.agent.Agent, started: with the newest CRIU, on the
         emulator; ends with the test. config: of the plugin, for the whole host
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from campaigns.rig import CONFIG_NAME
from gpustasis.criu.plugin import Setting, format_config
from support.agent import Agent
from support.criu_roots import newest_criu


@pytest.fixture
def agents(emulator_environ: dict[str, str]) -> Iterator[Callable[..., Agent]]:
    made: list[Agent] = []
    with TemporaryDirectory(prefix="agent-") as name:  # short: a socket's path may not be long

        def start(
            lines: str = "", *, ready: bool = True, config: Mapping[str, Setting] | None = None
        ) -> Agent:
            place = Path(name) / str(len(made))
            place.mkdir(mode=0o755)
            environ = dict(emulator_environ)
            if config is not None:
                (place / CONFIG_NAME).write_text(format_config(config))
                environ["GPUSTASIS_CONFIG"] = str(place / CONFIG_NAME)
            made.append(Agent(place, environ, newest_criu(), lines))
            return made[-1].start(ready)

        Path(name).chmod(0o755)
        yield start
        for agent in made:
            agent.close()


@pytest.fixture(scope="module")
def module_agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    """One for all tests of a file, which ask it for nothing that it does."""
    with TemporaryDirectory(prefix="agent-") as name:
        agent = Agent(Path(name), dict(os.environ), newest_criu())
        yield agent.start()
        agent.close()
